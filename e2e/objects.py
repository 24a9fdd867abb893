"""Look at a cache root from outside, and damage it, by what docs/data-on-disk.md says about it."""

import struct
import time
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from e2e.harness import Engine
from ucm_core._native import crc32c

HEADER_BYTES = 4096
CHECKSUMS_BEGIN = 120
LOOK_EVERY_S = 0.1
WRITE_LIMIT_S = 60.0
"""How long what was saved may take to be files."""
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


def wait_whole(root: Path, count: int, *, writer: Engine) -> list[Path]:
    """All objects under `root`, as soon as there are `count` whole ones; TimeoutError after a minute.

    EngineFailed if their writer ends before that.
    """
    deadline = time.monotonic() + WRITE_LIMIT_S
    while len(found := objects(root)) < count or not all(map(is_whole, found)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(found)} objects instead of {count} after {WRITE_LIMIT_S} s")
        writer.watch(LOOK_EVERY_S)
    return found


def values(path: Path) -> NDArray[np.float32]:
    """What an object holds, shard by shard without padding for shards of whole strides, as float32."""
    return np.frombuffer(path.read_bytes()[HEADER_BYTES:], dtype="<f4")


def fill_with_noise(path: Path) -> None:
    """Replace what an object holds by noise, with checksums that fit: nothing but tokens can tell."""
    data = bytearray(path.read_bytes())
    _, _, shards, stride = _FIXED.unpack_from(data)
    noise = np.random.default_rng(zlib.crc32(path.name.encode())).standard_normal(shards * stride // 4)
    data[HEADER_BYTES:] = noise.astype("<f4").tobytes()
    for number in range(shards):
        shard = memoryview(data)[HEADER_BYTES + number * stride :][:stride]
        struct.pack_into("<I", data, CHECKSUMS_BEGIN + 4 * number, crc32c(shard))
    struct.pack_into("<I", data, HEADER_BYTES - 4, crc32c(bytes(data[: HEADER_BYTES - 4])))
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    """Take the last bytes of an object away."""
    path.write_bytes(path.read_bytes()[:-1000])
