"""From vLLM's KV cache groups to the rows of the canonical table.

The table is made by the core from the checkpoint. What vLLM says is checked against it layer by layer (kind,
window, heads, sizes, dtype, state shapes), so nothing here knows a model family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ucm_core.errors import ConfigError, SpecError
from ucm_core.spec.table import MAX_ALIGNMENT_TOKENS, RowKind, SpecRow, SpecTable

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
"""KV and state dtypes whose bytes are understood; quantised caches carry scales that no row holds yet."""

SpecKind = Callable[[Any], str]
"""vLLM's ``get_kv_cache_spec_kind``, as a string."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The part of a row that one engine group holds; several groups of one row have separate block tables."""

    index: int
    """Number of the engine's group."""
    page_tokens: int
    """Tokens per engine block; for a state, the tokens between two boundaries."""
    layers: tuple[tuple[str, int], ...]
    """(vLLM's layer name, unit of the row), in order of units."""
    kind: str = ""
    """As vLLM calls its cache."""


Rows = Mapping[str, tuple[RowGroup, ...]]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What both halves of the connector know about the model and the engine."""

    table: SpecTable
    rows: Rows
    """Row name to the engine groups that hold it."""
    align_tokens: int
    """Hits are multiples of this: lcm of vLLM's alignment, its blocks and the table's alignment."""
    asynchronous: bool = False
    """Loads are asynchronous also where they need not be."""
    workers: int = 1
    """Workers of the engine."""

    @property
    def group_count(self) -> int:
        """Number of engine groups; with more than one, vLLM is told of failed requests, not of blocks."""
        return len({group.index for groups in self.rows.values() for group in groups})

    @property
    def loads_asynchronously(self) -> bool:
        """True where a synchronous load could not be filled in time, or could not fail safely.

        vLLM copies a state before such a load would fill it, knows no failed blocks of several groups, and
        goes back to a failed block of a window although what the window held before it was never loaded.
        With several workers the others would compute on, and save, what one of them could not load.
        """
        windows = any(row.window is not None for row in self.table.chain_rows)
        must = self.workers > 1 or self.group_count > 1 or windows or bool(self.table.snapshot_rows)
        return self.asynchronous or must


@dataclass(frozen=True, slots=True)
class _Facts:
    """What decides whether a layer belongs to a row; compared field by field, in this order."""

    kind: str
    window: int | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    extra: int

    def difference(self, row: _Facts) -> str | None:
        """The first field in which the layer differs from ``row``, with both values."""
        for name, label in (
            ("kind", "kind"), ("window", "sliding window"), ("shapes", "shapes per token or state"),
            ("dtypes", "dtypes"), ("extra", "tokens kept beyond the window"),
        ):  # fmt: skip
            if getattr(self, name) != getattr(row, name):
                return f"{label} is {getattr(self, name)} in vLLM and {getattr(row, name)} in the row"
        return None


def engine_spec(
    table: SpecTable, groups: Iterable[Any], *, spec_kind: SpecKind, engine_align_tokens: int
) -> EngineSpec:
    """Map the engine's groups onto ``table``; SpecError names the layer and both numbers."""
    rows = map_groups(table, groups, spec_kind=spec_kind)
    # whole engine blocks of every group: a state lies at the end of one, and no block is shared half loaded
    pages = (group.page_tokens for held in rows.values() for group in held)
    engine = math.lcm(engine_align_tokens, *pages)
    align = math.lcm(engine, table.alignment_tokens, table.grain_tokens)
    if align > MAX_ALIGNMENT_TOKENS:
        raise SpecError(
            f"vLLM hits are multiples of {engine} tokens and UCM's of {table.alignment_tokens}:"
            f" they meet every {align} tokens, above the limit of {MAX_ALIGNMENT_TOKENS}; choose another"
            f" block_size"
        )
    return EngineSpec(table, rows, align)


def map_groups(table: SpecTable, groups: Iterable[Any], *, spec_kind: SpecKind) -> Rows:
    """Row name to engine groups; every layer of every row is claimed exactly once."""
    claims: dict[str, dict[int, dict[int, str]]] = {}
    pages: dict[int, int] = {}
    kinds: dict[int, str] = {}
    for index, group in enumerate(groups):
        if getattr(group, "is_eagle_group", False):
            raise SpecError(
                f"group {index} ({', '.join(group.layer_names)}) holds draft layers: not supported yet"
            )
        for layer, spec in _layer_specs(group):
            row = _row_of(table, layer, spec, spec_kind)
            unit = row.units.index(layer_number(layer))
            _claim(claims.setdefault(row.name, {}), index, unit, layer)
            pages[index], kinds[index] = int(spec.block_size), spec_kind(spec)
    _check_cover(table, claims)
    return {name: _row_groups(by_group, pages, kinds) for name, by_group in claims.items()}


def layer_number(layer: str) -> int:
    """The global number in a vLLM layer name; SpecError unless there is exactly one.

    >>> layer_number("model.layers.3.self_attn.attn")
    3
    """
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", layer)
    if len(numbers) != 1 or layer.startswith("draft_model."):
        raise SpecError(f"layer {layer!r}: cannot tell its number in the model from its name")
    return int(numbers[0])


