"""Blocks that the ring holds, or that go into it: copies through the public store, against memcpy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.frame import Cost, Figure, Round, compare, in_turns, processor_per_gb, rate, timed
from benchmarks.rig import WAIT_S, Bytes, Rig, page_memory, some_keys, work_folder
from ucm_core.flow.copy import BufferBlocks
from ucm_core.store.geometry import Geometry

BATCH_OBJECTS = 64
ROUND_BYTES = 32 << 20
UNITS = {"64 KiB": 1 << 16, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "4 MiB": 1 << 22}
LIMIT = 1.1
REPEATS = 6


def figures() -> Iterator[Figure]:
    """Objects of one unit (the worst: none shares its price), 64 a call, then of 16; 32 MiB a round."""
    with work_folder() as folder:
        for name, unit_bytes in UNITS.items():
            yield from of(f"1 x {name}", folder, Geometry(1, unit_bytes))
        yield from of("16 x 64 KiB", folder, Geometry(16, 1 << 16))


def of(size: str, folder: Path, geometry: Geometry) -> Iterator[Figure]:
    """Load and save in batches."""
    objects = ROUND_BYTES // geometry.payload_bytes
    batch = min(BATCH_OBJECTS, objects)
    source, target = page_memory(objects, geometry), page_memory(objects, geometry)
    with Rig(folder, geometry, slots=2 * objects) as rig:
        keys = some_keys(objects)
        rig.keep(keys, source)
        costs = in_turns(
            {
                "load": often(partial(load, rig, keys, target, batch)),
                "save": saving(rig, source, batch),
                "memcpy": often(partial(memcpy, source, target)),
            },
            times=5,
        )
        for way, name in {"load": "load of a ring hit", "save": "save into the ring"}.items():
            yield compare(
                f"{name}, {size}", costs[way], costs["memcpy"],
                peer="memcpy", limit=LIMIT, measure=processor_per_gb(ROUND_BYTES),
            )  # fmt: skip
            yield compare(
                f"{name}, {size}", costs[way], costs["memcpy"],
                peer="memcpy", limit=None, measure=rate(ROUND_BYTES),
            )  # fmt: skip


def often(call: Callable[[], object]) -> Round:
    """A round that is long enough to warm to its work; the cost of one call."""

    def round_() -> Cost:
        cost = timed(lambda: [call() for _ in range(REPEATS)])()
        return Cost(cost.wall_s / REPEATS, cost.processor_s / REPEATS)

    return round_


def load(rig: Rig, keys: Bytes, target: Bytes, batch: int) -> None:
    for begin in range(0, len(keys), batch):
        part = slice(begin, begin + batch)
        ticket = rig.store.load(keys[part], BufferBlocks(target[part]))
        assert ticket.wait(WAIT_S)
        assert ticket.ok


def saving(rig: Rig, source: Bytes, batch: int) -> Round:
    """Save under new keys; the caller's thread is measured, which is back when all is in the ring.

    Writing the files is other threads' work (`bench_file_tier`) and over before the next round.
    """
    seeds = itertools.count(1)

    def round_() -> Cost:
        keys = some_keys(len(source), next(seeds))
        tickets = []

        def save() -> None:
            for begin in range(0, len(keys), batch):
                part = slice(begin, begin + batch)
                tickets.append(rig.store.save(keys[part], BufferBlocks(source[part])))

        cost = timed(save, clock=time.thread_time)()
        assert all(ticket.wait_durable(WAIT_S) for ticket in tickets)
        rig.store.drop(keys)
        return cost

    return round_


def memcpy(source: Bytes, target: Bytes) -> None:
    """Unit by unit, which numpy hands to memcpy; both sides at page boundaries, where it is fastest."""
    for into, out in zip(target, source, strict=True):
        into[:] = out
