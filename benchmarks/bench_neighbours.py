"""Processor time per GB beside vLLM's file tier, LMCache and Mooncake, where they are installed.

On files: what the store has in memory becomes durable, and comes back cold. vLLM writes a temporary and
renames it, as we do, without a checksum; LMCache writes in place and forgets with its process. In memory:
from an engine's buffer into the store and back, ours through the shared ring.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.bench_file_tier import OurFiles
from benchmarks.bench_ring import load, saving
from benchmarks.frame import Figure, Round, compare, in_turns, processor_per_gb, timed
from benchmarks.rig import Rig, page_memory, some_keys, work_folder
from benchmarks.store_peers import FILES, MEMORY, StorePeer
from ucm_core.store.geometry import Geometry

ROUND_BYTES = 32 << 20
UNITS = {"256 KiB": 1 << 18, "1 MiB": 1 << 20, "4 MiB": 1 << 22}
TURNS = 3
Peers = Mapping[str, Callable[[Path, int, int], StorePeer]]


def figures() -> Iterator[Figure]:
    """Objects of one unit, 32 MiB a round."""
    logging.disable(logging.WARNING)  # neighbours talk
    with work_folder() as folder:
        for size, unit_bytes in UNITS.items():
            geometry = Geometry(1, unit_bytes)
            objects = ROUND_BYTES // unit_bytes
            with Rig(folder / f"files-{unit_bytes}", geometry, slots=3 * objects) as rig:
                ours = OurFiles(rig, objects)
                yield from beside(FILES, folder, f"files, {size}", {"save": ours.save, "load": ours.load})
            with Rig(folder / f"memory-{unit_bytes}", geometry, slots=2 * objects) as rig:
                yield from beside(MEMORY, folder, f"memory, {size}", in_memory(rig, objects))


def in_memory(rig: Rig, objects: int) -> dict[str, Round]:
    """Our rounds through the ring, one call each."""
    source, target = page_memory(objects, rig.geometry), page_memory(objects, rig.geometry)
    keys = some_keys(objects)
    rig.keep(keys, source)
    return {"save": saving(rig, source, objects), "load": timed(partial(load, rig, keys, target, objects))}


def beside(peers: Peers, folder: Path, what: str, ours: Mapping[str, Round]) -> Iterator[Figure]:
    """Both ways, against every peer that is installed."""
    for name, make in peers.items():
        try:
            (folder / what).mkdir(exist_ok=True)
            peer = make(folder / what, *shape(what))
        except ImportError as error:
            print(f"{what}: {name} is left out: {error}")
            continue
        for way, theirs in {"save": peer.save, "load": peer.load}.items():
            costs = in_turns({"ours": ours[way], "theirs": theirs}, TURNS)
            yield compare(
                f"{way}, {what}", costs["ours"], costs["theirs"],
                peer=name, limit=1.0, measure=processor_per_gb(ROUND_BYTES),
            )  # fmt: skip
        peer.close()


def shape(what: str) -> tuple[int, int]:
    """Objects and bytes of one unit."""
    unit_bytes = UNITS[what.split(", ")[1]]
    return ROUND_BYTES // unit_bytes, unit_bytes
