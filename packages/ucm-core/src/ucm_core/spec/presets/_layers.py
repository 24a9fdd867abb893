"""From "layer n holds this" to named rows: the one place where canonical rows are grouped and named."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ucm_core.errors import SpecError, shown
from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.rows import Part, RankRule, RowKind, SpecRow, is_count

__all__ = [
    "Family",
    "Holding",
    "Shared",
    "agreed",
    "attention",
    "draft_layers",
    "latent_attention",
    "layer_kinds",
    "numbered_kinds",
    "periodic",
    "placed",
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
    """Any kind; layers of kind none keep nothing that is cached."""
    parts: tuple[Part, ...]
    """What one unit holds."""
    window: int | None = None
    """Sliding window in tokens."""
    rank_rule: RankRule = RankRule.INTERSECTION
    """Whether tensor parallelism slices or replicates it."""
    interval: int | None = None
    """Snapshots that exist at every token: about this many tokens between kept ones."""
    follows: Holding | None = None
    """Followers: the holding whose row they ride on."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A layer without bytes of its own: it reads those of another one (YOCO)."""

    source: int
    """Global number of the layer that owns the bytes."""


Family = Callable[[Facts], Iterable[tuple[int, Holding | Shared]]]
"""Yields (global layer, what it holds); a layer may hold several things, or share those of one layer."""


def rows_of(
    holdings: Iterable[tuple[int, Holding | Shared]],
    *,
    block_tokens: int,
    grain_tokens: int,
    prefix: str = "",
) -> tuple[SpecRow, ...]:
    """Return one row per distinct holding, in order of first layer; snapshots lie on the grain's grid.

    Names begin with ``prefix``. Layers that share another's bytes own none and are in no row.
    """
    for key, tokens in (("grain_tokens", grain_tokens), ("block_tokens", block_tokens)):
        if not is_count(tokens):
            raise SpecError(f"{key} is {shown(tokens)}, must be at least 1")
    layers: dict[Holding, list[int]] = {}
    for layer, holding in holdings:
        if isinstance(holding, Holding):
            layers.setdefault(holding, []).append(layer)
    if not layers:
        raise SpecError("the model has no layer that keeps anything")
    names = _names(layers, prefix)
    return tuple(
        SpecRow(
            name=names[holding],
            kind=holding.kind,
            block_tokens=_block_tokens(holding, block_tokens, grain_tokens),
            units=tuple(units),
            parts=holding.parts,
            window=holding.window,
            rank_rule=holding.rank_rule,
            interval=holding.interval and -(-holding.interval // grain_tokens) * grain_tokens,
            follows=names[holding.follows] if holding.follows else None,
        )
        for holding, units in layers.items()
    )


def _names(holdings: Iterable[Holding], prefix: str) -> dict[Holding, str]:
    taken: dict[str, int] = {}
    names = {}
    for holding in holdings:
        count = taken[holding.name] = taken.get(holding.name, 0) + 1
        names[holding] = prefix + (holding.name if count == 1 else f"{holding.name}.{count}")
    return names


def _block_tokens(holding: Holding, block_tokens: int, grain_tokens: int) -> int:
    """Return the grid, or the fewest tokens of whole blocks that cut no entry of a compressed part."""
    if holding.kind is RowKind.SNAPSHOT:
        return grain_tokens
    if holding.kind is RowKind.NONE:
        return 0
    return math.lcm(block_tokens, *(part.tokens_per_entry for part in holding.parts))


def attention(facts: Facts, head_dim: int, *, window: int | None = None) -> Holding:
    """Return keys and values per head, of the whole prefix or of a window."""
    shape = (facts.key_value_heads, head_dim)
    parts = (Part("k", shape, facts.kv_dtype), Part("v", shape, facts.kv_dtype))
    name = "full" if window is None else f"window-{window}"
    return Holding(name, RowKind.CHAIN, parts, window=window)


def latent_attention(facts: Facts) -> Holding:
    """Return a latent vector and a rotary key per token, equal on all tensor ranks."""
    latent, rope = facts.whole("kv_lora_rank"), facts.whole("qk_rope_head_dim")
    parts = (Part("latent", (latent,), facts.kv_dtype), Part("rope", (rope,), facts.kv_dtype))
    return Holding(f"mla-{latent + rope}", RowKind.CHAIN, parts, rank_rule=RankRule.ALL_UNION)


def state(facts: Facts, stem: str, *, conv: tuple[int, ...], ssm: tuple[int, ...]) -> Holding:
    """Return a recurrent state: its convolution window, then its matrix state, fastest axis last."""
    parts = (
        Part("conv", conv, facts.state_dtype("conv")),
        Part("ssm", ssm, facts.state_dtype("ssm")),
    )
    return Holding(f"{stem}-{shape_digest(conv, ssm)}", RowKind.SNAPSHOT, parts)


def draft_layers(facts: Facts, key: str) -> range:
    """Return the numbers of the checkpoint's draft layers; they go on after the model's own."""
    return range(facts.layer_count, facts.layer_count + facts.layers(key))


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
        raise facts.wrong(f"has layers of the unknown kind {', '.join(unknown)}")
    count = facts.whole("num_hidden_layers", default=len(names))
    if len(names) != count:
        raise facts.wrong(f"names {len(names)} layers and has {count}")
    return tuple(spellings[name] for name in names)


def numbered_kinds(facts: Facts, key: str, *, spellings: dict[int, str]) -> tuple[str, ...] | None:
    """Return the kind of each layer in our spelling, from a list of numbers; None without one."""
    numbers = facts.numbers(key)
    if numbers is None:
        return None
    if not set(numbers) <= set(spellings):
        raise facts.wrong(
            f"has {key} = {shown(list(numbers))}; expected {', '.join(map(str, spellings))} per layer"
        )
    return tuple(spellings[number] for number in numbers)


def periodic(count: int, period: int, *, others: str, last: str) -> tuple[str, ...]:
    """Return the kinds of ``count`` layers: ``last`` at the end of each ``period`` of them.

    >>> periodic(5, 3, others="window", last="full")
    ('window', 'window', 'full', 'window', 'window')
    """
    return tuple(others if (layer + 1) % period else last for layer in range(count))


def agreed(facts: Facts, spellings: Mapping[str, tuple[str, ...] | None]) -> tuple[str, ...]:
    """Return the kinds of layers that ``spellings`` (key -> what it says, None when absent) agree on.

    SpecError when there is none, when one has another number of layers, and at the first layer that differs.
    """
    given = {key: kinds for key, kinds in spellings.items() if kinds is not None}
    for key, kinds in given.items():
        if len(kinds) != facts.layer_count:
            raise facts.wrong(f"names {len(kinds)} layers in {key} and has {facts.layer_count}")
    for layer, kind in enumerate(zip(*given.values(), strict=True)):
        if len(set(kind)) > 1:
            raise facts.wrong(f"has layer {layer} as {' and '.join(kind)} in {' and '.join(given)}")
    if not given:
        raise facts.wrong(f"has no {' or '.join(spellings)}")
    return next(iter(given.values()))


def placed(kinds: Iterable[str], held: Mapping[str, tuple[Holding, ...]]) -> Iterator[tuple[int, Holding]]:
    """Yield for each layer what its kind holds."""
    return ((layer, holding) for layer, kind in enumerate(kinds) for holding in held[kind])
