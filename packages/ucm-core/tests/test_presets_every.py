"""Properties that hold for every preset: rows cover the layers, texts round-trip, digests never move."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import yaml
from models import identity_of
from preset_configs import FAMILIES, HOLDS_NOTHING, STATE_DTYPES, config_of

from ucm_core.errors import SpecError
from ucm_core.spec.presets import canonical_table, draft_table, drafts, families, shared_layers
from ucm_core.spec.presets.stress import x_hybrid_96
from ucm_core.spec.table import RowKind, SpecTable
from ucm_core.spec.units import UnitMap


def table_of(model_type, *, make=canonical_table, fields=None, **options):
    options = {"kv_dtype": "bfloat16", "state_dtypes": STATE_DTYPES} | options
    return make(config_of(model_type, **(fields or {})), **options)


def stem(name):
    return re.sub(r"-[0-9a-f]{8}$", "", name)


every = pytest.mark.parametrize("model_type", sorted(FAMILIES))
every_draft = pytest.mark.parametrize("model_type", sorted(drafts()))
TABLES = {name: table_of(name) for name in FAMILIES} | {"x-hybrid-96": x_hybrid_96()}


def test_every_family_has_an_example_here():
    assert sorted(FAMILIES) == sorted(families())
    assert set(drafts()) <= set(families())


@every
def test_rows_hold_the_layers_that_the_configuration_names(model_type):
    assert {stem(row.name): row.units for row in table_of(model_type).rows} == FAMILIES[model_type][1]


@every
def test_every_layer_is_chain_snapshot_follower_none_or_shares_one_that_is(model_type):
    config, table = config_of(model_type), table_of(model_type)
    owned = {layer for row in table.rows for layer in row.units}
    shared = shared_layers(config)
    idle = {layer for name, layer in HOLDS_NOTHING if name == model_type}
    assert owned | set(shared) | idle == set(range(config["num_hidden_layers"]))
    assert owned.isdisjoint(shared)
    assert owned.isdisjoint(idle)
    assert all(isinstance(row.kind, RowKind) for row in table.rows)


@every
def test_a_follower_rides_on_layers_that_its_source_has(model_type):
    table = table_of(model_type)
    for row in table.follower_rows:
        assert set(row.units) <= set(table.row(row.follows).units)


@every
def test_units_of_all_layers_are_the_rows_units_once_each(model_type):
    config, table = config_of(model_type), table_of(model_type)
    units = UnitMap(table, follows=shared_layers(config))
    owned = [unit for layer in range(config["num_hidden_layers"]) for unit in units.units_of(layer)]
    expected = [(r.name, n) for r in table.rows if r.kind is not RowKind.NONE for n in range(len(r.units))]
    assert sorted(owned) == sorted(expected)


@pytest.mark.parametrize("name", TABLES)
def test_tables_read_back_from_data_json_and_yaml(name):
    table = TABLES[name]
    mapping = table.to_mapping()
    assert SpecTable.from_mapping(mapping) == table
    for text in (json.dumps(mapping), yaml.safe_dump(mapping)):
        assert SpecTable.from_yaml(text) == table
        assert SpecTable.from_yaml(text).digest == table.digest


# First 8 bytes of the digests, as computed when each preset was written: a change here is a change of every
# namespace of that family, and of nothing else.
DIGESTS = {
    "llama": "0c1cc6b999af1ac8",
    "mistral": "9c86758e668003ff",
    "qwen2": "0c1cc6b999af1ac8",
    "qwen3": "0c1cc6b999af1ac8",
    "gemma3_text": "2c054ca9ed770f9a",
    "gpt_oss": "81a3e856e4a750d0",
    "gemma3n_text": "688add52890e261a",
    "llama4_text": "449e6a71001d4f4f",
    "mllama_text_model": "74d872cef6e9146b",
    "deepseek_v2": "2677de869165c9c9",
    "deepseek_v3": "2677de869165c9c9",
    "deepseek_v32": "872f6c1bf0f61cd3",
    "glm_moe_dsa": "608c6f1c6b37f385",
    "deepseek_v4": "a9c351006cc28bc9",
    "kimi_linear": "ea22d9f593d56247",
    "minimax": "a585b5df7657301a",
    "minimax_text_01": "010f89ac7b2d2695",
    "minimax_m1": "5c4ee9f2e26c2802",
    "minimax_m3_text": "1c373c9efb8f16f9",
    "minimax_m3_vl_text": "1c373c9efb8f16f9",
    "granitemoehybrid": "fe9936d5f8e0945a",
    "bamba": "fe9936d5f8e0945a",
    "falcon_h1": "eb491ad0d9ffe460",
    "nemotron_h": "f99289393e0912e1",
    "qwen3_next": "334097a90cbf222c",
    "qwen3_5_text": "334097a90cbf222c",
    "qwen3_5_moe_text": "334097a90cbf222c",
    "x-hybrid-96": "ab687cec13247ff5",
}


@pytest.mark.parametrize("name", TABLES)
def test_digests_do_not_move(name):
    assert TABLES[name].digest.hex()[:16] == DIGESTS[name]


def test_digests_are_the_same_in_a_fresh_interpreter():
    script = (
        "from preset_configs import FAMILIES\n"
        "from test_presets_every import table_of\n"
        "print(*(table_of(name).digest.hex()[:16] for name in FAMILIES))\n"
    )
    path = ":".join(sys.path)
    environment = {"PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [DIGESTS[name] for name in FAMILIES]


@every
def test_key_order_and_unrelated_keys_change_nothing(model_type):
    table = table_of(model_type)
    reversed_config = dict(reversed(config_of(model_type, vocab_size=7, rms_norm_eps=1e-9).items()))
    made = canonical_table(reversed_config, kv_dtype="bfloat16", state_dtypes=STATE_DTYPES)
    assert made.digest == table.digest


@every
def test_grids_and_intervals_are_no_part_of_the_digest(model_type):
    coarse = table_of(model_type, grain_tokens=64, block_tokens=128)
    fine = table_of(model_type, grain_tokens=32, block_tokens=128)
    assert coarse.digest == fine.digest
    for row in fine.snapshot_rows:
        assert row.block_tokens == 32
        assert (row.interval or 0) % 32 == 0


@every
@pytest.mark.parametrize("partition", [(1, 1), (0, 2), (2, 0)])
def test_stages_hold_every_unit_once(model_type, partition):
    config, table = config_of(model_type), table_of(model_type)
    rest = config["num_hidden_layers"] - sum(partition)
    units = UnitMap(table, [*partition, rest])
    for row in table.rows:
        stages = [units.stage(row.name, stage) for stage in range(3)]
        assert sum(stage.unit_count for stage in stages) == len(row.units)
        assert [stage.first_unit for stage in stages] == [
            0, stages[0].unit_count, stages[0].unit_count + stages[1].unit_count,
        ]  # fmt: skip


@every
@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_attention_heads", "kv_lora_rank", "sliding_window"]
)
@pytest.mark.parametrize("value", [-1, 1 << 40, 1.5, "4", True])
def test_impossible_sizes_are_refused_with_the_key_or_do_not_matter(model_type, key, value):
    without = table_of(model_type).digest
    try:
        made = table_of(model_type, fields={key: value}).digest
    except SpecError as error:
        made = str(error)
    assert made == without or f"{key} = {value!r}" in made


@every
def test_more_layers_than_any_model_has_are_refused(model_type):
    with pytest.raises(SpecError, match=r"num_hidden_layers = 10000; .* at most 9999|layers and has 10000"):
        table_of(model_type, fields={"num_hidden_layers": 10_000})


# Draft layers: whatever the configuration says about them, the model's own table stays.
@every
@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"])
@pytest.mark.parametrize("value", [None, 0, 1, 3])
def test_draft_layers_are_not_in_the_models_table(model_type, key, value):
    assert table_of(model_type, fields={key: value}).digest == TABLES[model_type].digest


@every_draft
def test_draft_layers_have_rows_of_their_own_numbered_after_the_models(model_type):
    main, draft = TABLES[model_type], table_of(model_type, make=draft_table)
    assert all(row.name.startswith("mtp.") for row in draft.rows)
    assert {layer for row in draft.rows for layer in row.units} == {
        config_of(model_type)["num_hidden_layers"]
    }
    assert draft.digest != main.digest
    assert SpecTable((*main.rows, *draft.rows), 64).digest not in (main.digest, draft.digest)


@every_draft
def test_draft_layers_have_a_namespace_of_their_own_that_depends_on_the_whole_model(model_type):
    main = identity_of(TABLES[model_type])
    drafted = table_of(model_type, make=draft_table).digest.hex()
    identities = [main, identity_of(TABLES[model_type], weights="5b" * 32)]
    both = [*identities, *(dataclasses.replace(identity, table=drafted) for identity in identities)]
    assert len({identity.namespace for identity in both}) == 4


@every_draft
def test_draft_layers_lie_on_the_last_stage(model_type):
    config, draft = config_of(model_type), table_of(model_type, make=draft_table)
    count = config["num_hidden_layers"]
    units = UnitMap(draft, [1, count - 1 + 1])
    assert all(units.stage(row.name, 0).unit_count == 0 for row in draft.rows)
    assert all(units.stage(row.name, 1).unit_count == 1 for row in draft.rows)
    with pytest.raises(SpecError, match=f"layer {count} is past the partition's {count} layers"):
        UnitMap(draft, [1, count - 1])


@every_draft
def test_a_draft_layer_holds_what_a_layer_of_the_model_holds(model_type):
    parts = [row.parts for row in TABLES[model_type].rows]
    assert all(row.parts in parts for row in table_of(model_type, make=draft_table).rows)


@every_draft
def test_more_draft_layers_are_more_units(model_type):
    key = next(
        key for key in config_of(model_type) if key in ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    )
    count = config_of(model_type)["num_hidden_layers"]
    draft = table_of(model_type, make=draft_table, fields={key: 3})
    assert {row.units for row in draft.rows} == {(count, count + 1, count + 2)}
    for value in (None, 0, -1):
        with pytest.raises(SpecError, match=key):
            table_of(model_type, make=draft_table, fields={key: value})


def test_draft_layers_that_nobody_described_are_refused():
    with pytest.raises(
        SpecError, match="no preset for draft layers of model_type 'llama'; known are deepseek_v3"
    ):
        table_of("llama", make=draft_table)


@every
@pytest.mark.parametrize("key", ["grain_tokens", "block_tokens"])
def test_impossible_grains_and_blocks_are_refused_with_the_key(model_type, key):
    for value in (0, -1, 1.0, "64", [64], (), {}, float("nan"), True, 1 << 40, 10**5000):
        with pytest.raises(SpecError, match=f"{key} is .*, must be at least 1"):
            table_of(model_type, **{key: value})


@pytest.mark.parametrize("value", [None, [], {}, 7, ["llama"], 10**5000], ids=type)
def test_a_model_type_that_is_no_name_is_refused(value):
    for make in (canonical_table, draft_table):
        with pytest.raises(SpecError, match=r"no preset for .*model_type .*(known are|did you mean)"):
            make(config_of("llama") | {"model_type": value}, kv_dtype="bfloat16")


HOSTILE = [-1, 0, 10**5000, 1 << 62, 1.5, float("nan"), float("inf"), "", "4", "\ud800", True, b"x", object(),
           [], [-1], [1.5], [None], [[1]], [10**5000], ["a"] * 9_999, {}, {"a": 1}, {1}]  # fmt: skip


@every
def test_whatever_a_key_says_the_table_holds_all_layers_or_the_error_is_ours(model_type):
    config = config_of(model_type)
    keys = {**config, **DEFAULTED}
    for key, value in ((key, value) for key in keys for value in HOSTILE):
        made = config | {key: value}
        try:
            table = canonical_table(made, kv_dtype="bfloat16", state_dtypes=STATE_DTYPES)
        except SpecError:
            continue
        owned = {layer for row in table.rows for layer in row.units} | set(shared_layers(made))
        idle = {layer for name, layer in HOLDS_NOTHING if name == model_type}
        assert owned | idle == set(range(config["num_hidden_layers"])), (key, value)


DEFAULTED = dict.fromkeys(
    ("head_dim", "sliding_window", "layer_types", "max_window_layers", "use_sliding_window", "text_config")
)
