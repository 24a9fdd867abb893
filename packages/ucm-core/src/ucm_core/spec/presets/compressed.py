"""A short window in every layer, and entries that stand for 4 or for 128 tokens in most.

What a layer holds follows from its ratio (0 or 1: nothing besides the window). Sources: vLLM
``models/deepseek_v4/attention.py`` (window, entries, index keys of ratio 4), ``compressor.py`` (states) and
``v1/attention/backends/mla/flashmla_sparse.py`` (8-bit entries: 448 values, 64 bfloat16 of the rotary key, 7
shared exponents and a byte of padding); keys and defaults: transformers ``configuration_deepseek_v4.py``.

An entry of ratio 4 is made of 8 tokens, its own 4 and the 4 before: resuming needs what the compressor knows
of the last 4, in float32, and at one position only, so it is a snapshot of ``(4, 2 * 2 * head_dim)`` values
(vectors and scores). An entry of ratio 128 is made of its own tokens. Blocks of that row are whole entries,
so at every position where all rows meet its compressor holds nothing: a row of kind none.
"""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import (
    Family,
    Holding,
    agreed,
    draft_layers,
    layer_kinds,
    numbered_kinds,
    placed,
    shape_digest,
)
from ucm_core.spec.rows import Part, RankRule, RowKind

__all__ = ["DRAFTS", "FAMILIES"]

_KINDS = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "fine",
    "heavily_compressed_attention": "coarse",
}
_RATIOS = {0: "window", 1: "window", 4: "fine", 128: "coarse"}
_DEFAULTS = {"head_dim": 512, "qk_rope_head_dim": 64, "sliding_window": 128, "index_head_dim": 128}
_UNION = RankRule.ALL_UNION


def _compressed(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield the window and what the layer's ratio adds."""
    facts = facts.with_defaults(_DEFAULTS)
    window, fine, coarse = _window(facts), _entries(facts, 4), _entries(facts, 128)
    idle = Holding("compressor-128", RowKind.NONE, ())
    held = {
        "window": (window,),
        "fine": (window, fine, _index_keys(facts, fine), _compressor(facts)),
        "coarse": (window, coarse, idle),
    }
    return placed(_kinds(facts), held)


def _drafted(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield the window alone: draft layers compress nothing."""
    facts = facts.with_defaults(_DEFAULTS)
    return ((layer, _window(facts)) for layer in draft_layers(facts, "num_nextn_predict_layers"))


def _kinds(facts: Facts) -> tuple[str, ...]:
    """Return the kind of each layer; a list of ratios may go on with the draft layers."""
    ratios = numbered_kinds(facts, "compress_ratios", spellings=_RATIOS)
    listed = layer_kinds(facts, keys=("layer_types",), spellings=_KINDS)
    return agreed(facts, {"compress_ratios": ratios and ratios[: facts.layer_count], "layer_types": listed})


def _window(facts: Facts) -> Holding:
    """Return the uncompressed latents of a sliding window."""
    if facts.count("vision_n_layers", default=0):
        raise facts.wrong("has image tokens that look past their window; how far is not known here")
    size, window = facts.whole("head_dim"), facts.whole("sliding_window")
    name = f"mla-{size}-window-{window}"
    return Holding(name, RowKind.CHAIN, _latent_parts(facts, 1), window=window, rank_rule=_UNION)


def _entries(facts: Facts, ratio: int) -> Holding:
    name = f"mla-{facts.whole('head_dim')}-c{ratio}"
    return Holding(name, RowKind.CHAIN, _latent_parts(facts, ratio), rank_rule=_UNION)


def _latent_parts(facts: Facts, ratio: int) -> tuple[Part, ...]:
    rope = facts.whole("qk_rope_head_dim")
    latent = facts.whole("head_dim") - rope
    if facts.kv_dtype in ("bfloat16", "float16", "float32"):
        return Part("latent", (latent,), facts.kv_dtype, ratio), Part("rope", (rope,), facts.kv_dtype, ratio)
    if facts.kv_dtype != "float8_e4m3fn" or (latent, rope) != (448, 64):
        raise facts.wrong(
            f"stores {latent} + {rope} values as {facts.kv_dtype}; in which way is not known here"
        )
    return (
        Part("latent", (latent,), facts.kv_dtype, ratio),
        Part("rope", (rope,), "bfloat16", ratio),
        Part("scale", (8,), "uint8", ratio),
    )


def _index_keys(facts: Facts, entries: Holding) -> Holding:
    size, dtype = facts.whole("index_head_dim"), facts.state_dtype("index")
    key = Part("key", (size,), dtype, 4)
    parts = (key, Part("scale", (size // 128,), "float32", 4)) if dtype.startswith("float8") else (key,)
    return Holding(f"indexer-{size}-c4", RowKind.FOLLOWER, parts, rank_rule=_UNION, follows=entries)


def _compressor(facts: Facts) -> Holding:
    """Return what the attention's and the indexer's compressor know of the last 4 tokens."""
    shapes = [(4, 2 * 2 * facts.whole(key)) for key in ("head_dim", "index_head_dim")]
    parts = tuple(
        Part(name, shape, "float32") for name, shape in zip(("attention", "indexer"), shapes, strict=True)
    )
    return Holding(f"compressor-4-{shape_digest(*shapes)}", RowKind.SNAPSHOT, parts, rank_rule=_UNION)


FAMILIES: dict[str, Family] = {"deepseek_v4": _compressed}
"""model_type -> what each layer holds."""

DRAFTS: dict[str, Family] = {"deepseek_v4": _drafted}
"""model_type -> what each draft layer holds."""
