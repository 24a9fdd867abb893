"""Full keys and values in every layer, and index keys in the layers that attend to picked blocks only.

One index key of ``sparse_index_dim`` per token, equal on all tensor ranks, in the type that the engine
resolved (vLLM ``models/minimax_m3/common/indexer.py``); layers: ``sparse_attention_freq`` (the same,
``nvidia/model.py``) or ``layer_types`` (transformers ``configuration_minimax_m3_vl.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import (
    Family,
    Holding,
    agreed,
    attention,
    layer_kinds,
    numbered_kinds,
    placed,
)
from ucm_core.spec.rows import Part, RankRule, RowKind

__all__ = ["FAMILIES"]

_KINDS = {"minimax_m3_sparse": "sparse", "full_attention": "full"}


def _picked(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield keys and values everywhere, index keys in sparse layers; without a list there is none."""
    full = attention(facts, facts.head_dim())
    nested = facts.section("sparse_attention_config")
    listed = layer_kinds(facts, keys=("layer_types",), spellings=_KINDS)
    picked = None if nested is None else _nested_kinds(nested)
    kinds = (
        listed if nested is None else agreed(facts, {"layer_types": listed, "sparse_attention_freq": picked})
    )
    size = facts.whole("index_head_dim", default=128) if nested is None else nested.whole("sparse_index_dim")
    held = {"full": (full,), "sparse": (full, _index_key(facts, size, full))}
    return placed(kinds or ("full",) * facts.layer_count, held)


def _nested_kinds(nested: Facts) -> tuple[str, ...]:
    """Return the kinds; SpecError where sparse layers would also cache index values."""
    kinds = numbered_kinds(nested, "sparse_attention_freq", spellings={0: "full", 1: "sparse"}) or ()
    values = numbered_kinds(nested, "sparse_disable_index_value", spellings={0: "values", 1: "none"})
    values = ("none",) * len(kinds) if values is None else values
    if ("sparse", "values") in zip_longest(kinds, values, fillvalue="values"):
        raise nested.wrong("keeps index values; how they are stored is not known here")
    return kinds


def _index_key(facts: Facts, size: int, full: Holding) -> Holding:
    parts = (Part("key", (size,), facts.state_dtype("index")),)
    union = RankRule.ALL_UNION
    return Holding(f"indexer-{size}", RowKind.FOLLOWER, parts, rank_rule=union, follows=full)


FAMILIES: dict[str, Family] = {"minimax_m3_text": _picked, "minimax_m3_vl_text": _picked}
"""model_type -> what each layer holds."""
