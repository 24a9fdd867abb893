"""UCM keeps the KV cache of a language model outside the inference engine."""
