"""Full attention mixed with attention inside chunks of the sequence.

A token of a chunked layer sees its own chunk up to itself, so resuming at ``b`` needs the tokens from the
last multiple of the chunk size up to ``b``: at most ``chunk - 1``. They all lie in a sliding window of
``chunk`` tokens, which is what the row says. That asks for more than is needed (most at the end of a chunk,
where nothing is) and never for less, so it can cost a hit and cannot make a wrong one, and no other part of
UCM needs to know chunks. Keys: transformers ``configuration_llama4.py``; vLLM ``models/llama4.py`` agrees
that layers without rotary positions are the full ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import (
    Family,
    Holding,
    agreed,
    attention,
    layer_kinds,
    numbered_kinds,
    periodic,
    placed,
)

__all__ = ["FAMILIES"]

_KINDS = {"full_attention": "full", "chunked_attention": "chunk"}
_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
}


def _in_chunks(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield chunks where positions are rotary, full attention elsewhere or when there is no chunk size."""
    facts = facts.with_defaults(_DEFAULTS)
    full = attention(facts, facts.head_dim())
    chunk = facts.optional_whole("attention_chunk_size")
    local = full if chunk is None else replace(full, name=f"chunk-{chunk}", window=chunk)
    return placed(_kinds(facts), {"full": (full,), "chunk": (local,)})


def _kinds(facts: Facts) -> tuple[str, ...]:
    period = facts.whole("no_rope_layer_interval")
    by_rotary = numbered_kinds(facts, "no_rope_layers", spellings={0: "full", 1: "chunk"})
    by_rotary = by_rotary or periodic(facts.layer_count, period, others="chunk", last="full")
    listed = layer_kinds(facts, keys=("layer_types",), spellings=_KINDS)
    return agreed(facts, {"no_rope_layers": by_rotary, "layer_types": listed})


FAMILIES: dict[str, Family] = {"llama4_text": _in_chunks}
"""model_type -> what each layer holds."""
