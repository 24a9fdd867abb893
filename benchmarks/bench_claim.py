"""Claim and release of a hit: one by one from C++, 1000 a call from Python."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.frame import Figure, allowed, in_turns, within
from benchmarks.rig import Neighbour, some_keys
from ucm_core.store.ring import Outcome, Ring

BLOCKS = 1000
MOST_NS, MOST_S = 300.0, 100e-6


def figures() -> Iterator[Figure]:
    """From C++, in a ring that fits processor caches and in one that does not; then from Python."""
    for slots in (BLOCKS, 50 * BLOCKS):
        with Neighbour("claims", str(slots)) as neighbour:
            costs = in_turns({"ours": neighbour.round()}, times=99)["ours"]
        each_ns = statistics.median(cost.wall_s for cost in costs) / slots * 1e9
        yield allowed(f"claim + release of a hit, ring of {slots}, C++", each_ns, MOST_NS, unit="ns")
    yield from_python()


def from_python() -> Figure:
    """`Ring.claim` and `Ring.release` of a batch."""
    keys = some_keys(BLOCKS)
    with Ring.open(None, slots=BLOCKS, payload_bytes=4096, geometry_digest=bytes(32)) as ring:
        claims = ring.claim(keys)
        ring.publish(claims.slots)
        ring.release(claims.slots)
        assert (ring.claim(keys).outcome == Outcome.READY).all()
        return within(
            f"claim + release of {BLOCKS} hits, Python",
            lambda: ring.release(ring.claim(keys).slots),
            limit_s=MOST_S,
            rounds=99,
        )
