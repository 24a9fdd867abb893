"""Write a family to a directory, or the same checkpoint with one value changed."""

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from e2e.checkpoints.families import Family, Weight
from e2e.checkpoints.safetensors import ITEM_BYTES, placement, write_tensors

WEIGHTS_FILE = "model.safetensors"


def write_checkpoint(directory: Path, family: Family, *, seed: int = 0) -> Path:
    """Write `family` to `directory` (made if absent) and return it; equal seeds give equal bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(family.config, indent=1, sort_keys=True))
    tensors = {weight.name: _values(weight, seed) for weight in family.weights}
    write_tensors(directory / WEIGHTS_FILE, tensors, dtype=family.dtype)
    return directory


def alter_one_value(source: Path, target: Path, *, tensor: str) -> Path:
    """Copy the checkpoint `source` to `target` with the sign of one value of `tensor` flipped."""
    shutil.copytree(source, target)
    path = target / WEIGHTS_FILE
    placed = placement(path)[tensor]
    sign_byte = placed.begin + ITEM_BYTES[placed.dtype] - 1
    data = bytearray(path.read_bytes())
    data[sign_byte] ^= 0x80
    path.write_bytes(data)
    return target


def _values(weight: Weight, seed: int) -> NDArray[np.float32]:
    # A generator per tensor name: adding a tensor to a family leaves the others as they were.
    generator = np.random.default_rng([seed, zlib.crc32(weight.name.encode())])
    noise = generator.standard_normal(weight.shape, dtype=np.float32)
    return (noise * np.float32(weight.scale) + np.float32(weight.mean)).astype(np.float32)
