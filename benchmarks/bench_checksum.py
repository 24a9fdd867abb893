"""Checksums over memory that no cache holds, against memcpy of as many bytes: why objects carry CRC-32C."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Iterator

import numpy as np

from benchmarks.frame import Figure, compare, in_turns, processor_per_gb, timed
from benchmarks.rig import page_memory
from ucm_core import _native
from ucm_core.store.geometry import Geometry

UNIT = Geometry(1, 1 << 20)
OBJECTS = 32


def figures() -> Iterator[Figure]:
    """32 MiB a round, of 96 in turns."""
    thirds = itertools.cycle(np.split(page_memory(3 * OBJECTS, UNIT), 3))
    target = page_memory(OBJECTS, UNIT)
    calls = {
        "CRC-32C, ours": lambda: [_native.crc32c(unit.reshape(-1)) for unit in next(thirds)],
        "CRC-32, zlib": lambda: [zlib.crc32(unit.data) for unit in next(thirds)],
        "BLAKE2b, hashlib": lambda: [hashlib.blake2b(unit.data).digest() for unit in next(thirds)],
        "memcpy": lambda: np.copyto(target, next(thirds)),
    }
    costs = in_turns({name: timed(call) for name, call in calls.items()}, times=5)
    for name in list(calls)[:-1]:
        yield compare(
            f"checksum of cold memory: {name}", costs[name], costs["memcpy"],
            peer="memcpy", limit=None, measure=processor_per_gb(target.nbytes),
        )  # fmt: skip
