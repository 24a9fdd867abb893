"""Which model SGLang runs: checkpoint directory, overrides, resolved dtypes -> canonical table and identity.

What cannot be read for certain makes the identity *unknown* (IdentityError): the backend then works and
caches nothing, because nothing may hit that is not the same computation.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ucm_core.errors import ConfigError, IdentityError
from ucm_core.spec.checkpoint import read_config
from ucm_core.spec.model import Model, Resolved, read_model
from ucm_position_key import KeyView, page_warning
from ucm_sglang.settings import Settings

READABLE_LOAD_FORMATS = ("auto", "safetensors", "fastsafetensors", "instanttensor")
"""Load formats whose weights are the checkpoint's safetensors files, byte for byte."""

HARMLESS_LOADER_KEYS = frozenset({"enable_multithread_load", "num_threads"})
"""Of ``model_loader_extra_config``: how fast, not what."""

VALUE_OPTIONS: Mapping[str, Any] = {
    "deepep_dispatcher_output_dtype": "auto",
    "disable_fast_image_processor": False,
    "enable_decoder_swa_bounded_replay": None,
    "enable_encoder_swa_bounded_replay": False,
    "enable_linear_replayssm": False,
    "enable_linear_replayssm_spec": False,
    "enable_mamba_cache_stochastic_rounding": False,
    "enable_precise_embedding_interpolation": False,
    "enable_quant_communications": False,
    "enable_tf32_matmul": None,
    "enable_w4a4_mxfp4_megamoe": False,
    "flashinfer_a2a_dispatch_type": None,
    "flashinfer_mxfp4_moe_precision": "default",
    "image_processor_backend": "auto",
    "kt_max_deferred_experts_per_token": None,
    "mamba_cache_philox_rounds": 0,
    "mm_process_config": None,
    "model_impl": "auto",
    "prefill_kv_cache_dequant_dtype": "auto",
    "qsa_indexer_dtype": "auto",
    "rl_on_policy_target": None,
    "speculative_enable_w4a4_mxfp4_megamoe": None,
}
"""Arguments that change computed values, with what changes nothing; all else enters the identity."""

VALUE_SUFFIX = "_fp4_indexer"
"""How further such switches end, which SGLang names by model families."""

UNKNOWN_OPTIONS: Mapping[str, tuple[Any, str]] = {
    "checkpoint_engine_wait_weights_before_ready": (False, "the weights come from elsewhere"),
    "debug_tensor_dump_input_file": (None, "the model computes what a file says"),
    "decrypted_config_file": (None, "the config is another file's"),
    "delete_ckpt_after_loading": (False, "the checkpoint is gone before it is read"),
    "dllm_algorithm": (None, "attention is not causal"),
    "elastic_ep_backend": (None, "experts may be missing"),
    "enable_elastic_expert_backup": (False, "experts may be missing"),
    "enable_hisparse": (False, "attention is an approximation that depends on what was evicted"),
    "enable_int8_mamba_checkpoint": (False, "states are stored with less than they were computed with"),
    "enable_lora": (
        None,
        "an adapter's id says nothing of its weights, and plain prompts cannot be told apart",
    ),
    "enable_mis": (False, "attention is not causal"),
    "forward_hooks": (None, "hooks may change what is computed"),
    "is_embedding": (False, "attention may not be causal"),
    "kt_weight_path": (None, "the experts' weights are other files"),
    "lora_paths": (
        None,
        "an adapter's id says nothing of its weights, and plain prompts cannot be told apart",
    ),
    "modelopt_checkpoint_restore_path": (None, "the weights are other files"),
    "modelopt_quant": (None, "what the quantisation makes of the weights cannot be named"),
    "quantization_param_path": (None, "the scales are another file's"),
    "quantize_and_serve": (False, "what the quantisation makes of the weights cannot be named"),
    "rl_quant_profile": (None, "what the quantisation makes of the weights cannot be named"),
    "trust_mm_content_hashes": (False, "media are named by what callers say of them"),
    "uno_lora_path": (None, "an adapter is part of the model"),
    "weight_cache_mode": ("off", "the weights are a daemon's"),
}
"""Arguments that make the identity unknown unless they have this value, and why."""

