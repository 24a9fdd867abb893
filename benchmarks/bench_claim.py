"""Claim and release of a hit: one by one from C++, 1000 a call from Python."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import numpy as np

from benchmarks.frame import WALL, Cost, Figure, allowed, compare, in_turns, timed, within
from benchmarks.rig import Bytes, Neighbour, page_memory, some_keys
from ucm_core.store.geometry import Geometry
from ucm_core.store.ring import Outcome, Ring

BLOCKS, BATCH = 1000, 64
SLOTS = BLOCKS * 9 // 8
"""A sixteenth of the slots is kept for demand loads."""
MOST_NS, MOST_S = 300.0, 100e-6


def figures() -> Iterator[Figure]:
    """From C++, in a ring that fits processor caches and in one that does not; then from Python."""
    for slots in (BLOCKS, 50 * BLOCKS):
        with Neighbour("claims", str(slots)) as neighbour:
            costs = in_turns({"ours": neighbour.round()}, times=99)["ours"]
        each_ns = statistics.median(cost.wall_s for cost in costs) / slots * 1e9
        yield allowed(f"claim + release of a hit, ring of {slots}, C++", each_ns, MOST_NS, unit="ns")
    yield from_python()
    yield new_blocks()


def from_python() -> Figure:
    """`Ring.claim` and `Ring.release` of a batch."""
    keys = some_keys(BLOCKS)
    with Ring.open(None, slots=SLOTS, payload_bytes=4096, geometry_digest=bytes(32)) as ring:
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


def new_blocks() -> Figure:
    """What changes the structure, under its lock: each of 64 blocks evicts another; beside their copies."""
    source, target = (page_memory(BATCH, Geometry(1, 1 << 16)) for _ in range(2))
    seeds = itertools.count()
    with Ring.open(None, slots=SLOTS, payload_bytes=4096, geometry_digest=bytes(32)) as ring:

        def claim() -> Cost:
            keys = some_keys(BATCH, next(seeds))
            return timed(lambda: fill(ring, keys))()

        for _ in range(SLOTS // BATCH):
            claim()
        costs = in_turns({"ours": claim, "copy": timed(lambda: np.copyto(target, source))}, times=99)
        assert ring.statistics().evictions > BATCH
    return compare(
        f"claim + publish + release of {BATCH} new blocks",
        costs["ours"], costs["copy"], peer="memcpy of 64 KiB each", limit=None, measure=WALL,
    )  # fmt: skip


def fill(ring: Ring, keys: Bytes) -> None:
    claims = ring.claim(keys)
    assert ring.publish(claims.slots).all()
    ring.release(claims.slots)
