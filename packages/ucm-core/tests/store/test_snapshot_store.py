"""The snapshot store over a private ring and real files."""

from __future__ import annotations

from pathlib import Path

import pytest
from stores import open_store

from ucm_core.errors import SpecError
from ucm_core.spec.table import Part, RowKind, SpecRow
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.snapshot import SnapshotStore
from ucm_core.testing.snapshot_store import SnapshotStoreTests


class TestSnapshotStore(SnapshotStoreTests):
    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> BlockStore:
        return open_store(directory, geometry, slots=slots)


def test_only_snapshot_rows_have_states(tmp_path: Path) -> None:
    row = SpecRow("full", RowKind.CHAIN, 64, units=(0,), parts=(Part("k", (1, 8), "uint8"),))
    blocks = open_store(tmp_path, Geometry.of_row(row))
    with pytest.raises(SpecError, match="row full is of kind CHAIN"):
        SnapshotStore(row, blocks)
    blocks.close()
