"""The snapshot store over real files and rings, with each tier and without, and over the double."""

from __future__ import annotations

from pathlib import Path

import pytest
from stores import open_store

from ucm_core.errors import SpecError
from ucm_core.spec.table import Part, RowKind, SpecRow
from ucm_core.store.absent import ObjectStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.snapshot import SnapshotStore
from ucm_core.store.tiers import StoreLimits
from ucm_core.testing.memory_store import MemoryStore
from ucm_core.testing.snapshot_store import ROW, SnapshotStoreTests

STATE_BYTES = Geometry.of_row(ROW).payload_bytes


class TestSnapshotStore(SnapshotStoreTests):
    donations = 8 + 2

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        limits = StoreLimits(save_wait_s=0.05, private_bytes=2 * STATE_BYTES)
        return open_store(directory, geometry, slots=slots, limits=limits)


class TestFilesOnly(SnapshotStoreTests):
    slots = 0
    donations = 1

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        limits = StoreLimits(save_wait_s=0.05, private_bytes=1)
        return open_store(directory, geometry, slots=slots, limits=limits)


class TestRingOnly(SnapshotStoreTests):
    durable = False

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        return open_store(directory, geometry, slots=slots, durable=False)


class TestMemory(SnapshotStoreTests):
    durable = False
    donations = None

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        return MemoryStore(geometry)


def test_only_snapshot_rows_have_states(tmp_path: Path) -> None:
    row = SpecRow("full", RowKind.CHAIN, 64, units=(0,), parts=(Part("k", (1, 8), "uint8"),))
    blocks = open_store(tmp_path, Geometry.of_row(row))
    with pytest.raises(SpecError, match="row full is of kind CHAIN"):
        SnapshotStore(row, blocks)
    blocks.close()
