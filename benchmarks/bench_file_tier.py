"""Cold loads and durable saves, against O_DIRECT preadv and pwritev of as many bytes with as many threads."""

from __future__ import annotations

import ctypes
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.frame import Figure, side_by_side
from ucm_core.store.files import FileTier
from ucm_core.store.geometry import Geometry
from ucm_core.store.payloads import PrivateMemory
from ucm_core.store.root import CacheRoot

GEOMETRIES = (Geometry(8, 65_536), Geometry(16, 262_144), Geometry(4, 4 << 20))
TOTAL_BYTES = 256 << 20
THREADS = (1, 2)
LIMIT = 1.3
Numbers = npt.NDArray[np.int64]


def figures() -> Iterator[Figure]:
    """Objects of 0.5, 4 and 16 MiB, 256 MiB a round, one and two threads. O_DIRECT leaves no page cached."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory, CacheRoot(directory) as root:
        if not root.direct:
            raise SystemExit(f"{directory} takes no O_DIRECT: nothing cold can be measured here")
        for geometry, threads in itertools.product(GEOMETRIES, THREADS):
            with ThreadPoolExecutor(threads) as pool:
                yield from Pair(root, geometry, pool, threads).figures()


class Pair:
    """Our tier and the plain calls over the same memory, in the same file system."""

    def __init__(self, root: CacheRoot, geometry: Geometry, pool: ThreadPoolExecutor, threads: int) -> None:
        self.geometry, self.pool, self.threads = geometry, pool, threads
        self.count = TOTAL_BYTES // geometry.payload_bytes
        row = root.path / ("0" * 32) / f"{geometry.shards}-{geometry.shard_bytes}-{threads}"
        self.tier = FileTier(row, geometry, row_seed=b"", segment="hx", root=root)
        self.memory = PrivateMemory(self.count + 1, geometry.payload_bytes)
        self.plain = root.path / "plain"
        self.plain.mkdir(exist_ok=True)
        self.rng = np.random.default_rng(0)
        self.keys = self.new_keys()
        self.views = [self.view(int(address)) for address in self.memory.addresses]

    def new_keys(self) -> np.ndarray:
        return self.rng.integers(0, 256, (self.count, 32), dtype=np.uint8)

    def view(self, address: int) -> memoryview:
        return memoryview((ctypes.c_char * self.geometry.payload_bytes).from_address(address)).cast("B")

    def figures(self) -> Iterator[Figure]:
        size = f"{self.geometry.payload_bytes / 2**20:.1f} MiB x {self.threads} threads"
        yield side_by_side(
            f"durable save, {size}", self.save, peer="pwritev", peer_call=self.write, limit=LIMIT
        )
        yield side_by_side(f"cold load, {size}", self.load, peer="preadv", peer_call=self.read, limit=LIMIT)
        self.tier.drop(self.keys)
        for path in self.plain.iterdir():
            path.unlink()

    def each(self, work: Callable[[Numbers], None]) -> None:
        list(self.pool.map(work, np.array_split(np.arange(self.count), self.threads)))

    def save(self) -> None:
        """Objects under new names, renamed into place; the last round's go first, as the peer's do."""
        self.tier.drop(self.keys)
        self.keys = self.new_keys()
        self.each(lambda part: self.check(self.tier.write(self.keys[part], self.memory.addresses[part])))

    def load(self) -> None:
        self.each(lambda part: self.check(self.tier.read(self.keys[part], self.memory.addresses[part])))

    def write(self) -> None:
        self.each(self.plain_write)

    def read(self) -> None:
        self.each(self.plain_read)

    def plain_write(self, part: Numbers) -> None:
        for number in part:
            path = self.plain / str(number)
            path.unlink(missing_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
            assert os.pwritev(file, self.buffers(number), 0) == self.geometry.object_bytes
            os.close(file)

    def plain_read(self, part: Numbers) -> None:
        for number in part:
            file = os.open(self.plain / str(number), os.O_RDONLY | os.O_DIRECT)
            assert os.preadv(file, self.buffers(number), 0) == self.geometry.object_bytes
            os.close(file)

    def buffers(self, number: int) -> list[memoryview]:
        """A page for the header, and the payload."""
        return [self.views[-1][:4096], self.views[number]]

    @staticmethod
    def check(codes: np.ndarray) -> None:
        assert not codes.any()