def _layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    """(layer name, its own spec); a group of one type of different sizes keeps one spec per layer."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for layer in group.layer_names:
        yield layer, group.kv_cache_spec if own is None else own[layer]


def _claim(by_group: dict[int, dict[int, str]], index: int, unit: int, layer: str) -> None:
    for other, units in by_group.items():
        if unit in units:
            raise SpecError(
                f"layer {layer!r} of group {index} and {units[unit]!r} of group {other} are the same unit"
            )
    by_group.setdefault(index, {})[unit] = layer


def _row_groups(
    by_group: Mapping[int, Mapping[int, str]], pages: Mapping[int, int], kinds: Mapping[int, str]
) -> tuple[RowGroup, ...]:
    return tuple(
        RowGroup(index, pages[index], tuple((units[unit], unit) for unit in sorted(units)), kinds[index])
        for index, units in sorted(by_group.items())
    )


def _check_cover(table: SpecTable, claims: Mapping[str, Mapping[int, Mapping[int, str]]]) -> None:
    for row in table.rows:
        if row.kind is RowKind.NONE:
            continue
        held = {unit for units in claims.get(row.name, {}).values() for unit in units}
        missing = [number for unit, number in enumerate(row.units) if unit not in held]
        if missing:
            raise SpecError(
                f"row {row.name!r} has {len(row.units)} layers, vLLM's groups hold {len(held)} of them: layer"
                f" {missing[0]} is missing"
            )


def _row_of(table: SpecTable, layer: str, spec: Any, spec_kind: SpecKind) -> SpecRow:
    number = layer_number(layer)
    facts = _facts_of_layer(layer, spec, spec_kind(spec))
    rows = [row for row in table.rows if number in row.units]
    differences = [(facts.difference(_facts_of_row(row)), row) for row in rows]
    for difference, row in differences:
        if difference is None:
            return row
    if not rows:
        raise SpecError(f"layer {layer!r}: the canonical table has no row with layer {number}")
    # with several rows of this layer number (attention beside state) the one of the same kind tells most
    same_kind = [pair for pair in differences if _facts_of_row(pair[1]).kind == facts.kind] or differences
    raise SpecError(f"layer {layer!r}, row {same_kind[0][1].name!r}: {same_kind[0][0]}")


def _facts_of_row(row: SpecRow) -> _Facts:
    shapes = tuple(part.shape for part in row.parts)
    dtypes = tuple(part.dtype for part in row.parts)
    if row.kind is RowKind.SNAPSHOT:
        return _Facts("state", None, shapes, dtypes, 0)
    if row.kind is RowKind.CHAIN and [part.name for part in row.parts] == ["latent", "rope"]:
        return _Facts("mla", row.window, ((shapes[0][0] + shapes[1][0],),), dtypes[:1], row.extra)
    return _Facts(
        "attention" if row.kind is RowKind.CHAIN else row.kind.value, row.window, shapes, dtypes, row.extra
    )


def _facts_of_layer(layer: str, spec: Any, kind: str) -> _Facts:
    if kind == "mamba":
        _refuse_state_mode(layer, spec)
        return _Facts(
            "state", None, tuple(map(tuple, spec.shapes)), tuple(_dtype(layer, d) for d in spec.dtypes), 0
        )
    if kind in ("full_attention", "mla_attention", "sliding_window"):
        return _facts_of_attention(layer, spec, kind)
    raise SpecError(f"layer {layer!r}: KV cache kind {kind!r} ({type(spec).__name__}) is not supported")


def _facts_of_attention(layer: str, spec: Any, kind: str) -> _Facts:
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise SpecError(
            f"layer {layer!r}: {spec.tokens_per_state} tokens per stored entry, only 1 is supported"
        )
    if kind == "full_attention" and (spec.sliding_window or spec.attention_chunk_size):
        raise SpecError(
            f"layer {layer!r} attends to {spec.sliding_window or spec.attention_chunk_size} tokens but vLLM"
            f" keeps blocks for all of them; remove --disable-hybrid-kv-cache-manager"
        )
    dtype = _dtype(layer, spec.dtype)
    if kind == "mla_attention":
        return _Facts("mla", None, ((spec.head_size + spec.head_size_v,),), (dtype,), 0)
    shapes = ((spec.num_kv_heads, spec.head_size), (spec.num_kv_heads, spec.head_size_v))
    window = spec.sliding_window if kind == "sliding_window" else None
    return _Facts("attention", window, shapes, (dtype, dtype), getattr(spec, "extra_retained_tokens", 0))


def _refuse_state_mode(layer: str, spec: Any) -> None:
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"layer {layer!r}: mamba_cache_mode is {spec.mamba_cache_mode!r}: states are not kept at block"
            f" boundaries; set enable_prefix_caching=True (mode 'align')"
        )
    if spec.num_speculative_blocks:
        raise ConfigError(
            f"layer {layer!r}: {spec.num_speculative_blocks} speculative state blocks are not supported yet"
        )


def _dtype(layer: str, dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in FLOAT_DTYPES:
        raise SpecError(
            f"layer {layer!r}: KV cache dtype {name} is not supported; use one of {', '.join(FLOAT_DTYPES)}"
        )
    return name
