"""From "layer n holds this" to named rows: the one place where canonical rows are grouped and named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ucm_core.errors import SpecError
from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.rows import Part, RankRule, RowKind, SpecRow

__all__ = [
    "Family",
    "Holding",
    "attention",
    "layer_kinds",
    "rows_of",
    "shape_digest",
    "state",
]


@dataclass(frozen=True, slots=True)
class Holding:
    """What one layer keeps for one cache semantics; layers with equal holdings form a row."""

    name: str
    """Name by meaning; rows of equal name and other geometry get ``.2``, ``.3`` in order of first layer."""
    kind: RowKind
    """Chain or snapshot."""
    parts: tuple[Part, ...]
    """What one unit holds."""
    window: int | None = None
    """Sliding window in tokens."""
    rank_rule: RankRule = RankRule.INTERSECTION
    """Whether tensor parallelism slices or replicates it."""


Family = Callable[[Facts], Iterable[tuple[int, Holding]]]
"""Yields (global layer, holding); a layer may hold several things."""


def rows_of(
    holdings: Iterable[tuple[int, Holding]], *, block_tokens: int, grain_tokens: int
) -> tuple[SpecRow, ...]:
    """Return one row per distinct holding, in order of first layer; snapshots lie on the grain's grid."""
    layers: dict[Holding, list[int]] = {}
    for layer, holding in holdings:
        layers.setdefault(holding, []).append(layer)
    if not layers:
        raise SpecError("the model has no layer that keeps anything")
    taken: dict[str, int] = {}
    rows = []
    for holding, units in layers.items():
        count = taken[holding.name] = taken.get(holding.name, 0) + 1
        rows.append(
            SpecRow(
                name=holding.name if count == 1 else f"{holding.name}.{count}",
                kind=holding.kind,
                block_tokens=grain_tokens if holding.kind is RowKind.SNAPSHOT else block_tokens,
                units=tuple(units),
                parts=holding.parts,
                window=holding.window,
                rank_rule=holding.rank_rule,
            )
        )
    return tuple(rows)


def attention(facts: Facts, head_dim: int, *, window: int | None = None) -> Holding:
    """Return keys and values per head, of the whole prefix or of a window."""
    shape = (facts.key_value_heads, head_dim)
    parts = (Part("k", shape, facts.kv_dtype), Part("v", shape, facts.kv_dtype))
    name = "full" if window is None else f"window-{window}"
    return Holding(name, RowKind.CHAIN, parts, window=window)


def state(facts: Facts, stem: str, *, conv: tuple[int, ...], ssm: tuple[int, ...]) -> Holding:
    """Return a recurrent state: its convolution window, then its matrix state, fastest axis last."""
    parts = (
        Part("conv", conv, facts.state_dtype("conv")),
        Part("ssm", ssm, facts.state_dtype("ssm")),
    )
    return Holding(f"{stem}-{shape_digest(conv, ssm)}", RowKind.SNAPSHOT, parts)


def shape_digest(*shapes: tuple[int, ...]) -> str:
    """Return 8 hex characters that stand for a list of shapes."""
    text = ";".join("x".join(map(str, shape)) for shape in shapes)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def layer_kinds(facts: Facts, *, keys: tuple[str, ...], spellings: dict[str, str]) -> tuple[str, ...] | None:
    """Return the kind of each layer in our spelling, from a list in the configuration; None without one.

    Raises SpecError for a kind that ``spellings`` does not know and for a list of another length.
    """
    names = facts.names(*keys)
    if names is None:
        return None
    unknown = sorted(set(names) - set(spellings))
    if unknown:
        raise SpecError(
            f"the config of {facts.model_type} has layers of the unknown kind {', '.join(unknown)}"
        )
    count = facts.whole("num_hidden_layers", default=len(names))
    if len(names) != count:
        raise SpecError(f"the config of {facts.model_type} names {len(names)} layers and has {count}")
    return tuple(spellings[name] for name in names)
