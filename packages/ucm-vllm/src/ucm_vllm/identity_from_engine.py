"""Which model vLLM runs: checkpoint directory, overrides, resolved dtypes -> canonical table and identity.

What cannot be read for certain (overrides by a function, dummy or streamed weights, another config directory)
makes the identity *unknown*: the connector then works and caches nothing, because nothing may hit that is not
the same computation.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ucm_core.errors import IdentityError
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.checkpoint import read_config
from ucm_core.spec.model import Model, Resolved, read_model

READABLE_LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors")
"""Load formats whose weights are the checkpoint's safetensors files, byte for byte."""

VALUE_OPTIONS = (
    "additional_config",
    "cache_config.calculate_kv_scales",
    "cache_config.kv_sharing_fast_prefill",
    "lora_config.target_modules",
    "mamba_config.enable_stochastic_rounding",
    "model_config.model_impl",
    "model_config.multimodal_config.media_io_kwargs",
    "model_config.multimodal_config.mm_processor_kwargs",
    "model_config.multimodal_config.video_pruning_rate",
)
"""Paths in VllmConfig of options that change computed values when they are set."""


def engine_model(vllm_config: Any, groups: Iterable[Any], *, config: CacheConfig) -> Model:
    """Table and identity of the engine's model; IdentityError when it cannot be identified for certain."""
    directory, overrides = checkpoint_directory(vllm_config), overrides_of(vllm_config)
    merged = read_config(directory, overrides)
    kv_dtype, state_dtypes = cache_dtypes(vllm_config, groups)
    resolved = Resolved(
        compute_dtype=_dtype_name(vllm_config.model_config.dtype),
        kv_dtype=kv_dtype,
        state_dtypes=state_dtypes,
        quantisation=quantisation_of(vllm_config, merged),
        run_options=run_options_of(vllm_config),
        max_model_len=vllm_config.model_config.max_model_len,
        grain_tokens=config.grain_tokens,
        block_tokens=config.block_tokens,
    )
    return read_model(directory, resolved, overrides=overrides)


def checkpoint_directory(vllm_config: Any) -> Path:
    """Where the weights that vLLM loaded lie; IdentityError when they are not the files of a directory."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) not in READABLE_LOAD_FORMATS:
        raise IdentityError(
            f"load_format is {str(load.load_format)!r}: the weights are not the checkpoint's files"
        )
    if getattr(model, "model_weights", None):
        raise IdentityError(f"weights are streamed from {model.model_weights!r}")
    if model.hf_config_path and model.hf_config_path != model.model:
        raise IdentityError(
            f"the config comes from {model.hf_config_path!r}, the weights from {model.model!r}"
        )
    if getattr(model, "model_class_overrides", None):
        raise IdentityError(f"model_class_overrides replace the model's code: {model.model_class_overrides}")
    directory = Path(model.model)
    if not directory.is_dir():
        _refuse_other_hubs(load)
        directory = _hub_directory(model)
    _require_config(model, directory)
    return directory


def _refuse_other_hubs(load: Any) -> None:
    """The weights must lie in the hub's own cache: another copy may be another commit."""
    if getattr(load, "download_dir", None):
        raise IdentityError(f"the weights lie in download_dir = {load.download_dir!r}, the config elsewhere")
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise IdentityError("the model comes from ModelScope, whose cache is not read")


def _require_config(model: Any, directory: Path) -> None:
    """IdentityError unless vLLM reads ``config.json`` of ``directory`` too."""
    if not (directory / "config.json").is_file():
        raise IdentityError(f"{model.model!r} has no config.json to read")
    config_format = str(getattr(model, "config_format", "auto"))
    # vLLM prefers params.json beside consolidated weights where both formats are there
    other = (directory / "params.json").is_file() and any(directory.glob("consolidated*.safetensors"))
    if config_format not in ("auto", "hf") or (config_format == "auto" and other):
        raise IdentityError(f"{model.model!r}: the config that vLLM reads is not config.json")


def overrides_of(vllm_config: Any) -> dict[str, Any]:
    """``hf_overrides`` as data; IdentityError for a function."""
    overrides = vllm_config.model_config.hf_overrides
    if callable(overrides):
        raise IdentityError("hf_overrides is a function: its effect cannot be named")
    return dict(overrides or {})


def cache_dtypes(vllm_config: Any, groups: Iterable[Any]) -> tuple[str, dict[str, str]]:
    """KV dtype and state dtypes ("conv", "ssm"), resolved, as vLLM's own KV cache specs say."""
    kv, states = _dtype_name(vllm_config.model_config.dtype), tuple[str, ...]()
    for group in groups:
        spec = group.kv_cache_spec
        for own in getattr(spec, "kv_cache_specs", {"": spec}).values():
            if hasattr(own, "dtypes"):
                states = tuple(map(_dtype_name, own.dtypes))
            elif hasattr(own, "dtype"):
                kv = _dtype_name(own.dtype)
    return kv, dict(zip(("conv", "ssm"), states, strict=False))


def quantisation_of(vllm_config: Any, merged: Mapping[str, Any]) -> dict[str, Any]:
    """Quantisation that the engine adds while it loads; what the checkpoint carries is in its config."""
    method = vllm_config.model_config.quantization
    carried = "quantization_config" in merged or "compression_config" in merged
    found = {} if method is None or carried else {"method": str(method)}
    arguments = getattr(vllm_config.model_config, "quantization_config", None)
    return found | ({"arguments": repr(arguments)} if arguments else {})


def run_options_of(vllm_config: Any) -> dict[str, Any]:
    """Options that change computed values, only where they differ from what every engine does."""
    if _option(vllm_config, "attention_config.use_non_causal"):
        raise IdentityError("attention is not causal: what is computed of a prefix depends on what follows")
    options = {path.rpartition(".")[2]: _option(vllm_config, path) for path in VALUE_OPTIONS}
    lora_dtype = _option(vllm_config, "lora_config.lora_dtype")
    if lora_dtype not in (None, "auto", vllm_config.model_config.dtype):
        options["lora_dtype"] = _dtype_name(lora_dtype)
    return {name: value for name, value in options.items() if value and value not in ("auto", "vllm")}


def _option(vllm_config: Any, path: str) -> Any:
    """The attribute at ``path``; None where this vLLM has none, an enumeration's value for its member."""
    found = vllm_config
    for name in path.split("."):
        found = getattr(found, name, None)
    return getattr(found, "value", found)


def _hub_directory(model: Any) -> Path:
    """The local snapshot of a Hugging Face repository, never downloaded here."""
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 (comes with vLLM)
    except ImportError:
        raise IdentityError(f"{model.model!r} is no directory") from None
    found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    if not isinstance(found, str):
        raise IdentityError(f"{model.model!r} is neither a directory nor a downloaded repository")
    return Path(found).parent


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
