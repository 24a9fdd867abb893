"""Full attention mixed with lightning attention.

A lightning layer keeps one matrix per head, keys times values: ``(heads, head_dim, head_dim)`` (transformers
``modeling_minimax.py``; vLLM ``layers/mamba/mamba_utils.py``: ``linear_attention_state_shape``; SGLang
``configs/minimax_text_01.py``, also for ``attn_type_list``: 0 lightning, 1 full).
"""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import (
    Family,
    Holding,
    agreed,
    attention,
    layer_kinds,
    numbered_kinds,
    periodic,
    placed,
    shape_digest,
)
from ucm_core.spec.rows import Part, RowKind

__all__ = ["FAMILIES"]

_KINDS = {"linear_attention": "state", "full_attention": "full"}


def _alternating(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield by the list of layer kinds; without one, full attention in every even layer."""
    pattern = periodic(facts.layer_count, 2, others="full", last="state")
    return _mixed(facts, layer_kinds(facts, keys=("layer_types",), spellings=_KINDS) or pattern)


def _typed(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield by the list of attention types."""
    kinds = numbered_kinds(facts, "attn_type_list", spellings={0: "state", 1: "full"})
    return _mixed(facts, agreed(facts, {"attn_type_list": kinds}))


def _mixed(facts: Facts, kinds: tuple[str, ...]) -> Iterable[tuple[int, Holding]]:
    dim = facts.head_dim()
    shape = (facts.whole("num_attention_heads"), dim, dim)
    parts = (Part("ssm", shape, facts.state_dtype("ssm")),)
    lightning = Holding(f"lightning-{shape_digest(shape)}", RowKind.SNAPSHOT, parts)
    return placed(kinds, {"full": (attention(facts, dim),), "state": (lightning,)})


FAMILIES: dict[str, Family] = {"minimax": _alternating, "minimax_text_01": _typed, "minimax_m1": _typed}
"""model_type -> what each layer holds."""
