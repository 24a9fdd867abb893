"""The block store over a private ring and real files."""

from __future__ import annotations

from pathlib import Path

from stores import open_store

from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.testing.block_store import BlockStoreTests


class TestOneThread(BlockStoreTests):
    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> BlockStore:
        return open_store(directory, geometry, slots=slots, threads=1)


class TestSmallRing(BlockStoreTests):
    slots = 2

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> BlockStore:
        return open_store(directory, geometry, slots=slots, threads=4)


class TestNoPadding(BlockStoreTests):
    geometry = Geometry(2, 4096)

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> BlockStore:
        return open_store(directory, geometry, slots=slots, threads=3)
