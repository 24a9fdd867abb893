"""Real stores for tests: a private ring over files in a temporary root."""

from __future__ import annotations

import weakref
from pathlib import Path

from ucm_core.store.block import BlockStore
from ucm_core.store.files import FileTier
from ucm_core.store.gc import Collector
from ucm_core.store.geometry import Geometry
from ucm_core.store.pool import IoPool
from ucm_core.store.ring import Ring
from ucm_core.store.root import CacheRoot
from ucm_core.store.tiers import StoreLimits

ROW_SEED = bytes(range(32))
NAMESPACE = "ab" * 16
PATIENT = StoreLimits(save_wait_s=20.0)


def open_store(
    directory: Path,
    geometry: Geometry,
    *,
    slots: int = 16,
    threads: int = 2,
    limits: StoreLimits = PATIENT,
    capacity_bytes: int | None = None,
    ring_name: str | None = None,
) -> BlockStore:
    """A store over ``directory``; its root and its threads end with it."""
    root = CacheRoot(directory, capacity_bytes=capacity_bytes).open()
    files = FileTier(
        root.path / NAMESPACE / "row", geometry, row_seed=ROW_SEED, segment="hx.u0-1.c0-1", root=root
    )
    ring = Ring.open(
        ring_name, slots=slots, payload_bytes=geometry.payload_bytes, geometry_digest=geometry.digest
    )
    pool = IoPool(threads)
    room = Collector(root.path, root.usage, pool) if root.available else None
    store = BlockStore(ring, files, pool, row="row", limits=limits, room=room)
    weakref.finalize(store, _end, root, pool)
    return store


def _end(root: CacheRoot, pool: IoPool) -> None:
    pool.close(60.0)
    root.close()
