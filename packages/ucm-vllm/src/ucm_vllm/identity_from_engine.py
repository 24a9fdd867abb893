"""Which model vLLM runs: checkpoint directory, overrides, resolved dtypes -> canonical table and identity.

What cannot be read for certain (overrides by a function, dummy or streamed weights, another config directory)
makes the identity *unknown*: the connector then works and caches nothing, because nothing may hit that is not
the same computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ucm_core.errors import ConfigError, IdentityError
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.checkpoint import read_config
from ucm_core.spec.model import Model, Resolved, read_model

READABLE_LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors")
"""Load formats whose weights are the checkpoint's safetensors files, byte for byte."""

LENGTH_DEPENDENT_ROPES = ("longrope", "su", "dynamic")
"""Rope types whose values depend on the engine's max_model_len, which therefore enters the config."""


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
        grain_tokens=config.grain_tokens,
        block_tokens=config.block_tokens,
    )
    return read_model(directory, resolved, overrides={**overrides, **_length_override(vllm_config, merged)})


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
    directory = Path(model.model)
    if not directory.is_dir():
        directory = _hub_directory(model)
    if not (directory / "config.json").is_file():
        raise IdentityError(f"{model.model!r} has no config.json to read")
    return directory


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
    return {} if method is None or carried else {"method": str(method)}


def run_options_of(vllm_config: Any) -> dict[str, Any]:
    """Options that change computed values, only where they differ from what every engine does."""
    options: dict[str, Any] = {}
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        options["calculate_kv_scales"] = True
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        options["kv_sharing_fast_prefill"] = True
    return options


def refuse_parallelism(vllm_config: Any) -> None:
    """ConfigError, naming the setting, for an engine of more than one rank."""
    parallel = vllm_config.parallel_config
    for setting in (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
        "decode_context_parallel_size", "prefill_context_parallel_size",
    ):  # fmt: skip
        size = getattr(parallel, setting, 1)
        if size > 1:
            raise ConfigError(
                f"{setting} = {size}: ucm-vllm supports 1 for now; set it to 1 or remove the connector"
            )


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


def _length_override(vllm_config: Any, merged: Mapping[str, Any]) -> dict[str, Any]:
    scaling = merged.get("rope_parameters") or merged.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    if kind not in LENGTH_DEPENDENT_ROPES:
        return {}
    return {"max_model_len": int(vllm_config.model_config.max_model_len)}


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
