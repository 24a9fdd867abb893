"""Geometry: how many shards an object has, and how large they are. Fixed for the life of a store."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from ucm_core.errors import SpecError
from ucm_core.spec.table import SpecRow

PAGE_BYTES = 4096
"""Alignment of shards in memory and in files, and the size of an object's header."""
MAX_SHARDS = 896
"""As many as one header page can hold checksums for."""

MAX_PAYLOAD_BYTES = 1 << 31
"""What one slot of a ring may hold."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of every object of one row and segment.

    In memory and in files shard i lies at i x stride; the bytes between its end and the next shard are zero.

    >>> Geometry(8, 65536).object_bytes
    528384
    >>> Geometry(1, 3_098_112).stride
    3100672
    """

    shards: int
    """Access units per object."""
    shard_bytes: int
    """Bytes of one unit, without padding."""

    def __post_init__(self) -> None:
        """Raise SpecError when no object can have this shape."""
        if not 1 <= self.shards <= MAX_SHARDS:
            raise SpecError(
                f"an object of {self.shards} shards: a header holds checksums for 1 to {MAX_SHARDS};"
                " split the row's units over more segments"
            )
        if self.shard_bytes < 1:
            raise SpecError(f"shards of {self.shard_bytes} bytes: need at least 1")

    @classmethod
    def of_row(cls, row: SpecRow) -> Geometry:
        """Return the geometry of a row that is stored whole: all its units, all its heads."""
        geometry = cls(len(row.units), row.unit_bytes)
        if geometry.payload_bytes > MAX_PAYLOAD_BYTES:
            raise SpecError(
                f"row {row.name!r}: an object of {geometry.payload_bytes} bytes is above the limit of"
                f" {MAX_PAYLOAD_BYTES}; choose smaller blocks"
            )
        return geometry

    @property
    def stride(self) -> int:
        """Bytes from one shard's begin to the next one's: `shard_bytes` rounded up to whole pages."""
        return -(-self.shard_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def payload_bytes(self) -> int:
        """Bytes of one object in memory."""
        return self.shards * self.stride

    @property
    def object_bytes(self) -> int:
        """Bytes of one object's file: header page and payload."""
        return PAGE_BYTES + self.payload_bytes

    @property
    def digest(self) -> bytes:
        """32 bytes that differ between any two geometries; part of every object's header."""
        fields = struct.pack("<QQQ", self.shards, self.shard_bytes, self.stride)
        return hashlib.blake2b(b"ucm-geometry-1" + fields, digest_size=32).digest()
