"""Multi-head latent attention: a latent vector and a rotary key per token, equal on all tensor ranks.

Draft layers are built like the model's own and numbered after them (vLLM ``models/deepseek_mtp.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, Holding, draft_layers, latent_attention

__all__ = ["DRAFTS", "FAMILIES"]


def _latent(facts: Facts) -> Iterable[tuple[int, Holding]]:
    holding = latent_attention(facts)
    return ((layer, holding) for layer in range(facts.layer_count))


def _drafted(facts: Facts) -> Iterable[tuple[int, Holding]]:
    holding = latent_attention(facts)
    return ((layer, holding) for layer in draft_layers(facts, "num_nextn_predict_layers"))


FAMILIES: dict[str, Family] = {"deepseek_v2": _latent, "deepseek_v3": _latent}
"""model_type -> what each layer holds."""

DRAFTS: dict[str, Family] = {"deepseek_v3": _drafted}
"""model_type -> what each draft layer holds."""
