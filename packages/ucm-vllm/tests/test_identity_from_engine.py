"""Which model runs: the same computation has one identity, and what cannot be read for certain has none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ucm_core.errors import IdentityError, SpecError
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.model import Model, Resolved, read_model
from ucm_core.testing.identities import Computation, IdentityTests, StateIdentityTests
from ucm_vllm.identity_from_engine import engine_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 10000.0,
}

STATES = {
    "model_type": "granitemoehybrid",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def checkpoint(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def engine(
    directory: Path,
    *,
    model: dict[str, Any] | None = None,
    load_format: str = "auto",
    more: dict[str, Any] | None = None,
    **cache: Any,
) -> Any:
    """A double of VllmConfig: the fields that are read, with vLLM's defaults."""
    fields = {"hf_overrides": {}, "hf_config_path": None, "dtype": "torch.bfloat16", "max_model_len": 2048}
    fields |= {"model": str(directory), "revision": None, "quantization": None} | (model or {})
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        load_config=SimpleNamespace(load_format=load_format),
        cache_config=SimpleNamespace(**cache),
        **(more or {}),
    )


def group(dtype: str = "torch.bfloat16") -> Any:
    return SimpleNamespace(kv_cache_spec=SimpleNamespace(dtype=dtype))


def group_of_states(conv: str, ssm: str) -> Any:
    return SimpleNamespace(kv_cache_spec=SimpleNamespace(dtypes=(f"torch.{conv}", f"torch.{ssm}")))


def identify(vllm_config: Any, groups: list[Any] | None = None, **settings: Any) -> Model:
    return engine_model(vllm_config, groups or [group()], config=CacheConfig(**settings))


class TestComputations(IdentityTests):
    config = CONFIG

    def identify(self, computation: Computation, directory: Path) -> Model:
        dtype = f"torch.{computation.dtype}"
        running = engine(directory, model={"dtype": dtype})
        return identify(running, [group(dtype)], grain_tokens=computation.grain_tokens)


class TestComputationsWithStates(StateIdentityTests):
    config = STATES

    def identify(self, computation: Computation, directory: Path) -> Model:
        dtype, grain_tokens = f"torch.{computation.dtype}", computation.grain_tokens
        groups = [group(dtype), group_of_states(**computation.state_dtypes)]
        return identify(engine(directory, model={"dtype": dtype}), groups, grain_tokens=grain_tokens)


def test_the_path_and_spelling_of_a_checkpoint_do_not_matter(tmp_path: Path) -> None:
    first = identify(engine(checkpoint(tmp_path / "a", _name_or_path="a")))
    second = identify(engine(checkpoint(tmp_path / "b", rope_theta=10000, eos_token_id=7)))
    assert first.identity == second.identity
    assert first.table.digest == second.table.digest


