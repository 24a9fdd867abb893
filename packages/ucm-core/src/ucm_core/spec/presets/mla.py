"""Multi-head latent attention: a latent vector and a rotary key per token, equal on all tensor ranks."""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, Holding
from ucm_core.spec.rows import Part, RankRule, RowKind

__all__ = ["FAMILIES"]


def _latent(facts: Facts) -> Iterable[tuple[int, Holding]]:
    latent, rope = facts.whole("kv_lora_rank"), facts.whole("qk_rope_head_dim")
    parts = (Part("latent", (latent,), facts.kv_dtype), Part("rope", (rope,), facts.kv_dtype))
    holding = Holding(f"mla-{latent + rope}", RowKind.CHAIN, parts, rank_rule=RankRule.ALL_UNION)
    return ((layer, holding) for layer in range(facts.layer_count))


FAMILIES: dict[str, Family] = {"deepseek_v2": _latent, "deepseek_v3": _latent}
"""model_type -> what each layer holds."""
