"""Presence of 1000 blocks: on files against a compiled loop of access(), in the ring against a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.frame import WALL, Figure, compare, in_turns, timed, within
from benchmarks.rig import Neighbour, Rig, page_memory, some_keys, work_folder
from ucm_core.store.geometry import Geometry
from ucm_core.store.ring import Ring

BLOCKS = 1000
RESIDENT = 50_000
"""Blocks of a ring whose index and slots are far larger than processor caches."""
MOST_S = 50e-6


def figures() -> Iterator[Figure]:
    """Files first, then the ring."""
    with work_folder() as folder:
        yield on_files(folder)
    yield in_the_ring()


def on_files(folder: Path) -> Figure:
    """`BlockStore.lookup` of what only files hold; the loop has its paths ready, ours makes them of keys."""
    geometry = Geometry(1, 4096)
    keys = some_keys(BLOCKS)
    with Rig(folder / "root", geometry, slots=2 * BLOCKS) as rig:
        rig.keep(keys, page_memory(BLOCKS, geometry))
        rig.ring.drop(keys)
        paths = [str(path) for path in rig.files.directory.glob("???/*")]
        assert len(paths) == BLOCKS
        (folder / "paths").write_text("\n".join(paths))
        with Neighbour("access", str(folder / "paths")) as neighbour:
            costs = in_turns(
                {"ours": timed(lambda: rig.store.lookup(keys)), "loop": neighbour.round()}, times=29
            )
        assert rig.store.lookup(keys).all()
    return compare(
        f"lookup of {BLOCKS} blocks on files",
        costs["ours"], costs["loop"], peer="access() in a compiled loop", limit=1.2, measure=WALL,
    )  # fmt: skip


def in_the_ring() -> Figure:
    """`Ring.lookup`, keys in random order."""
    keys = some_keys(RESIDENT)
    wanted = np.ascontiguousarray(keys[np.random.default_rng(1).permutation(RESIDENT)[:BLOCKS]])
    with Ring.open(None, slots=RESIDENT * 9 // 8, payload_bytes=4096, geometry_digest=bytes(32)) as ring:
        claims = ring.claim(keys)
        ring.publish(claims.slots)
        ring.release(claims.slots)
        assert ring.lookup(wanted).all()
        return within(
            f"lookup of {BLOCKS} blocks in the ring", lambda: ring.lookup(wanted), limit_s=MOST_S, rounds=99
        )
