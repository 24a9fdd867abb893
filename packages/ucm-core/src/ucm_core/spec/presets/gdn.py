"""Full attention mixed with gated delta networks.

Shapes of a state: convolution ``(kernel - 1, 2 * key_heads * key_dim + value_heads * value_dim)``, then
matrix ``(value_heads, value_dim, key_dim)``.
"""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, Holding, attention, layer_kinds, state

__all__ = ["FAMILIES"]

_KINDS = {"linear_attention": "state", "full_attention": "full"}


def _gated_delta(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield full attention in each ``full_attention_interval``-th layer (4 by default), states elsewhere."""
    period = facts.whole("full_attention_interval", default=4)
    pattern = tuple("state" if (n + 1) % period else "full" for n in range(facts.layer_count))
    full = attention(facts, facts.head_dim(256))
    delta = _state(facts)
    kinds = layer_kinds(facts, keys=("layer_types",), spellings=_KINDS) or pattern
    for layer, kind in enumerate(kinds):
        yield layer, full if kind == "full" else delta


def _state(facts: Facts) -> Holding:
    key_heads, key_dim = facts.whole("linear_num_key_heads"), facts.whole("linear_key_head_dim")
    value_heads, value_dim = facts.whole("linear_num_value_heads"), facts.whole("linear_value_head_dim")
    conv = (facts.whole("linear_conv_kernel_dim") - 1, 2 * key_heads * key_dim + value_heads * value_dim)
    return state(facts, "gdn", conv=conv, ssm=(value_heads, value_dim, key_dim))


FAMILIES: dict[str, Family] = {"qwen3_next": _gated_delta}
"""model_type -> what each layer holds."""
