"""Look at a cache root from outside, and damage it, by what docs/data-on-disk.md says about it."""

import struct
import time
import zlib
from collections.abc import Collection, Iterable
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


def objects(root: Path, *, but: Collection[str] = ()) -> list[Path]:
    """All object files under `root`, in name order, `but` for those of some namespaces."""
    found = (path for path in root.glob("*/*/???/*") if not path.name.startswith("."))
    return sorted(path for path in found if path.parts[-4] not in but)


def namespaces(root: Path) -> set[str]:
    """The namespaces that have objects."""
    return {path.parts[-4] for path in objects(root)}


def rows(root: Path) -> dict[str, list[Path]]:
    """The object files by row."""
    return by_row(objects(root))


def by_row(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Object files by row."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        found.setdefault(path.parts[-3], []).append(path)
    return found


def most(paths: Iterable[Path]) -> int:
    """How many objects the row has that has most of them: one that keeps all blocks of a prefix."""
    return max(map(len, by_row(paths).values()), default=0)


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


def wait_whole(root: Path, count: int, *, writer: Engine, but: Collection[str] = ()) -> list[Path]:
    """All objects, as `objects` has them, when they are whole and a row has `count`; waits a minute for it.

    TimeoutError after that, EngineFailed if their writer ends.
    """
    deadline = time.monotonic() + WRITE_LIMIT_S
    while most(found := objects(root, but=but)) < count or not all(map(is_whole, found)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{most(found)} objects of a row instead of {count} after {WRITE_LIMIT_S} s")
        writer.watch(LOOK_EVERY_S)
    return found


def values(path: Path, dtype: str) -> NDArray[np.float32]:
    """What an object of "float32" or "bfloat16" holds, shard by shard with zeros where it is padded."""
    payload = path.read_bytes()[HEADER_BYTES:]
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(payload, dtype="<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(payload, dtype="<f4")


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
