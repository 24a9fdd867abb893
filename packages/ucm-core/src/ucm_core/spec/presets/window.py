"""Full attention and sliding windows mixed in a pattern.

Attention sinks of these models are learned weights of the attention, one per query head: nothing is cached
for them, and a layer with sinks holds what one without holds (transformers ``modeling_gpt_oss.py``:
``sinks``).
"""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, Holding, attention, layer_kinds, periodic, placed

__all__ = ["FAMILIES"]

_KINDS = {"full_attention": "full", "sliding_attention": "window"}

# Published checkpoints leave out what equals the defaults of their configuration class.
_GEMMA3_DEFAULTS = {
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_GPT_OSS_DEFAULTS = {
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
}


def _gemma3(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield a window in every layer but each ``sliding_window_pattern``-th (6 by default)."""
    facts = facts.with_defaults(_GEMMA3_DEFAULTS)
    period = facts.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _mixed(facts, periodic(facts.layer_count, period, others="window", last="full"))


def _gpt_oss(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield a window in every even layer."""
    facts = facts.with_defaults(_GPT_OSS_DEFAULTS)
    return _mixed(facts, periodic(facts.layer_count, 2, others="window", last="full"))


def _mixed(facts: Facts, pattern: tuple[str, ...]) -> Iterable[tuple[int, Holding]]:
    kinds = layer_kinds(facts, keys=("layer_types",), spellings=_KINDS) or pattern
    window = attention(facts, facts.head_dim(), window=facts.whole("sliding_window"))
    return placed(kinds, {"full": (attention(facts, facts.head_dim()),), "window": (window,)})


FAMILIES: dict[str, Family] = {"gemma3_text": _gemma3, "gpt_oss": _gpt_oss}
"""model_type -> what each layer holds."""
