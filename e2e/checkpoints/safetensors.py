"""The safetensors container, from its public description: u64 header length, JSON header, tensor bytes.

Written here, in a few lines of numpy, so that the environment of the stories needs neither torch nor an
engine.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = {"BF16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one tensor lies in a file."""

    dtype: str
    """`BF16` or `F32`."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte from the start of the file."""
    end: int
    """Offset past its last byte."""


def encode(values: NDArray[np.float32], dtype: str) -> bytes:
    """The little-endian bytes of `values`; BF16 rounds to nearest even."""
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    bits = values.astype("<f4").view("<u4")
    rounded: NDArray[np.uint32] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").tobytes()


def decode(data: bytes, dtype: str) -> NDArray[np.float32]:
    """The values that `encode` made these bytes of, as far as it rounds."""
    if dtype == "F32":
        return np.frombuffer(data, "<f4")
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def write_tensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], *, dtype: str) -> None:
    """Write `tensors` in name order to `path`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    offset = 0
    for name in sorted(tensors):
        data = encode(tensors[name], dtype)
        end = offset + len(data)
        header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [offset, end]}
        chunks.append(data)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def placement(path: Path) -> dict[str, Placed]:
    """Where each tensor of the file at `path` lies."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    base = 8 + length
    return {
        name: Placed(
            entry["dtype"], tuple(entry["shape"]), *(base + offset for offset in entry["data_offsets"])
        )
        for name, entry in header.items()
    }


def read_tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """The values of each tensor of the file at `path`."""
    data = path.read_bytes()
    return {
        name: decode(data[placed.begin : placed.end], placed.dtype).reshape(placed.shape)
        for name, placed in placement(path).items()
    }
