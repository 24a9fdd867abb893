"""Look at a cache root from outside, by what docs/data-on-disk.md says about it."""

import struct
from pathlib import Path

from ucm_core._native import crc32c

HEADER_BYTES = 4096
CHECKSUMS_BEGIN = 120
_FIXED = struct.Struct("<8sIIQ")  # magic, version, shards, stride


def objects(root: Path) -> list[Path]:
    """All object files under `root`, in name order."""
    return sorted(path for path in root.glob("*/*/???/*") if not path.name.startswith("."))


def rows(root: Path) -> dict[str, list[Path]]:
    """The object files by row."""
    found: dict[str, list[Path]] = {}
    for path in objects(root):
        found.setdefault(path.parts[-3], []).append(path)
    return found


def temporaries(root: Path) -> list[Path]:
    """Files of writes that never ended."""
    return sorted(root.rglob("*.tmp"))


def contents(root: Path) -> dict[Path, bytes]:
    """The bytes of every object by its path below `root`."""
    return {path.relative_to(root): path.read_bytes() for path in objects(root)}


def is_whole(path: Path) -> bool:
    """Whether a file is an object with every byte down: its length and all its checksums agree."""
    data = path.read_bytes()
    if len(data) < HEADER_BYTES:
        return False
    magic, _, shards, stride = _FIXED.unpack_from(data)
    header, (seal,) = data[: HEADER_BYTES - 4], struct.unpack_from("<I", data, HEADER_BYTES - 4)
    if magic != b"UCMOBJ01" or crc32c(header) != seal or len(data) != HEADER_BYTES + shards * stride:
        return False
    payload = memoryview(data)[HEADER_BYTES:]
    sums = struct.unpack_from(f"<{shards}I", data, CHECKSUMS_BEGIN)
    return all(crc32c(payload[i * stride : (i + 1) * stride]) == each for i, each in enumerate(sums))