READ = frozenset(
    {
        *("model_path", "revision", "download_dir", "load_format", "model_loader_extra_config"),
        *("model_config_parser", "json_model_override_args", "context_length", "dtype", "kv_cache_dtype"),
        *("quantization", "mamba_ssm_dtype", "page_size", "speculative_algorithm"),
    }
)
"""Arguments that are read one by one."""

KV_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""SGLang's names of KV dtypes that are one plain number per element."""

PLAIN_KEYS = (None, "NGRAM", "STANDALONE")
"""Algorithms of speculation whose keys are tokens, as without any."""

_log = logging.getLogger(__name__)


def engine_model(settings: Settings, *, storage_config: Any, server_args: Any | None) -> Model:
    """Table and identity of SGLang's model; IdentityError when it cannot be identified for certain.

    Without ``server_args`` it is what the settings name, and the user answers for everything else.
    """
    if server_args is None:
        model = _named_model(settings, storage_config)
    else:
        _require_agreement(settings, server_args)
        model = _read_model(settings, server_args)
    _warn_of_small_pages(model)
    return model


def server_args_of_engine() -> Any | None:
    """The arguments of the SGLang in this process; None where it has not published any."""
    try:
        from sglang.srt.runtime_context import get_server_args as published  # noqa: PLC0415 (the engine)
    except ImportError:  # before 0.5.23
        from sglang.srt.server_args import get_global_server_args as published  # noqa: PLC0415
    try:
        return published()
    except (AttributeError, RuntimeError, ValueError, AssertionError):
        return None


def key_view(server_args: Any | None) -> KeyView:
    """Whether SGLang's keys are of tokens or of pairs of them, as drafts of the EAGLE kind have it."""
    algorithm = None if server_args is None else argument(server_args, "speculative_algorithm")
    if algorithm in PLAIN_KEYS:
        return KeyView.PLAIN
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: PLC0415 (the engine)

    known = SpeculativeAlgorithm.from_string(str(algorithm))
    return KeyView.BIGRAM if known.is_eagle() else KeyView.PLAIN


def argument(server_args: Any, name: str) -> Any:
    """An argument as SGLang resolved it; None where this version has none."""
    try:
        from sglang.srt.arg_groups.overrides import resolution_result  # noqa: PLC0415 (the engine)
    except ImportError:  # before 0.5.23 arguments were resolved in place
        return getattr(server_args, name, None)
    return resolution_result(server_args, name) if hasattr(server_args, name) else None


def _read_model(settings: Settings, server_args: Any) -> Model:
    options, directory = run_options_of(server_args), checkpoint_directory(server_args)
    overrides = overrides_of(server_args)
    merged = read_config(directory, overrides)
    loaded = _model_config(server_args)
    _refuse_media(loaded)
    compute_dtype = _dtype_name(loaded.dtype)
    resolved = Resolved(
        compute_dtype=compute_dtype,
        kv_dtype=kv_dtype_of(server_args, compute_dtype, merged=merged),
        state_dtypes=_state_dtypes(server_args, loaded),
        quantisation=quantisation_of(server_args, merged),
        run_options=options | ({"overrides": overrides} if overrides else {}),
        max_model_len=int(loaded.context_len),
        grain_tokens=settings.cache.grain_tokens,
        block_tokens=settings.cache.block_tokens,
    )
    return read_model(directory, resolved, overrides=overrides)


