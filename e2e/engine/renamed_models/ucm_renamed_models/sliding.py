"""Gemma 3 under another name, so that SGLang gives its sliding windows a pool of their own."""

from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM


class SlidingForCausalLM(Gemma3ForCausalLM):  # type: ignore[misc]  # the engine's, not installed where types are checked
    """The same computation."""


EntryClass = SlidingForCausalLM
