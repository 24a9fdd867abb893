"""Full attention mixed with gated delta networks.

Shapes of a state: convolution ``(kernel - 1, 2 * key_heads * key_dim + value_heads * value_dim)``, then
matrix ``(value_heads, value_dim, key_dim)`` (vLLM ``layers/mamba/mamba_utils.py``:
``gated_delta_net_state_shape``). Draft layers are full attention (vLLM ``models/qwen3_next_mtp.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import (
    Family,
    Holding,
    attention,
    draft_layers,
    layer_kinds,
    periodic,
    placed,
    state,
)

__all__ = ["DRAFTS", "FAMILIES"]

_KINDS = {"linear_attention": "state", "full_attention": "full"}


def _gated_delta(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield full attention in each ``full_attention_interval``-th layer (4 by default), states elsewhere."""
    period = facts.whole("full_attention_interval", default=4)
    pattern = periodic(facts.layer_count, period, others="state", last="full")
    kinds = layer_kinds(facts, keys=("layer_types",), spellings=_KINDS) or pattern
    return placed(kinds, {"full": (attention(facts, facts.head_dim(256)),), "state": (_state(facts),)})


def _state(facts: Facts) -> Holding:
    key_heads, key_dim = facts.whole("linear_num_key_heads"), facts.whole("linear_key_head_dim")
    value_heads, value_dim = facts.whole("linear_num_value_heads"), facts.whole("linear_value_head_dim")
    conv = (facts.whole("linear_conv_kernel_dim") - 1, 2 * key_heads * key_dim + value_heads * value_dim)
    return state(facts, "gdn", conv=conv, ssm=(value_heads, value_dim, key_dim))


def _drafted(facts: Facts) -> Iterable[tuple[int, Holding]]:
    key = "num_nextn_predict_layers" if facts.model_type == "qwen3_next" else "mtp_num_hidden_layers"
    full = attention(facts, facts.head_dim(256))
    return ((layer, full) for layer in draft_layers(facts, key))


_MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

FAMILIES: dict[str, Family] = dict.fromkeys(_MODEL_TYPES, _gated_delta)
"""model_type -> what each layer holds."""

DRAFTS: dict[str, Family] = dict.fromkeys(_MODEL_TYPES, _drafted)
"""model_type -> what each draft layer holds."""
