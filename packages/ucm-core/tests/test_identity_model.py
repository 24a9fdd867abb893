"""From a checkpoint directory to table and identity: paths do not matter, what changes values does."""

import dataclasses
import json
import shutil

import pytest

from ucm_core.errors import IdentityError, SpecError
from ucm_core.spec.checkpoint import WeightDigester
from ucm_core.spec.model import Resolved, read_model

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
RUN = Resolved("bfloat16", "bfloat16")


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "first"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def digester(tmp_path):
    return WeightDigester(tmp_path / "cache")


def test_a_copy_under_another_path_and_spelling_is_the_same_model(checkpoint, digester, tmp_path):
    other = shutil.copytree(checkpoint, tmp_path / "other")
    (other / "config.json").write_text(
        json.dumps(dict(reversed(CONFIG.items())) | {"torch_dtype": "float32"})
    )
    first, second = (read_model(path, RUN).with_weights(digester) for path in (checkpoint, other))
    assert first.identity.matches(second.identity)
    assert first.table == second.table
    assert first.identity.table == first.table.digest.hex()


def test_a_model_is_unknown_until_its_weights_are_digested(checkpoint, digester):
    model = read_model(checkpoint, RUN)
    assert not model.identity.known
    assert model.with_weights(digester).identity.known


def test_overrides_are_part_of_the_identity_by_value(checkpoint):
    plain = read_model(checkpoint, RUN).identity
    assert read_model(checkpoint, RUN, overrides={"rope_theta": 10000}).identity.digest == plain.digest
    assert read_model(checkpoint, RUN, overrides={"rope_theta": 5}).identity.first_difference(plain) == (
        "config.rope_theta: 5 != 10000"
    )


RUNS = [
    {"compute_dtype": "float32"},
    {"kv_dtype": "float8_e4m3fn"},
    {"quantisation": {"k_scale": 0.5}},
    {"quantisation": {"k_scale": 0.25}},
    {"run_options": {"sparse_prefill": True}},
    {"revision": "r7"},
    {"grain_tokens": 32},
    {"block_tokens": 128},
    {"state_dtypes": {"ssm": "float32"}},
]


def test_everything_resolved_is_part_of_the_identity(checkpoint):
    runs = [RUN, *[dataclasses.replace(RUN, **fields) for fields in RUNS]]
    assert len({read_model(checkpoint, run).identity.digest for run in runs}) == len(runs)


def test_sampled_weights_are_another_model(checkpoint, digester, tmp_path):
    full, sampled = (
        read_model(checkpoint, RUN).with_weights(chosen).identity
        for chosen in (digester, WeightDigester(tmp_path / "cache", sampled=True))
    )
    assert sampled.known
    assert full.first_difference(sampled).startswith("weights")


ROPES = [
    ("default", False), ("linear", False), ("yarn", False), ("llama3", False),
    ("longrope", True), ("su", True), ("dynamic", True),
]  # fmt: skip


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize(("rope", "matters"), ROPES)
def test_the_engines_length_counts_where_rotary_values_depend_on_it(checkpoint, key, rope, matters):
    overrides = {"rope_scaling": {key: rope, "factor": 2}}
    short, long = (
        read_model(checkpoint, dataclasses.replace(RUN, max_model_len=length), overrides=overrides).identity
        for length in (2048, 4096)
    )
    difference = short.first_difference(long)
    assert difference == ("config.max_model_len: 2048 != 4096" if matters else None)


def test_without_a_length_that_matters_the_identity_is_unknown(checkpoint):
    with pytest.raises(
        IdentityError, match="max_model_len, which is not given: the model's identity is unknown"
    ):
        read_model(checkpoint, RUN, overrides={"rope_scaling": {"rope_type": "dynamic"}})


AUTO_MAP = {"AutoModelForCausalLM": "modeling_own.Own"}


def test_code_of_the_checkpoint_counts_where_the_config_names_it(checkpoint, tmp_path):
    code = checkpoint / "modeling_own.py"
    code.write_text("scale = 1")
    digests = set()
    for text in ("scale = 1", "scale = 2"):
        code.write_text(text)
        digests.add(read_model(checkpoint, RUN, overrides={"auto_map": AUTO_MAP}).identity.digest)
    assert len(digests) == 2
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert read_model(copy, RUN, overrides={"auto_map": AUTO_MAP}).identity.digest in digests
    code.rename(checkpoint / "helper.py")
    digests.add(read_model(checkpoint, RUN, overrides={"auto_map": AUTO_MAP}).identity.digest)
    assert len(digests) == 3


def test_code_that_cannot_be_read_is_unknown(checkpoint, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "EACCES", str(path))

    (checkpoint / "modeling_own.py").write_text("scale = 1")
    monkeypatch.setattr("ucm_core.spec.checkpoint._hash_file", refuse)
    with pytest.raises(IdentityError, match=r"the code in .* cannot be read"):
        read_model(checkpoint, RUN, overrides={"auto_map": AUTO_MAP})


def test_code_that_the_config_does_not_name_does_not_count(checkpoint):
    plain = read_model(checkpoint, RUN).identity
    (checkpoint / "convert.py").write_text("import sys")
    assert read_model(checkpoint, RUN).identity.digest == plain.digest


YARN = {
    "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 8192, "beta_fast": 32,
    "beta_slow": 1, "rope_theta": 1000000, "mrope_section": [16, 24, 24],
}  # fmt: skip
ROTARY_CHANGES = [
    *[{name: value * 2} for name, value in YARN.items() if isinstance(value, int)],
    {"rope_type": "linear"}, {"mrope_section": [24, 24, 16]}, {"partial_rotary_factor": 0.5}, {"factor": 4.5},
    {"factor": "4"}, {"mrope_section": [16, 24]}, {"beta_slow": None}, {"beta_slow": True},
]  # fmt: skip


def digest_with(checkpoint, rope, where):
    config = CONFIG | where(rope)
    (checkpoint / "config.json").write_text(json.dumps(config))
    return read_model(checkpoint, RUN).identity.digest


@pytest.mark.parametrize(
    "where",
    [lambda rope: {"rope_scaling": rope}, lambda rope: {"rope_parameters": {"full_attention": rope}}],
    ids=["scaling", "per kind of layer"],
)
def test_rotary_parameters_count_by_value(checkpoint, where):
    plain = digest_with(checkpoint, YARN, where)
    respelled = dict(reversed((YARN | {"factor": 4.0}).items()))
    assert digest_with(checkpoint, respelled, where) == plain
    others = {digest_with(checkpoint, YARN | change, where) for change in ROTARY_CHANGES}
    assert len(others | {plain}) == len(ROTARY_CHANGES) + 1


def test_other_weights_are_another_model(checkpoint, digester):
    before = read_model(checkpoint, RUN).with_weights(digester).identity
    (checkpoint / "model.safetensors").write_bytes(b"Weights")
    after = read_model(checkpoint, RUN).with_weights(digester).identity
    assert before.first_difference(after).startswith("weights")


def test_what_cannot_be_known_is_refused(checkpoint):
    with pytest.raises(IdentityError, match="unknown"):
        read_model(checkpoint, RUN, overrides={"rope_theta": lambda: 1})
    with pytest.raises(SpecError, match="no preset for model_type 'novel'"):
        read_model(checkpoint, RUN, overrides={"model_type": "novel"})
