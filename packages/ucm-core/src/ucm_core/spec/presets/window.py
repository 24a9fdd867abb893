"""Full attention and sliding windows mixed in a pattern."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, Holding, attention, layer_kinds

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
    facts = replace(facts, config=_GEMMA3_DEFAULTS | dict(facts.config))
    period = facts.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _mixed(facts, tuple("window" if (n + 1) % period else "full" for n in range(facts.layer_count)))


def _gpt_oss(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield a window in every even layer."""
    facts = replace(facts, config=_GPT_OSS_DEFAULTS | dict(facts.config))
    return _mixed(facts, tuple("full" if n % 2 else "window" for n in range(facts.layer_count)))


def _mixed(facts: Facts, pattern: tuple[str, ...]) -> Iterable[tuple[int, Holding]]:
    window = facts.whole("sliding_window")
    kinds = layer_kinds(facts, keys=("layer_types",), spellings=_KINDS) or pattern
    for layer, kind in enumerate(kinds):
        yield layer, attention(facts, facts.head_dim(), window=window if kind == "window" else None)


FAMILIES: dict[str, Family] = {"gemma3_text": _gemma3, "gpt_oss": _gpt_oss}
"""model_type -> what each layer holds."""
