"""Objects for tests of stores: keys and payloads by number, targets, engine memory that fails."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from ucm_core.flow.copy import BufferBlocks, Span
from ucm_core.store.arrays import Int64s
from ucm_core.store.geometry import Geometry

Bytes = npt.NDArray[np.uint8]

WAIT_S = 300.0
"""Longer than anything here takes; a test that waits this long has failed."""
UNTOUCHED = 0x5C
"""What targets are filled with, so that bytes that were not delivered show."""


def keys_of(*numbers: int) -> Bytes:
    """Distinct keys ``uint8[n, 32]``, one per number."""
    rows = [number.to_bytes(8, "big") * 4 for number in numbers]
    return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, 32)


def payloads_of(geometry: Geometry, *numbers: int) -> Bytes:
    """Reproducible payloads ``uint8[n, shards, shard_bytes]``, different for different numbers."""
    shape = (geometry.shards, geometry.shard_bytes)
    return np.stack([np.random.default_rng(n).integers(0, 256, shape, dtype=np.uint8) for n in numbers])


def blank(geometry: Geometry, count: int) -> Bytes:
    """A target ``uint8[n, shards, shard_bytes]`` full of `UNTOUCHED`."""
    return np.full((count, geometry.shards, geometry.shard_bytes), UNTOUCHED, dtype=np.uint8)


class FaultyBlocks:
    """A double of engine memory that fails: objects in ``broken`` raise, all others are copied and listed."""

    def __init__(self, payloads: Bytes, broken: Collection[int] = ()) -> None:
        self._blocks = BufferBlocks(payloads)
        self._broken = frozenset(broken)
        self.copied: list[int] = []
        """Objects that were copied, in order."""

    def gather(self, index: Int64s, address: Int64s, *, span: Span | None = None) -> None:
        """As `BufferBlocks.gather`, or raises."""
        self._check(index)
        self._blocks.gather(index, address, span=span)

    def scatter(self, index: Int64s, address: Int64s, *, span: Span | None = None) -> None:
        """As `BufferBlocks.scatter`, or raises."""
        self._check(index)
        self._blocks.scatter(index, address, span=span)

    def _check(self, index: Int64s) -> None:
        if self._broken & set(index.tolist()):
            raise RuntimeError(f"broken on purpose: one of {index.tolist()}")
        self.copied += index.tolist()
