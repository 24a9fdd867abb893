"""Dense attention over the whole prefix, or over one window in some or all layers when the config says so."""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, Holding, attention, layer_kinds, placed

__all__ = ["FAMILIES"]

_KINDS = {"full_attention": "full", "sliding_attention": "window"}


def _uniform(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield one kind of attention; a set ``sliding_window`` holds for all layers."""
    window = facts.optional_whole("sliding_window")
    kinds = _kinds(facts) or ("full" if window is None else "window",) * facts.layer_count
    return _holdings(facts, kinds, facts.head_dim())


def _from_a_layer_on(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield full attention below ``max_window_layers`` and, when switched on, a window from there."""
    on = bool(facts.config.get("use_sliding_window")) and facts.optional_whole("sliding_window") is not None
    first = facts.whole("max_window_layers", default=facts.layer_count) if on else facts.layer_count
    by_rule = tuple("full" if layer < first else "window" for layer in range(facts.layer_count))
    kinds = (_kinds(facts) if on else None) or by_rule
    return _holdings(facts, kinds, facts.head_dim(128 if facts.model_type == "qwen3" else None))


def _kinds(facts: Facts) -> tuple[str, ...] | None:
    return layer_kinds(facts, keys=("layer_types",), spellings=_KINDS)


def _holdings(facts: Facts, kinds: tuple[str, ...], head_dim: int) -> Iterable[tuple[int, Holding]]:
    window = facts.whole("sliding_window") if "window" in kinds else None
    held = {"full": (attention(facts, head_dim),), "window": (attention(facts, head_dim, window=window),)}
    return placed(kinds, held)


FAMILIES: dict[str, Family] = {
    "llama": _uniform,
    "mistral": _uniform,
    "qwen2": _from_a_layer_on,
    "qwen3": _from_a_layer_on,
}
"""model_type -> what each layer holds."""
