"""Small models for tests of the facade: tables, identities, payloads."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable

Payloads = dict[str, npt.NDArray[np.uint8]]

GRAIN = 16
RING_BYTES = 4 << 20

FULL = SpecRow(
    "full", RowKind.CHAIN, GRAIN, (0, 2), (Part("k", (2, 8), "bfloat16"), Part("v", (2, 8), "bfloat16"))
)
WINDOW = SpecRow("window-40", RowKind.CHAIN, GRAIN, (1, 3), (Part("k", (2, 8), "bfloat16"),), window=40)
STATE = SpecRow(
    "state", RowKind.SNAPSHOT, GRAIN, (4,), (Part("conv", (3, 5), "bfloat16"), Part("ssm", (7,), "float32"))
)

DENSE = SpecTable((FULL,), GRAIN)
HYBRID = SpecTable((FULL, WINDOW, STATE), GRAIN)


def identity_of(table: SpecTable, **changes: object) -> ModelIdentity:
    """A known identity for ``table``."""
    identity = ModelIdentity(
        config='{"model_type": "test"}',
        weights="5a" * 32,
        revision=None,
        compute_dtype="bfloat16",
        kv_dtype="bfloat16",
        table=table.digest.hex(),
        grain_tokens=table.grain_tokens,
    )
    return dataclasses.replace(identity, **changes)  # type: ignore[arg-type]


def blocks_of(row: SpecRow, count: int, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Reproducible blocks of a row, ``uint8[count, units, unit_bytes]``."""
    shape = (count, len(row.units), row.unit_bytes)
    return np.random.default_rng([seed, *row.name.encode()]).integers(0, 256, shape, dtype=np.uint8)


def payloads_of(table: SpecTable, blocks: int, *, seed: int = 0) -> Payloads:
    """Blocks for every row of a table."""
    return {row.name: blocks_of(row, blocks, seed=seed) for row in table.rows}
