"""A plugin of vLLM's: the models of `ucm_renamed_models` under the same names there."""


def register() -> None:
    """The entry point."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("SlidingForCausalLM", "vllm.model_executor.models.gemma3:Gemma3ForCausalLM")