def _named_model(settings: Settings, storage_config: Any) -> Model:
    if settings.model_path is None or settings.compute_dtype is None:
        raise ConfigError(
            f"SGLang's arguments cannot be read, and its storage config (model_name ="
            f" {getattr(storage_config, 'model_name', None)!r}) does not say what it computes: name"
            " model_path and compute_dtype in --hicache-storage-backend-extra-config"
        )
    resolved = Resolved(
        compute_dtype=settings.compute_dtype,
        kv_dtype=settings.compute_dtype,
        grain_tokens=settings.cache.grain_tokens,
        block_tokens=settings.cache.block_tokens,
    )
    return read_model(Path(settings.model_path), resolved)


def _require_agreement(settings: Settings, server_args: Any) -> None:
    """ConfigError where a setting names another model than SGLang runs."""
    path = str(argument(server_args, "model_path"))
    if settings.model_path not in (None, path):
        raise ConfigError(
            f"model_path = {settings.model_path!r}, but SGLang runs {path!r}; leave model_path out"
        )
    if settings.compute_dtype is not None:
        runs = _dtype_name(_model_config(server_args).dtype)
        if runs != settings.compute_dtype:
            raise ConfigError(
                f"compute_dtype = {settings.compute_dtype!r}, but SGLang computes in {runs!r}; leave it out"
            )


def checkpoint_directory(server_args: Any) -> Path:
    """Where the weights that SGLang loaded lie; IdentityError when they are not the files of a directory."""
    load_format = str(argument(server_args, "load_format"))
    if load_format not in READABLE_LOAD_FORMATS:
        raise IdentityError(f"load_format is {load_format!r}: the weights are not the checkpoint's files")
    loader = _json(server_args, "model_loader_extra_config")
    if loader.keys() - HARMLESS_LOADER_KEYS:
        raise IdentityError(
            f"model_loader_extra_config = {loader}: what the loader makes of it cannot be named"
        )
    named = str(argument(server_args, "model_path"))
    directory = Path(named)
    if not directory.is_dir():
        directory = _hub_directory(server_args, named)
    _require_config(server_args, named, directory)
    return directory


def _require_config(server_args: Any, named: str, directory: Path) -> None:
    """IdentityError unless SGLang reads ``config.json`` of ``directory`` too."""
    if not (directory / "config.json").is_file():
        raise IdentityError(f"{named!r} has no config.json to read")
    parser = argument(server_args, "model_config_parser")
    if parser not in ("auto", "hf"):
        raise IdentityError(
            f"model_config_parser is {parser!r}: the config that SGLang reads is another file"
        )
    if (directory / "params.json").is_file():  # SGLang reads it where the model has one of some names
        raise IdentityError(f"{named!r} has params.json beside config.json: which SGLang reads is unknown")


def _refuse_media(loaded: Any) -> None:
    """IdentityError for a model that takes media: SGLang's keys hold a part of their content's hash only."""
    if getattr(loaded, "is_multimodal", False):
        raise IdentityError(
            "the model takes media, which keys do not name in full; start SGLang with enable_multimodal=False"
            " to cache its prompts of text"
        )


def overrides_of(server_args: Any) -> dict[str, Any]:
    """``json_model_override_args`` as data.

    They enter twice: merged into the config, so that the table is right, and as a run option, because SGLang
    merges by rules of its own: the result is not always what the same config in a file would be.
    """
    return _json(server_args, "json_model_override_args")


def kv_dtype_of(server_args: Any, compute_dtype: str, *, merged: Mapping[str, Any]) -> str:
    """The logical type of keys and values; IdentityError for one with scales beside its elements.

    The host pools are checked against it when SGLang registers them.
    """
    named = argument(server_args, "kv_cache_dtype")
    if named == "auto":
        _refuse_scales(merged)
        return compute_dtype
    if named not in KV_DTYPES:
        raise IdentityError(f"kv_cache_dtype is {named!r}, which has scales that no table names")
    return KV_DTYPES[named]


def _refuse_scales(merged: Mapping[str, Any]) -> None:
    """IdentityError for a checkpoint that makes SGLang quantise the cache by itself."""
    quantised = merged.get("quantization_config") or {}
    if quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo"):
        raise IdentityError("the checkpoint quantises its KV cache, with scales that no table names")


