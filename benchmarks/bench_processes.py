"""One ring, 1, 2 and 4 processes: all together load hits as fast as so many memcpys find memory."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.bench_ring import load, memcpy
from benchmarks.frame import Cost, Figure, compare, rate
from benchmarks.rig import Rig, page_memory, some_keys, work_folder
from ucm_core.store.geometry import Geometry

GEOMETRY = Geometry(1, 1 << 20)
OBJECTS = 32
TURNS = 5
TURN_S = 0.3
BATCH_OBJECTS = 32
PROCESSES = (1, 2, 4)


def figures() -> Iterator[Figure]:
    """Objects of 1 MiB, 32 a call; the sum over processes, against memcpy in as many processes."""
    keys = some_keys(OBJECTS)
    with work_folder() as folder, opened(folder) as rig:
        rig.keep(keys, page_memory(OBJECTS, GEOMETRY))
        for count in PROCESSES:
            loads, copies = together(folder, count)
            yield compare(
                f"sum of ring hits, {count} processes", loads, copies,
                peer="memcpy in as many", limit=0.9, measure=rate(10**9),
            )  # fmt: skip


def opened(folder: Path) -> Rig:
    return Rig(folder, GEOMETRY, slots=2 * OBJECTS, ring_name=f"bench-{folder.name.strip('.')}")


def together(folder: Path, count: int) -> tuple[list[Cost], list[Cost]]:
    """What 1e9 bytes cost all processes together, turn by turn, for loads and for copies."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(count), context.SimpleQueue()
    children = [context.Process(target=child, args=(folder, barrier, queue)) for _ in range(count)]
    for each in children:
        each.start()
    answers: list[list[float]] = [queue.get() for _ in children]
    for each in children:
        each.join()
    sums = [sum(rates) for rates in zip(*answers, strict=True)]
    costs = [Cost(1e9 / bytes_per_s, 0.0) for bytes_per_s in sums]
    return costs[0::2], costs[1::2]


def child(folder: Path, barrier: Barrier, queue: multiprocessing.SimpleQueue[list[float]]) -> None:
    """Loads and copies in turns, all children at the same time; answers with the rate of each turn."""
    keys = some_keys(OBJECTS)
    source, target = page_memory(OBJECTS, GEOMETRY), page_memory(OBJECTS, GEOMETRY)
    with opened(folder) as rig:
        works = (partial(load, rig, keys, target, BATCH_OBJECTS), partial(memcpy, source, target))
        rates = []
        for work in works * TURNS:
            work()
            barrier.wait()
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < TURN_S:
                work()
                count += 1
            rates.append(count * target.nbytes / (time.perf_counter() - begin))
        queue.put(rates)
