"""Processor time per GB beside vLLM's file tier, LMCache and Mooncake, where they are installed.

On files: what the store has in memory becomes durable, and comes back cold. vLLM writes a temporary and
renames it, as we do; LMCache writes in place and forgets with its process. Neither would notice a damaged
byte, and ours answers for every one: what has the limit is theirs and a pass of the checksum by as many
threads, and theirs alone is told beside it. In memory: from an engine's buffer into the store and back, ours
through the shared ring. An object has a unit for each layer of its model; a neighbour keeps one of as many
bytes. Those of one unit have no limit.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.bench_file_tier import MODEL_SHARDS, OurFiles, sum_of
from benchmarks.bench_ring import load, saving
from benchmarks.frame import Figure, compare, in_turns, processor_per_gb, timed
from benchmarks.rig import Neighbour, Rig, page_memory, some_keys, work_folder
from benchmarks.store_peers import FILES, MEMORY, THREADS, StorePeer
from ucm_core.store.geometry import Geometry

FILE_BYTES, MEMORY_BYTES = 128 << 20, 32 << 20
"""Of a round, or as many as four objects have on files, and two in memory."""
UNITS = {"256 KiB": 1 << 18, "1 MiB": 1 << 20, "4 MiB": 1 << 22}
TURNS = 5
Peers = Mapping[str, Callable[[Path, int, int], StorePeer]]


def figures() -> Iterator[Figure]:
    """Objects of many units, and of one."""
    logging.disable(logging.WARNING)  # neighbours talk
    with work_folder() as folder:
        for name, unit_bytes in UNITS.items():
            for shards in (MODEL_SHARDS, 1):
                size = f"{shards} x {name}"
                place = folder / size
                place.mkdir()
                limit = 1.0 if shards > 1 else None
                yield from on_files(size, place, Geometry(shards, unit_bytes), limit=limit)
                yield from in_memory(size, place, Geometry(shards, unit_bytes), limit=limit)


def on_files(size: str, place: Path, geometry: Geometry, *, limit: float | None) -> Iterator[Figure]:
    """Both ways: against theirs and a checksum, and against theirs."""
    objects = max(4, FILE_BYTES // geometry.payload_bytes)
    figure = partial(compare, measure=processor_per_gb(objects * geometry.payload_bytes))
    with (
        Rig(place / "files", geometry, slots=4 * objects) as rig,
        Neighbour.on_files(rig, objects, geometry.payload_bytes) as plain,
    ):
        full = some_keys(objects)
        rig.keep(full, page_memory(objects, geometry))
        ours = OurFiles(rig, full, itertools.count(1))
        check = plain.round(f"checksum checksum {THREADS}")
        for name, peer in installed(FILES, place, objects, geometry.payload_bytes):
            for way in ("save", "load"):
                rounds = {"ours": getattr(ours, way), "theirs": getattr(peer, way), "checksum": check}
                costs = in_turns(rounds, TURNS)
                checked = [sum_of(each) for each in zip(costs["theirs"], costs["checksum"], strict=True)]
                what = f"{way}, files, {size}"
                yield figure(what, costs["ours"], checked, peer=f"{name}, and checksum", limit=limit)
                yield figure(what, costs["ours"], costs["theirs"], peer=name, limit=None)


def in_memory(size: str, place: Path, geometry: Geometry, *, limit: float | None) -> Iterator[Figure]:
    """Both ways, one call a round; the ring has room for what is loaded, and for all saves under way."""
    objects = max(2, MEMORY_BYTES // geometry.payload_bytes)
    figure = partial(compare, measure=processor_per_gb(objects * geometry.payload_bytes), limit=limit)
    source, target = page_memory(objects, geometry), page_memory(objects, geometry)
    keys = some_keys(objects)
    with Rig(place / "memory", geometry, slots=6 * objects) as rig:
        rig.keep(keys, source)
        ours = {
            "save": saving(rig, source, objects),
            "load": timed(partial(load, rig, keys, target, objects)),
        }
        for name, peer in installed(MEMORY, place, objects, geometry.payload_bytes):
            for way, own in ours.items():
                costs = in_turns({"ours": own, "theirs": getattr(peer, way)}, TURNS)
                yield figure(f"{way}, memory, {size}", costs["ours"], costs["theirs"], peer=name)


def installed(peers: Peers, place: Path, *shape: int) -> Iterator[tuple[str, StorePeer]]:
    """Every peer that is there, for objects of this number and size, one after the other."""
    for name, make in peers.items():
        try:
            peer = make(place, *shape)
        except ImportError as error:
            print(f"{place.name}: {name} is left out: {error}")
            continue
        yield name, peer
        peer.close()