def test_it_is_what_every_engine_finds_of_the_checkpoint(tmp_path: Path) -> None:
    """ucm_sglang is held to the same by its own tests, with a real SGLang."""
    found, dtype = identify(engine(checkpoint(tmp_path))), "bfloat16"
    expected = read_model(tmp_path, Resolved(compute_dtype=dtype, kv_dtype=dtype, max_model_len=2048))
    assert (found.identity, found.table) == (expected.identity, expected.table)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"hf_overrides": {"rope_theta": 500000.0}}},
        {"model": {"dtype": "torch.float32"}},
        {"model": {"quantization": "fp8"}},
        {"calculate_kv_scales": True},
        {"model": {"quantization": "fp8", "quantization_config": {"ignore": ["lm_head"]}}},
        {"model": {"model_impl": "transformers"}},
        {"model": {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"num_crops": 4})}},
        {"more": {"lora_config": SimpleNamespace(lora_dtype="torch.float32")}},
        {"more": {"lora_config": SimpleNamespace(target_modules=["q_proj"])}},
        {"more": {"mamba_config": SimpleNamespace(enable_stochastic_rounding=True)}},
        {"more": {"additional_config": {"sparse": True}}},
    ],
)
def test_what_changes_values_changes_the_identity(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = checkpoint(tmp_path)
    assert identify(engine(path, **changes)).identity != identify(engine(path)).identity


def test_the_kv_dtype_is_the_one_vllm_resolved(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    made = identify(engine(path), [group("torch.float16")])
    assert (made.identity.kv_dtype, made.identity.compute_dtype) == ("float16", "bfloat16")


def test_quantisation_that_the_checkpoint_carries_counts_once(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    assert identify(engine(path, model={"quantization": "awq_marlin"})).identity.quantisation == "null"


def test_the_length_counts_where_the_rope_depends_on_it(tmp_path: Path) -> None:
    fixed, dynamic = (
        checkpoint(tmp_path / kind, rope_parameters={"rope_type": kind}) for kind in ("yarn", "dynamic")
    )
    short, long = {"max_model_len": 2048}, {"max_model_len": 4096}
    assert identify(engine(fixed, model=short)).identity == identify(engine(fixed, model=long)).identity
    assert identify(engine(dynamic, model=short)).identity != identify(engine(dynamic, model=long)).identity


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"model_impl": "auto"}},
        {"model": {"multimodal_config": None}},
        {"more": {"lora_config": SimpleNamespace(lora_dtype="torch.bfloat16", target_modules=None)}},
        {"more": {"additional_config": {}, "attention_config": SimpleNamespace(use_non_causal=False)}},
    ],
)
def test_defaults_do_not_change_the_identity(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = checkpoint(tmp_path)
    assert identify(engine(path, **changes)).identity == identify(engine(path)).identity


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
        {"text_config": {"rope_scaling": {"type": "longrope"}}},
    ],
)
def test_the_length_counts_where_only_a_part_has_such_a_rope(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = checkpoint(tmp_path, **changes)
    short, long = ({"max_model_len": length} for length in (2048, 4096))
    assert identify(engine(path, model=short)).identity != identify(engine(path, model=long)).identity


def test_attention_that_looks_ahead_is_unknown(tmp_path: Path) -> None:
    looking = {"attention_config": SimpleNamespace(use_non_causal=True)}
    with pytest.raises(IdentityError, match="not causal"):
        identify(engine(checkpoint(tmp_path), more=looking))


def test_a_config_that_vllm_reads_from_another_file_is_unknown(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    for name in ("params.json", "consolidated.safetensors"):
        (path / name).write_text("{}")
    with pytest.raises(IdentityError, match=r"not config\.json"):
        identify(engine(path))
    assert identify(engine(path, model={"config_format": "hf"}))


def test_the_block_size_is_in_the_table(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert identify(engine(path)).table.digest != identify(engine(path), block_tokens=128).table.digest


@pytest.mark.parametrize("load_format", ["dummy", "gguf", "tensorizer", "bitsandbytes"])
def test_weights_that_are_not_the_checkpoints_files_are_unknown(tmp_path: Path, load_format: str) -> None:
    with pytest.raises(IdentityError, match=load_format):
        identify(engine(checkpoint(tmp_path), load_format=load_format))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hf_overrides": lambda config: config}, "hf_overrides is a function"),
        ({"hf_config_path": "elsewhere"}, "the config comes from 'elsewhere'"),
        ({"model_weights": "s3://bucket"}, "streamed"),
        ({"model_class_overrides": {"LlamaForCausalLM": "mine:Model"}}, "model_class_overrides"),
        ({"config_format": "mistral"}, r"not config\.json"),
        ({"model": "nobody/has-this"}, "nobody/has-this"),
    ],
)
def test_what_cannot_be_read_for_certain_is_unknown(
    tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(IdentityError, match=message):
        identify(engine(checkpoint(tmp_path), model=model))


def test_an_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="quantum-llm"):
        identify(engine(checkpoint(tmp_path, model_type="quantum-llm")))
