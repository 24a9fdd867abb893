"""Windows and full attention, the last layers of which share the keys and values of earlier ones.

A sharing layer reads those of the last layer of its own kind before all sharing ones (transformers
``modeling_gemma3n.py``: ``kv_shared_layer_index``); it owns no bytes. Defaults: ``configuration_gemma3n.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, Holding, Shared, attention, layer_kinds, periodic, placed

__all__ = ["FAMILIES"]

_KINDS = {"full_attention": "full", "sliding_attention": "window"}
_DEFAULTS = {
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
}


def _sharing(facts: Facts) -> Iterable[tuple[int, Holding | Shared]]:
    """Yield a window in every layer but each fifth, and sources for the last layers."""
    facts = facts.with_defaults(_DEFAULTS)
    pattern = periodic(facts.layer_count, 5, others="window", last="full")
    kinds = layer_kinds(facts, keys=("layer_types",), spellings=_KINDS) or pattern
    owners = max(0, facts.layer_count - facts.count("num_kv_shared_layers", default=0))
    full, window = attention(facts, facts.head_dim()), facts.whole("sliding_window")
    local = attention(facts, facts.head_dim(), window=window)
    yield from placed(kinds[:owners], {"full": (full,), "window": (local,)})
    last = {kind: layer for layer, kind in enumerate(kinds[:owners])}
    for layer, kind in enumerate(kinds[owners:], start=owners):
        if kind not in last:
            raise facts.wrong(f"has layer {layer} share a {kind} layer before layer {owners}: there is none")
        yield layer, Shared(last[kind])


FAMILIES: dict[str, Family] = {"gemma3n_text": _sharing}
"""model_type -> what each layer holds."""
