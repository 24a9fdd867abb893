"""Latent attention mixed with Kimi delta attention.

Shapes of a state: convolution ``(kernel - 1, 3 * heads * head_dim)`` over queries, keys and values, then
matrix ``(heads, head_dim, head_dim)`` (vLLM ``layers/mamba/mamba_utils.py``: ``kda_state_shape``). The
recurrence has a state at every token, so the row is kept at an interval. Keys and their defaults:
transformers ``configuration_kimi_linear.py``; published checkpoints nest them under ``linear_attn_config``
and count layers from 1 there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ucm_core.errors import shown
from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import (
    Family,
    Holding,
    agreed,
    latent_attention,
    layer_kinds,
    placed,
    state,
)

__all__ = ["FAMILIES"]

INTERVAL_TOKENS = 256
"""About as many tokens between kept states as a deployment wants that says nothing else."""

_KINDS = {"linear_attention": "state", "full_attention": "full"}
_DEFAULTS = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}


def _mixed(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield a state or latents, as listed."""
    nested = facts.section("linear_attn_config")
    listed = layer_kinds(facts, keys=("layer_types",), spellings=_KINDS)
    kinds = agreed(
        facts,
        {
            "layer_types": listed,
            "linear_attn_config": _nested_kinds(nested, facts.layer_count) if nested else None,
        },
    )
    return placed(kinds, {"full": (latent_attention(facts),), "state": (_state(facts, nested),)})


def _nested_kinds(nested: Facts, layer_count: int) -> tuple[str, ...]:
    states, full = nested.numbers("kda_layers") or (), nested.numbers("full_attn_layers") or ()
    kinds = dict.fromkeys(states, "state") | dict.fromkeys(full, "full")
    if sorted((*states, *full)) != list(range(1, layer_count + 1)):
        raise nested.wrong(
            f"has kda_layers {shown(states)} and full_attn_layers {shown(full)}; "
            f"expected each of 1 to {layer_count} once"
        )
    return tuple(kinds[layer] for layer in sorted(kinds))


def _state(facts: Facts, nested: Facts | None) -> Holding:
    if nested is None:
        flat = facts.with_defaults(_DEFAULTS)
        heads, dim = flat.whole("linear_num_heads"), flat.whole("linear_head_dim")
        kernel = flat.whole("linear_conv_kernel_dim")
    else:
        heads, dim = nested.whole("num_heads"), nested.whole("head_dim")
        kernel = nested.whole("short_conv_kernel_size")
    made = state(facts, "kda", conv=(kernel - 1, 3 * heads * dim), ssm=(heads, dim, dim))
    return replace(made, interval=INTERVAL_TOKENS)


FAMILIES: dict[str, Family] = {"kimi_linear": _mixed}
"""model_type -> what each layer holds."""
