"""Tiny checkpoints, written by code: a `config.json` and one `model.safetensors` each, always the same."""

from e2e.checkpoints.adapters import write_adapter
from e2e.checkpoints.families import FAMILIES, Family, bench_family, demo_family
from e2e.checkpoints.write import alter_one_value, write_checkpoint

__all__ = [
    "FAMILIES",
    "Family",
    "alter_one_value",
    "bench_family",
    "demo_family",
    "write_adapter",
    "write_checkpoint",
]
