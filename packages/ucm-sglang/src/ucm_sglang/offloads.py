"""Offloads: all pools of a node, kept together or not at all, told of in the order in which they began.

SGLang holds a node's memory until it is told. So an offload ends after `OFFLOAD_WAIT_S` at the latest, and
its memory is not read any more when it has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ucm_core.errors import StoreError
from ucm_core.flow.ticket import Ticket
from ucm_core.ops import border
from ucm_core.spec.keys import Keys
from ucm_sglang.page_cache import View

__all__ = ["NOT_KEPT", "OFFLOAD_WAIT_S", "Offload", "Offloads"]

OFFLOAD_WAIT_S = 60.0
"""How long one offload may take before it has failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Offload:
    """What one node keeps."""

    view: View | None
    """Whose stores keep it; None: nothing does."""
    rows: Mapping[str, tuple[Keys, Ticket]] = field(default_factory=dict)
    """Per row the keys and the ticket of its save."""
    whole: bool = False
    """Whether the saves of all rows could begin."""
    ends_s: float = 0.0
    """When it is given up, on the monotonic clock."""

    @property
    def done(self) -> bool:
        """Whether its memory is not read any more."""
        return all(ticket.done for _, ticket in self.rows.values())

    def wait(self, deadline_s: float) -> None:
        """Wait until it is done, until ``deadline_s`` on the monotonic clock."""
        for _, ticket in self.rows.values():
            ticket.wait(max(0.0, deadline_s - time.monotonic()))

    def give_up(self) -> None:
        """Keep no more of it; waits for what is being copied, not for a medium."""
        late = [ticket for _, ticket in self.rows.values() if not ticket.done]
        if late:
            error = StoreError(
                f"{len(late)} of {len(self.rows)} rows of a node could not be gathered in time"
            )
            border.failed("offload", error)
        for ticket in late:
            ticket.abandon()
        for ticket in late:
            ticket.wait()

    def judge(self) -> bool:
        """Whether all of it was kept; what was may be asked for from now on."""
        if self.view is not None:
            for row, (keys, ticket) in self.rows.items():
                self.view.space.coordinator.saved(row, keys[ticket.stored])
        return self.whole and all(ticket.ok for _, ticket in self.rows.values())


NOT_KEPT = Offload(None)
"""One that is over, and kept nothing."""


class Offloads:
    """Offloads that SGLang has not heard of yet, the oldest first; for its scheduler thread."""

    def __init__(self) -> None:
        self._begun: deque[Offload] = deque()

    def begin(self, offload: Offload) -> None:
        """Add one."""
        self._begun.append(offload)

    def completed(self) -> int:
        """How many of the oldest are over."""
        count = 0
        for offload in self._begun:
            if not offload.done and offload.ends_s <= time.monotonic():
                offload.give_up()
            if not offload.done:
                break
            count += 1
        return count

    def pop(self) -> Offload:
        """Take the oldest; StoreError where none is over."""
        if not self._begun or not self._begun[0].done:
            raise StoreError(f"none of {len(self._begun)} offloads is over: ask how many are first")
        return self._begun.popleft()

    def reset(self, wait_s: float) -> None:
        """End all of them within ``wait_s`` and forget them; their memory is not read any more then."""
        begun, self._begun = self._begun, deque()
        deadline_s = time.monotonic() + wait_s
        for offload in begun:
            offload.wait(deadline_s)
        for offload in begun:
            offload.give_up()
            offload.judge()