def quantisation_of(server_args: Any, merged: Mapping[str, Any]) -> dict[str, Any]:
    """Quantisation that SGLang adds while it loads; what the checkpoint carries is in its config."""
    method = argument(server_args, "quantization")
    carried = "quantization_config" in merged or "compression_config" in merged
    return {} if method is None or carried else {"method": str(method), "by": "sglang"}


def run_options_of(server_args: Any) -> dict[str, Any]:
    """Options that change computed values, only where they differ from what every engine does.

    IdentityError for those whose effect has no name.
    """
    _refuse_unnamed(server_args)
    switches = (name for name in dir(type(server_args)) if name.endswith(VALUE_SUFFIX))
    plain = dict.fromkeys(switches, False) | dict(VALUE_OPTIONS)
    options = {name: argument(server_args, name) for name in plain}
    return {name: value for name, value in options.items() if _is_set(value, plain[name])} | _kv_option(
        server_args
    )


def _refuse_unnamed(server_args: Any) -> None:
    for name, (plain, reason) in UNKNOWN_OPTIONS.items():
        value = argument(server_args, name)
        if _is_set(value, plain):
            raise IdentityError(f"{name} = {value!r}: {reason}")


def _is_set(value: Any, plain: Any) -> bool:
    return bool(value) and value != plain


def _kv_option(server_args: Any) -> dict[str, str]:
    """How an engine scales before it rounds to eight bits is its own affair, shared with no other."""
    named = str(argument(server_args, "kv_cache_dtype"))
    return {"kv_cache_dtype": f"sglang {named}"} if named.startswith("fp8") else {}


def _state_dtypes(server_args: Any, loaded: Any) -> dict[str, str]:
    """Types of recurrent states; none for a model without."""
    from sglang.srt.configs.hybrid_arch import mambaish_config  # noqa: PLC0415 (the engine)

    config = mambaish_config(loaded)
    if config is None:
        return {}
    _refuse_states_of_processors(server_args)
    dtype = config.mamba2_cache_params.dtype
    return {"conv": _dtype_name(dtype.conv), "ssm": _dtype_name(dtype.temporal)}


def _refuse_states_of_processors(server_args: Any) -> None:
    """IdentityError where SGLang has kernels of its own for this processor.

    Those of delta nets keep a head's matrix turned, in a shape that does not say so.
    """
    from sglang.srt.utils import cpu_has_amx_support  # noqa: PLC0415 (the engine)

    if argument(server_args, "device") == "cpu" and cpu_has_amx_support():
        raise IdentityError("SGLang's kernels for this processor keep states in an order that is not known")


def _model_config(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of  # noqa: PLC0415 (the engine)

    return model_config_of(server_args)


def _hub_directory(server_args: Any, named: str) -> Path:
    """The local snapshot of a Hugging Face repository, never downloaded here."""
    if argument(server_args, "download_dir"):
        raise IdentityError(f"the weights of {named!r} lie in a download_dir, the config elsewhere")
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true", "yes", "y"):
        raise IdentityError(f"{named!r} comes from ModelScope, whose cache is not read")
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 (comes with SGLang)

    found = try_to_load_from_cache(named, "config.json", revision=argument(server_args, "revision"))
    if not isinstance(found, str):
        raise IdentityError(f"{named!r} is neither a directory nor a downloaded repository")
    return Path(found).parent


def _json(server_args: Any, name: str) -> dict[str, Any]:
    """An argument that is a mapping as JSON text; IdentityError for anything else."""
    text = argument(server_args, name) or "{}"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise IdentityError(f"{name} = {text!r} is no mapping: what it changes is unknown")
    return found


def _warn_of_small_pages(model: Model) -> None:
    row = max(model.table.rows, key=lambda row: row.unit_bytes)
    warning = page_warning(model.table.grain_tokens, row.unit_bytes)
    if warning:
        _log.warning("UCM: %s", warning)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
