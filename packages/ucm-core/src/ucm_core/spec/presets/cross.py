"""Full attention mixed with cross attention to an encoder, which is never cached.

Cross layers keep the encoder's keys and values, which belong to a picture and to no prefix of tokens. Keys
and defaults: transformers ``configuration_mllama.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.errors import shown
from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, Holding, attention, placed
from ucm_core.spec.rows import RowKind

__all__ = ["FAMILIES"]

_CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)


def _crossed(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield nothing that is cached at the listed layers."""
    listed = facts.numbers("cross_attention_layers")
    crossing = set(_CROSS_LAYERS if listed is None else listed)
    layers = range(facts.layer_count)
    if not crossing <= set(layers):
        raise facts.wrong(f"has the cross layer {shown(max(crossing))} and {facts.layer_count} layers")
    full, cross = attention(facts, facts.head_dim()), Holding("cross", RowKind.NONE, ())
    kinds = ("cross" if layer in crossing else "full" for layer in layers)
    return placed(kinds, {"full": (full,), "cross": (cross,)})


FAMILIES: dict[str, Family] = {"mllama_text_model": _crossed}
"""model_type -> what each layer holds."""
