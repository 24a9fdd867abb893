"""Models that SGLang knows under another name, for its `SGLANG_EXTERNAL_MODEL_PACKAGE`."""
