"""Objects for tests: page-aligned payloads, keys, and a file tier over a real directory."""

from __future__ import annotations

import gc
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ucm_core.store.files import FileTier
from ucm_core.store.geometry import Geometry
from ucm_core.store.root import CacheRoot

GEOMETRY = Geometry(3, 8192)
SEED = bytes(range(32))


def open_files() -> int:
    """How many this process has, without those of what nobody uses any more."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


class Payloads:
    """Page-aligned memory for ``count`` payloads, filled with bytes by ``seed`` (None: zero)."""

    def __init__(self, count: int, *, geometry: Geometry = GEOMETRY, seed: int | None = 0) -> None:
        self._memory = mmap.mmap(-1, count * geometry.payload_bytes)
        self.bytes = np.frombuffer(self._memory, dtype=np.uint8).reshape(
            count, geometry.shards, geometry.stride
        )
        if seed is not None:
            shape = (count, geometry.shards, geometry.shard_bytes)
            self.bytes[:, :, : geometry.shard_bytes] = np.random.default_rng(seed).integers(0, 256, shape)
        self.addresses = self.bytes.ctypes.data + geometry.payload_bytes * np.arange(count)


def make_keys(count: int, *, seed: int = 0) -> np.ndarray:
    """Return ``count`` different keys, ``uint8[count, 32]``."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Shelf:
    """A root with one tier."""

    root: CacheRoot
    tier: FileTier

    def file(self, key: np.ndarray) -> Path:
        """Return the place of a key's object, from the documented scheme and not from the code under test."""
        digits = key[:16].tobytes().hex()
        return self.tier.directory / digits[:3] / f"{digits}.{self.tier.segment}"

    def temporaries(self) -> list[Path]:
        """Return every write under way below the root."""
        return sorted(self.root.path.rglob("*.tmp"))

    def write(self, keys: np.ndarray, *, seed: int = 0, sync: bool = False) -> list[int]:
        """Write random payloads and return the codes."""
        payloads = Payloads(len(keys), geometry=self.tier.geometry, seed=seed)
        return self.tier.write(keys, payloads.addresses, sync=sync).tolist()

    def read(self, keys: np.ndarray) -> list[int]:
        """Read and return the codes."""
        into = Payloads(len(keys), geometry=self.tier.geometry, seed=None)
        return self.tier.read(keys, into.addresses).max(axis=1).tolist()

    def read_one(self, key: np.ndarray) -> tuple[int, np.ndarray]:
        """Return code and payload of one object."""
        into = Payloads(1, geometry=self.tier.geometry, seed=None)
        return int(self.tier.read(key[None], into.addresses).max()), into.bytes[0]


def make_tier(
    root: CacheRoot,
    *,
    geometry: Geometry = GEOMETRY,
    segment: str = "hx",
    row: str = "full",
) -> FileTier:
    """Return the tier of one row in the namespace of zeros."""
    directory = root.path / ("0" * 32) / row
    return FileTier(directory, geometry, row_seed=SEED, segment=segment, root=root)


def open_shelf(
    path: Path,
    *,
    capacity_bytes: int | None = None,
    geometry: Geometry = GEOMETRY,
    uring: bool = False,
    ttl_s: float | None = None,
) -> Shelf:
    """Open a root at ``path`` with one tier; close ``shelf.root`` afterwards."""
    root = CacheRoot(path, capacity_bytes=capacity_bytes, ttl_s=ttl_s, uring=uring).open()
    return Shelf(root, make_tier(root, geometry=geometry))
