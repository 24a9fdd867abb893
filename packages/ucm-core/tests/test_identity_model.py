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
