"""Opening a ring of 1 GiB and filling a tenth of it, with memory taken slot by slot and all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.frame import PROCESSOR, Cost, Figure, compare, in_turns, timed
from benchmarks.rig import some_keys
from ucm_core.store.ring import Ring, RingOptions

SLOTS, PAYLOAD_BYTES = 1024, 1 << 20
KEYS = some_keys(SLOTS // 10)


def figures() -> Iterator[Figure]:
    """Open alone, then the first claims."""
    for what, pick in {"opening a ring of 1 GiB": 0, "first claims of a tenth of it": 1}.items():
        rounds = {
            name: part(RingOptions(prefault=prefault), pick)
            for name, prefault in {"lazy": False, "prefault": True}.items()
        }
        costs = in_turns(rounds, times=3)
        yield compare(what, costs["lazy"], costs["prefault"], peer="prefault", limit=None, measure=PROCESSOR)


def part(options: RingOptions, pick: int) -> Callable[[], Cost]:
    """The cost of opening, or of claiming and touching every page claimed."""

    def round_() -> Cost:
        rings: list[Ring] = []
        opening = timed(lambda: rings.append(open_ring(options)))()
        with rings[0] as ring:
            claiming = timed(lambda: ring.abort(ring.claim(KEYS).slots))()
        return (opening, claiming)[pick]

    return round_


def open_ring(options: RingOptions) -> Ring:
    return Ring.open(
        None, slots=SLOTS, payload_bytes=PAYLOAD_BYTES, geometry_digest=bytes(32), options=options
    )
