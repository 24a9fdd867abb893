"""X-Hybrid-96: a made-up model with every kind of row, to stress what is generic. It is data, no code.

96 layers in four periods of 24: 4 mla, 4 csa, 6 swa, 5 mamba2, 2 kda, 2 cross, 1 dsa. 8 KV heads of 128,
bfloat16.
"""

from __future__ import annotations

from ucm_core.spec.rows import Part, RankRule, RowKind, SpecRow
from ucm_core.spec.table import SpecTable

__all__ = ["X_HYBRID_LAYERS", "X_HYBRID_PERIOD", "x_hybrid_96"]

X_HYBRID_LAYERS = 96
"""Layers of the model."""

X_HYBRID_PERIOD = (("mla", 4), ("csa", 4), ("swa", 6), ("mamba2", 5), ("kda", 2), ("cross", 2), ("dsa", 1))
"""Layers of one period, in order."""

_HEADS = (8, 128)


def x_hybrid_96(*, window: int = 512, kda_interval: int = 256) -> SpecTable:
    """Return the table: 8 rows, blocks of 128 tokens on a grain of 64."""
    layers = _layers()
    union = RankRule.ALL_UNION
    rows = (
        SpecRow("mla", RowKind.CHAIN, 128, layers["mla"], _mla_parts(), rank_rule=union),
        SpecRow(
            "csa_c16",
            RowKind.CHAIN,
            128,
            layers["csa"],
            (_compressed("entry", 512, "float8_e4m3fn"),),
            rank_rule=union,
        ),
        SpecRow("swa", RowKind.CHAIN, 128, layers["swa"], _swa_parts(), window=window),
        SpecRow(
            "indexer",
            RowKind.FOLLOWER,
            128,
            layers["dsa"],
            (Part("key", (128,), "bfloat16"),),
            rank_rule=union,
            follows="mla",
        ),
        SpecRow(
            "scale",
            RowKind.FOLLOWER,
            128,
            layers["csa"],
            (_compressed("scale", 4, "float32"),),
            rank_rule=union,
            follows="csa_c16",
        ),
        SpecRow("mamba2", RowKind.SNAPSHOT, 64, layers["mamba2"], _mamba2_parts()),
        SpecRow(
            "kda_perslot",
            RowKind.SNAPSHOT,
            64,
            layers["kda"],
            (Part("state", (32, 128, 128), "float32"),),
            interval=kda_interval,
        ),
        SpecRow("cross", RowKind.NONE, 0, layers["cross"], ()),
    )
    return SpecTable(rows, 64)


def _layers() -> dict[str, tuple[int, ...]]:
    """Return the global layers of each kind."""
    period = [kind for kind, count in X_HYBRID_PERIOD for _ in range(count)]
    kinds = period * (X_HYBRID_LAYERS // len(period))
    return {kind: tuple(n for n, other in enumerate(kinds) if other == kind) for kind, _ in X_HYBRID_PERIOD}


def _mla_parts() -> tuple[Part, ...]:
    """512 bytes per token and layer."""
    return Part("latent", (192,), "bfloat16"), Part("rope", (64,), "bfloat16")


def _swa_parts() -> tuple[Part, ...]:
    return Part("k", _HEADS, "bfloat16"), Part("v", _HEADS, "bfloat16")


def _mamba2_parts() -> tuple[Part, ...]:
    """128 heads of 64, state 128, 8 groups, kernel 4: the widest convolution is 128*64 + 2*8*128 = 10240."""
    return Part("conv", (3, 10_240), "bfloat16"), Part("ssm", (128, 64, 128), "float32")


def _compressed(name: str, size: int, dtype: str) -> Part:
    """One entry per 16 tokens."""
    return Part(name, (size,), dtype, tokens_per_entry=16)
