"""The block store over real files and rings, with each tier and without, and its double."""

from __future__ import annotations

from pathlib import Path

from stores import open_store

from ucm_core.store.absent import ObjectStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.stack import ring_name
from ucm_core.testing.block_store import BlockStoreTests
from ucm_core.testing.memory_store import MemoryStore


class TestOneThread(BlockStoreTests):
    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        return open_store(directory, geometry, slots=slots, threads=1)


class TestSmallRing(BlockStoreTests):
    slots = 2

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        return open_store(directory, geometry, slots=slots, threads=4)


class TestNoPadding(BlockStoreTests):
    geometry = Geometry(2, 4096)

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        return open_store(directory, geometry, slots=slots, threads=3)


class TestFilesOnly(BlockStoreTests):
    slots = 0
    ring = False

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        return open_store(directory, geometry, slots=slots, threads=2)


class TestRingOnly(BlockStoreTests):
    """The ring has a name, which dies with the last store that has it open."""

    durable = False

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        name = ring_name(directory, "none", row="row", segment="all")
        return open_store(directory, geometry, slots=slots, durable=False, ring_name=name)


class TestPrivateRingOnly(BlockStoreTests):
    durable = False
    shared = False

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        return open_store(directory, geometry, slots=slots, threads=1, durable=False)


class TestMemory(BlockStoreTests):
    durable = False
    shared = False

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        return MemoryStore(geometry, slots=slots)
