"""Wrong edits of what becomes of loads and saves that are given up; see `mutants`."""

from __future__ import annotations

TICKET, HUNG = "flow/test_ticket.py", "store/test_hung_medium.py"

GIVEN_UP: dict[str, list[tuple[str, str, str, tuple[str, ...]]]] = {
    "flow/ticket.py": [
        (
            "free memory that is being copied",
            "        if not copying:\n",
            "        if True:\n",
            (TICKET, HUNG),
        ),
        (
            "copy to memory that was given back",
            "begins = not self._abandoned",
            "begins = True",
            (TICKET, HUNG),
        ),
        (
            "never end what was copied at the end",
            "            if ends:\n",
            "            if False:\n",
            (TICKET,),
        ),
    ],
    "store/loading.py": [
        ("load what was given up", "        if not wanted:\n", "        if False:\n", (HUNG,)),
        ("load hits that were given up", "if wanted and not tiers", "if not tiers", (HUNG,)),
    ],
    "store/unit_load.py": [
        (
            "load units that were given up",
            "                if not wanted:\n",
            "                if False:\n",
            (HUNG,),
        ),
    ],
    "store/saving.py": [
        ("save what was given up", "            if wanted:\n", "            if True:\n", (HUNG,)),
        (
            "keep what was read while it was given up",
            "            if self._ticket.cancelled:\n                codes",
            "            if False:\n                codes",
            (HUNG,),
        ),
        ("publish what is read on another thread", "not self._on_io_thread", "True", (HUNG,)),
    ],
    "store/unit_save.py": [
        (
            "gather units that were given up",
            "                if not wanted:\n",
            "                if False:\n",
            (HUNG,),
        ),
        (
            "publish units that were given up",
            "not (self._waiting or self.ticket.cancelled)",
            "not self._waiting",
            (HUNG,),
        ),
    ],
}
