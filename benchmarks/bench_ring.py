"""Blocks that the ring holds, or that go into it: copies through the public store, against memcpy."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.frame import Cost, Figure, Round, compare, in_turns, processor_per_gb, rate, timed
from benchmarks.rig import WAIT_S, Bytes, Rig, page_memory, some_keys, work_folder
from ucm_core.flow.copy import BufferBlocks
from ucm_core.store.geometry import Geometry

CALLS = {"64 a call": 64, "one a call": 1}
"""An engine loads and saves the blocks of a request together: that has the limit."""
LIMITED = "64 a call"
MODEL_SHARDS = 16
"""Objects of a model have a unit per layer: they have the limit. Fewer where so many are half a round."""
WAYS = {"load": ("load of a ring hit", "out of"), "save": ("save into the ring", "into")}
"""What is measured, its name, and which memcpy it is held against."""
ROUND_BYTES = 32 << 20
UNITS = {"64 KiB": 1 << 16, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "4 MiB": 1 << 22}
LIMIT = 1.1
REPEATS = 6
TURNS = 15


def figures() -> Iterator[Figure]:
    """Objects of many units, then of one, which shares its price with none; 32 MiB a round."""
    with work_folder() as folder:
        for name, unit_bytes in UNITS.items():
            shards = min(MODEL_SHARDS, ROUND_BYTES // 2 // unit_bytes)
            for geometry in (Geometry(shards, unit_bytes), Geometry(1, unit_bytes)):
                yield from of(f"{geometry.shards} x {name}", folder / f"{geometry.shards}-{name}", geometry)


def of(size: str, folder: Path, geometry: Geometry) -> Iterator[Figure]:
    """Load and save, in batches and one by one.

    The ring has room for what is loaded, what a round saves, and what is kept free: no save waits; and for as
    many again, so that pieces of work have the size that they have in any large ring.
    """
    objects = ROUND_BYTES // geometry.payload_bytes
    source, target = page_memory(objects, geometry), page_memory(objects, geometry)
    with Rig(folder, geometry, slots=6 * objects) as rig:
        rig.know_folders()
        keys = some_keys(objects)
        rig.keep(keys, source)
        slots = views(rig, keys)
        rounds = {"out of": often(partial(memcpy, slots, target))}
        for calls, batch in CALLS.items():
            rounds[f"load, {calls}"] = often(partial(load, rig, keys, target, batch))
            rounds[f"save, {calls}"] = saving(rig, source, batch)
        rounds["into"] = timed(partial(memcpy, source, slots))  # once a round and after a save, as saves are
        costs = in_turns(rounds, TURNS)
    for calls, (way, (name, where)) in itertools.product(CALLS, WAYS.items()):
        limited = calls == LIMITED and geometry.shards > 1
        for measure in (processor_per_gb(ROUND_BYTES), rate(ROUND_BYTES)):
            yield compare(
                f"{name}, {size}, {calls}",
                costs[f"{way}, {calls}"],
                costs[where],
                peer=f"memcpy {where} the ring",
                limit=LIMIT if limited and not measure.at_least else None,
                measure=measure,
            )


def views(rig: Rig, keys: Bytes) -> list[Bytes]:
    """The slots of ``keys`` as arrays; they are referenced from now on, so they stay."""
    shape = (rig.geometry.shards, rig.geometry.shard_bytes)
    addresses = rig.ring.addresses(rig.ring.pin(keys).slots).tolist()
    memory = [(ctypes.c_uint8 * rig.geometry.payload_bytes).from_address(address) for address in addresses]
    return [np.ctypeslib.as_array(each).reshape(shape) for each in memory]


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
    """Save under new keys, as workers do: their scheduler has looked and found none of them.

    The caller's thread is measured, which is back when all is in the ring.
    Writing the files is other threads' work (`bench_file_tier`) and over before the next round.
    """
    seeds = itertools.count(1)

    def round_() -> Cost:
        keys = some_keys(len(source), next(seeds))
        tickets = []

        def save() -> None:
            for begin in range(0, len(keys), batch):
                part = slice(begin, begin + batch)
                tickets.append(rig.store.save(keys[part], BufferBlocks(source[part]), absent=True))

        cost = timed(save, clock=time.thread_time)()
        assert all(ticket.wait_durable(WAIT_S) for ticket in tickets)
        rig.store.drop(keys)
        return cost

    return round_


def memcpy(source: Iterable[Bytes], target: Iterable[Bytes]) -> None:
    """Unit by unit, which numpy hands to memcpy; both sides at page boundaries, where it is fastest.

    One side is the ring itself, which holds the bytes of ``source``: they may be written there again.
    """
    for into, out in zip(target, source, strict=True):
        into[:] = out
