"""Latent attention over the tokens that an indexer picks: the index keys follow the latents' blocks.

Sources: vLLM ``models/deepseek_v32/attention.py`` (index keys of ``index_head_dim`` and, in 8 bits, one
float32 scale per 128 of them; which layers have an indexer of their own) and
``v1/attention/backends/mla/flashmla_sparse.py`` (8-bit latents: 512 values, one float32 scale per 128, a
rotary key that stays bfloat16); transformers ``configuration_glm_moe_dsa.py`` (``indexer_types``). An engine
that stores either in another way does not fit these rows and is refused when it registers its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, Holding, draft_layers, latent_attention, layer_kinds, placed
from ucm_core.spec.rows import Part, RowKind

__all__ = ["DRAFTS", "FAMILIES"]

_KINDS = {"full": "own", "F": "own", "shared": "shared", "S": "shared"}
_SCALED = 128
_PACKED = ("float8_e4m3fn", "float8_e4m3fnuz")
_PLAIN = ("bfloat16", "float16", "float32")


def _indexed(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield latents in every layer and index keys where the indexer is not an earlier layer's."""
    latents = _latents(facts)
    keys = _index_keys(facts, latents)
    return placed(_indexers(facts), {"shared": (latents,), "own": (latents, keys)})


def _drafted(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield both: a draft layer always has its own indexer."""
    latents = _latents(facts)
    both = (latents, _index_keys(facts, latents))
    return ((layer, held) for layer in draft_layers(facts, "num_nextn_predict_layers") for held in both)


def _indexers(facts: Facts) -> tuple[str, ...]:
    """Return "own" or "shared" per layer: as listed, else every ``index_topk_freq``-th layer has its own."""
    period = facts.whole("index_topk_freq", default=1)
    offset = facts.count("index_skip_topk_offset", default=2)
    pattern = tuple(
        "shared" if max(layer - offset + 1, 0) % period else "own" for layer in range(facts.layer_count)
    )
    return layer_kinds(facts, keys=("indexer_types", "index_topk_pattern"), spellings=_KINDS) or pattern


def _latents(facts: Facts) -> Holding:
    plain = latent_attention(facts)
    if facts.kv_dtype in _PLAIN:
        return plain
    latent, rope = plain.parts
    if facts.kv_dtype not in _PACKED:
        raise facts.wrong(
            f"has sparse attention over {facts.kv_dtype} latents; how they are stored is known for "
            f"{', '.join((*_PLAIN, *_PACKED))}"
        )
    scale = Part("scale", _scales(facts, latent.shape[0]), "float32")
    return replace(plain, parts=(latent, scale, replace(rope, dtype="bfloat16")))


def _index_keys(facts: Facts, latents: Holding) -> Holding:
    size, dtype = facts.whole("index_head_dim"), facts.state_dtype("index")
    scale = (Part("scale", _scales(facts, size), "float32"),) if dtype in _PACKED else ()
    return Holding(
        f"indexer-{size}",
        RowKind.FOLLOWER,
        (Part("key", (size,), dtype), *scale),
        rank_rule=latents.rank_rule,
        follows=latents,
    )


def _scales(facts: Facts, size: int) -> tuple[int]:
    if size % _SCALED:
        raise facts.wrong(f"has {size} values, no multiple of the {_SCALED} that share a scale")
    return (size // _SCALED,)


FAMILIES: dict[str, Family] = {"deepseek_v32": _indexed, "glm_moe_dsa": _indexed}
"""model_type -> what each layer holds."""

DRAFTS: dict[str, Family] = {"deepseek_v32": _drafted, "glm_moe_dsa": _drafted}
"""model_type -> what each draft layer holds."""
