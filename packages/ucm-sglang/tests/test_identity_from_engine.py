"""Which model a real SGLang runs: one computation has one identity, what cannot be read for certain none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import import_doubles
import pytest

from ucm_core.errors import ConfigError, IdentityError
from ucm_core.spec.model import Model, Resolved, read_model
from ucm_core.testing.identities import Computation, IdentityTests, StateIdentityTests
from ucm_position_key import KeyView
from ucm_sglang.identity_from_engine import (
    READ,
    UNKNOWN_OPTIONS,
    VALUE_OPTIONS,
    argument,
    engine_model,
    key_view,
    server_args_of_engine,
)
from ucm_sglang.settings import read_settings

pytest.importorskip("sglang")
import_doubles.install()

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}

STATES = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
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
    "num_local_experts": 0,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}


def checkpoint(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def server_args(path: Path, **changes: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    given = {"model_path": str(path), "device": "cpu", "dtype": "bfloat16", "page_size": 64} | changes
    return ServerArgs(**given)


def identify(arguments: Any, page_tokens: int = 64, **given: Any) -> Model:
    settings = read_settings({"interface_v1": 1} | given, page_tokens=page_tokens)
    return engine_model(settings, storage_config=SimpleNamespace(model_name="served"), server_args=arguments)


def plain(path: Path, **resolved: Any) -> Model:
    """What every engine must find of the checkpoint; ucm_vllm is held to the same by its own tests."""
    kinds = {"compute_dtype": "bfloat16", "kv_dtype": "bfloat16", "max_model_len": 2048}
    return read_model(path, Resolved(**(kinds | resolved)))


class TestComputations(IdentityTests):
    config = CONFIG

    def identify(self, computation: Computation, directory: Path) -> Model:
        page_tokens = computation.grain_tokens
        arguments = server_args(directory, dtype=computation.dtype, page_size=page_tokens)
        return identify(arguments, page_tokens)


class TestComputationsWithStates(StateIdentityTests):
    """Types of states are what SGLang makes of its environment; an argument sets that for them."""

    config = STATES

    def identify(self, computation: Computation, directory: Path) -> Model:
        from sglang.srt.environ import envs
        from sglang.srt.runtime_context import get_parallel

        page_tokens, types = computation.grain_tokens, computation.state_dtypes
        arguments = server_args(directory, dtype=computation.dtype, page_size=page_tokens)
        with (
            envs.SGLANG_MAMBA_CONV_DTYPE.override(types["conv"]),
            envs.SGLANG_MAMBA_SSM_DTYPE.override(types["ssm"]),
            get_parallel().override(attn_tp_rank=0, attn_tp_size=1),
        ):
            return identify(arguments, page_tokens)

    def test_states_of_kernels_for_a_processor_are_unknown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sglang.srt.utils.cpu_has_amx_support", lambda: True)
        plain = self.computations["plain"]
        with pytest.raises(IdentityError, match="keep states in an order that is not known"):
            self.identify(plain, plain.write(tmp_path, self.config))


def test_a_resolved_engine_has_the_identity_that_every_engine_finds(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    arguments = server_args(path, skip_tokenizer_init=True, enable_hierarchical_cache=True)
    arguments.resolve_once()
    found, expected = identify(arguments), plain(path)
    assert found.identity == expected.identity
    assert found.table == expected.table


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_dtype_is_the_one_that_sglang_computes_in(tmp_path: Path, dtype: str) -> None:
    path = checkpoint(tmp_path)
    expected = plain(path, compute_dtype=dtype, kv_dtype=dtype)
    assert identify(server_args(path, dtype=dtype)).identity == expected.identity


def test_an_automatic_dtype_is_resolved(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert identify(server_args(path, dtype="auto")).identity == plain(path).identity


def test_the_page_is_the_grain(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    found = identify(server_args(path, page_size=16), page_tokens=16)
    assert found.identity == plain(path, grain_tokens=16).identity
    assert {row.block_tokens for row in found.table.rows} == {16}


def test_pages_of_one_token_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ucm_sglang")
    identify(server_args(checkpoint(tmp_path), page_size=1), page_tokens=1)
    assert "page size 1" in caplog.text


def test_path_and_served_name_do_not_matter(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", rope_theta=10000, eos_token_id=7)
    assert identify(server_args(first, served_model_name="x")).identity == plain(second).identity


def test_a_length_enters_where_rotary_values_depend_on_it(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    short, long = (identify(server_args(path, context_length=tokens)).identity for tokens in (512, 1024))
    assert short != long
    plain_path = checkpoint(tmp_path / "plain")
    assert identify(server_args(plain_path, context_length=512)).identity == plain(plain_path).identity


OTHER_VALUES: dict[str, Any] = {
    "deepep_dispatcher_output_dtype": "fp8",
    "flashinfer_a2a_dispatch_type": "nvfp4",
    "flashinfer_mxfp4_moe_precision": "bf16",
    "image_processor_backend": "pil",
    "kt_max_deferred_experts_per_token": 2,
    "mamba_cache_philox_rounds": 4,
    "mm_process_config": {"image": {"max_pixels": 4}},
    "model_impl": "transformers",
    "prefill_kv_cache_dequant_dtype": "fp8_e4m3",
    "qsa_indexer_dtype": "fp8_e4m3",
    "rl_on_policy_target": "fsdp",
    "json_model_override_args": '{"rope_theta": 500000.0}',
    "kv_cache_dtype": "fp8_e4m3",
    "quantization": "fp8",
}
"""A value of each option that is no switch; all others are switched on."""

FAMILY_SWITCHES = {"enable_deepseek_v4_fp4_indexer"}


@pytest.mark.parametrize("name", sorted(VALUE_OPTIONS.keys() | OTHER_VALUES.keys() | FAMILY_SWITCHES))
def test_what_changes_values_changes_the_identity(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path)
    changed = identify(server_args(path, **{name: OTHER_VALUES.get(name, True)}))
    assert changed.identity != plain(path).identity


@pytest.mark.parametrize("name", sorted(VALUE_OPTIONS))
def test_what_changes_nothing_enters_nothing(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path)
    assert identify(server_args(path, **{name: VALUE_OPTIONS[name]})).identity == plain(path).identity


def test_an_override_is_not_the_same_as_a_config_that_says_so(tmp_path: Path) -> None:
    overridden = identify(
        server_args(checkpoint(tmp_path / "a"), json_model_override_args='{"rope_theta": 5e5}')
    )
    written = plain(checkpoint(tmp_path / "b", rope_theta=5e5))
    assert overridden.identity != written.identity
    assert overridden.table == written.table


def test_an_override_of_layers_reaches_the_table(tmp_path: Path) -> None:
    arguments = server_args(checkpoint(tmp_path), json_model_override_args='{"num_hidden_layers": 1}')
    assert sum(len(row.units) for row in identify(arguments).table.rows) == 1


@pytest.mark.parametrize("name", sorted(UNKNOWN_OPTIONS))
def test_what_has_no_name_makes_the_identity_unknown(tmp_path: Path, name: str) -> None:
    with pytest.raises(IdentityError, match=f"^{name} = .*{UNKNOWN_OPTIONS[name][1]}"):
        identify(server_args(checkpoint(tmp_path), **{name: "client" if "mode" in name else ["given"]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_format": "dummy"}, "load_format is 'dummy'"),
        ({"load_format": "remote"}, "load_format is 'remote'"),
        ({"model_loader_extra_config": '{"presharded_path": "x"}'}, "presharded_path"),
        ({"model_config_parser": "mistral"}, "the config that SGLang reads is another file"),
        ({"json_model_override_args": "[1]"}, "json_model_override_args = .* is no mapping"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype is 'nvfp4', which has scales"),
    ],
)
def test_what_cannot_be_read_is_unknown(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        identify(server_args(checkpoint(tmp_path), **changes))


@pytest.mark.parametrize("name", ["kv_cache_scheme", "kv_cache_quant_algo"])
def test_a_checkpoint_that_quantises_its_cache_is_unknown(tmp_path: Path, name: str) -> None:
    from ucm_sglang.identity_from_engine import kv_dtype_of

    arguments = server_args(checkpoint(tmp_path))
    with pytest.raises(IdentityError, match="quantises its KV cache"):
        kv_dtype_of(arguments, "bfloat16", merged={"quantization_config": {name: "FP8"}})


def test_threads_of_the_loader_are_no_values(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    more = '{"enable_multithread_load": true, "num_threads": 4}'
    assert identify(server_args(path, model_loader_extra_config=more)).identity == plain(path).identity


def test_a_second_config_is_unknown(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    (path / "params.json").write_text("{}")
    with pytest.raises(IdentityError, match=r"params\.json beside config\.json"):
        identify(server_args(path))


def test_a_name_that_is_no_directory_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="neither a directory nor a downloaded repository"):
        identify(server_args(Path("nobody/nothing")))


def test_media_are_not_named_in_full(tmp_path: Path) -> None:
    from ucm_sglang.identity_from_engine import _refuse_media

    with pytest.raises(IdentityError, match="enable_multimodal=False"):
        _refuse_media(SimpleNamespace(is_multimodal=True))


def test_every_argument_of_this_sglang_was_looked_at() -> None:
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    lines = (Path(__file__).parent / "harmless_arguments.txt").read_text().splitlines()
    harmless = {name for line in lines if not line.startswith(("#", "[")) for name in line.split()}
    looked_at = [harmless, set(VALUE_OPTIONS), set(UNKNOWN_OPTIONS), set(READ), FAMILY_SWITCHES]
    assert set().union(*looked_at) == set(namespace_of(ServerArgs))
    assert sum(map(len, looked_at)) == len(set().union(*looked_at))


def test_arguments_that_this_sglang_lacks_are_none(tmp_path: Path) -> None:
    assert argument(server_args(checkpoint(tmp_path)), "no_such_argument") is None


def test_a_process_without_an_engine_has_no_arguments() -> None:
    assert server_args_of_engine() is None


def test_without_arguments_the_settings_must_name_the_model() -> None:
    with pytest.raises(
        ConfigError, match=r"model_name = 'served'.*name model_path and compute_dtype in --hicache"
    ):
        identify(None, model_path="/checkpoint")


def test_without_arguments_the_settings_name_the_model(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    named = identify(None, model_path=str(path), compute_dtype="bfloat16")
    assert named.identity == plain(path).identity


@pytest.mark.parametrize(("name", "value"), [("model_path", "/other"), ("compute_dtype", "float32")])
def test_settings_that_contradict_the_engine_are_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = '{value}', but SGLang .*(bfloat16|{tmp_path.name})"):
        identify(server_args(checkpoint(tmp_path)), **{name: value})


@pytest.mark.parametrize(
    ("algorithm", "view"),
    [(None, KeyView.PLAIN), ("NGRAM", KeyView.PLAIN), ("EAGLE", KeyView.BIGRAM), ("EAGLE3", KeyView.BIGRAM)],
)
def test_keys_of_pairs_are_known_by_the_algorithm(
    tmp_path: Path, algorithm: str | None, view: KeyView
) -> None:
    arguments = server_args(checkpoint(tmp_path), speculative_algorithm=algorithm)
    assert key_view(arguments) is view
    assert identify(arguments).identity == plain(tmp_path).identity


def test_nobody_speculates_without_arguments() -> None:
    assert key_view(None) is KeyView.PLAIN
