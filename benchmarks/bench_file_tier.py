"""Ring slots and the medium: cold loads and durable saves, against the best that this disk gives anybody.

The neighbour opens, moves and renames files of the same size with O_DIRECT, compiled, without a checksum:
with 1, 2 and 4 threads, and with an io_uring of 8 and 32 places where the kernel has one. The fastest is
the peer for the rate. The peer for processor time is the bare call for each unit and one pass of the
checksum over memory that no cache holds, both with as many threads as ours. The bare call finds its file
open, and a new one where it writes. An object has a unit for each layer of its model, and is moved by one
call: it has the limit. One of a single unit pays for a file of its own, which is in no bare call, and has
none. What the file system takes to make, close and rename a file is told beside; so is what remains without
the name that they get at last.

Ours is measured with both of its engines. Folders are there already, as in any root that is in use: keys are
such that 16 are needed. All have their files in the same folders and move the memory of one ring: in one
place of a disk, or with pages that happen to lie side by side, transfers may be twice as fast as in another.
No round reads what another has read lately. No file is removed before the end (45 GB by then): file systems
that hesitate to use again what was freed a moment ago would make whoever comes next pay for it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.frame import (
    Cost,
    Figure,
    Measure,
    Round,
    best_of,
    compare,
    in_turns,
    processor_per_gb,
    rate,
    timed,
)
from benchmarks.rig import WAIT_S, Neighbour, Rig, page_memory, some_keys, work_folder
from ucm_core.store.geometry import Geometry
from ucm_core.store.pool import Priority
from ucm_core.store.tiers import CHUNK_BYTES

LEAST_BYTES, LEAST_OBJECTS = 96 << 20, 4
"""Of a round: two pieces of work for each thread that writes, or one object for every thread."""
UNITS = {"256 KiB": 1 << 18, "1 MiB": 1 << 20, "4 MiB": 1 << 22}
MODEL_SHARDS = 16
"""Units of an object, one per layer of a model."""
WAYS = {"save": "durable save", "load": "cold load"}
ENGINES = ("threads 1", "threads 2", "threads 4", "uring 8", "uring 32")
LEAST_RATE, MOST_PROCESSOR = 0.9, 1.15
TURNS = 5


def figures() -> Iterator[Figure]:
    """Objects of many units and of one; no cache holds a round."""
    with work_folder() as folder:
        for name, unit_bytes in UNITS.items():
            for shards in (MODEL_SHARDS, 1):
                place = folder / f"{shards}-{name}"
                place.mkdir()
                yield from of(f"{shards} x {name}", place, Geometry(shards, unit_bytes))


def of(size: str, folder: Path, geometry: Geometry) -> Iterator[Figure]:
    """Both ways for one size."""
    objects = max(LEAST_OBJECTS, LEAST_BYTES // geometry.payload_bytes)
    slots = 3 * -(-objects * geometry.object_bytes // geometry.payload_bytes)  # as many as the neighbour uses
    with (
        Rig(folder / "root", geometry, slots=slots) as rig,
        Rig(folder / "root", geometry, slots=slots, ring_name=rig.ring_name, uring=True) as second,
        Neighbour.on_files(rig, objects, geometry.object_bytes) as files,
        Neighbour.on_files(rig, objects * geometry.shards, geometry.stride) as units,
    ):
        if not rig.root.direct:
            raise SystemExit(f"{folder} takes no O_DIRECT: nothing cold can be measured here")
        full, seeds = some_keys(objects), itertools.count(1)
        rig.keep(full, page_memory(objects, geometry))
        ours = {"threads": OurFiles(rig, full, seeds), "uring": OurFiles(second, full, seeds)}
        for way, verb in {"save": "write", "load": "read"}.items():
            own = {engine: getattr(each, way) for engine, each in ours.items()}
            costs = in_turns(own | rounds(verb, files, units, threads=rig.pool.threads), TURNS)
            for engine in own:
                what = f"{WAYS[way]}, {size}, {engine}"
                held = bars(costs, objects * geometry.payload_bytes)
                for theirs, peer, limit, measure in held:
                    most = limit if geometry.shards > 1 else None
                    yield compare(what, costs[engine], theirs, peer=peer, limit=most, measure=measure)


def rounds(verb: str, files: Neighbour, units: Neighbour, *, threads: int) -> dict[str, Round]:
    """Every engine of the neighbour, and the parts of the bar for processor time."""
    engines = [name for name in ENGINES if files.answer(f"{verb} {name}") is not None]
    made = f"write new {threads}" if verb == "write" else f"read threads {threads}"
    return {
        **{name: files.round(f"{verb} {name}") for name in engines},
        "bare": units.round(f"{verb} bare {threads}"),
        "made": files.round(made),
        "checksum": units.round(f"checksum checksum {threads}"),
    }


Bar = tuple[list[Cost], str, float | None, Measure]
"""What is held against ours: costs, their name, the limit, what of them counts."""


def bars(costs: dict[str, list[Cost]], size_bytes: int) -> list[Bar]:
    """The rate against the fastest engine, the processor time against bare call and checksum."""
    name, best = best_of([(name, costs[name]) for name in ENGINES if name in costs])
    bar, made, whole = (
        [sum_of(each) for each in zip(calls, costs["checksum"], strict=True)]
        for calls in (costs["bare"], costs["made"], best)
    )
    processor = processor_per_gb(size_bytes)
    return [
        (best, f"the fastest engine here: {name}", LEAST_RATE, rate(size_bytes)),
        (bar, "bare O_DIRECT call a unit, and checksum", MOST_PROCESSOR, processor),
        (made, "the call with open and close, and checksum", None, processor),
        (whole, f"{name}, with open and rename, and checksum", None, processor),
    ]


def sum_of(costs: tuple[Cost, ...]) -> Cost:
    """One round after the other."""
    return Cost(sum(cost.wall_s for cost in costs), sum(cost.processor_s for cost in costs))


class OurFiles:
    """The store's own way between slots of its ring and the medium; those of ``full`` are what is saved."""

    def __init__(self, rig: Rig, full: np.ndarray, seeds: Iterator[int]) -> None:
        self._rig, self._objects, self._seeds = rig, len(full), seeds
        self._saved: deque[np.ndarray] = deque()
        self._addresses = rig.ring.addresses(rig.ring.pin(full).slots)

    def _new_keys(self) -> np.ndarray:
        keys = some_keys(self._objects, next(self._seeds))
        keys[:, 0] = 0  # the first three hex digits name the folder: 000 to 00f
        return keys

    def load(self) -> Cost:
        """`BlockStore.prefetch`: from the medium into slots that nobody holds, what was saved longest ago."""
        self._rig.await_idle()  # a slot is let go a moment after its ticket is done
        keys = self._saved[0]
        self._saved.rotate(-1)
        self._rig.ring.drop(keys)
        assert not self._rig.ring.lookup(keys).any()

        def work() -> None:
            ticket = self._rig.store.prefetch(keys)
            assert ticket.wait(WAIT_S)
            assert ticket.ok

        return timed(work)()

    def save(self) -> Cost:
        """Full slots become files under new names, in the store's pieces."""
        names = self._new_keys()
        size = max(1, CHUNK_BYTES // self._rig.geometry.payload_bytes)
        pieces = [slice(begin, begin + size) for begin in range(0, self._objects, size)]
        works = [partial(self._write, names[piece], self._addresses[piece]) for piece in pieces]
        self._saved.append(names)
        return timed(lambda: self._on_pool(works))()

    def _write(self, keys: np.ndarray, addresses: np.ndarray) -> None:
        assert not self._rig.files.write(keys, addresses).any()

    def _on_pool(self, works: Sequence[Callable[[], None]]) -> None:
        ended = threading.Semaphore(0)

        def run(work: Callable[[], None]) -> None:
            try:
                work()
            finally:
                ended.release()

        for work in works:
            assert self._rig.pool.submit(Priority.WRITE, partial(run, work))
        for _ in works:
            assert ended.acquire(timeout=WAIT_S)
