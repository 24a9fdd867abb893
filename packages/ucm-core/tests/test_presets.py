"""Presets: rows, names and exact bytes per family, checked against numbers observed in a real engine."""

import sys
import types

import pytest

from ucm_core.errors import SpecError
from ucm_core.spec import presets
from ucm_core.spec.presets import canonical_table, draft_table, drafts, families
from ucm_core.spec.table import RankRule, RowKind

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
COMMON = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

# The tiny models of the engine contract, as their config.json says them.
TINY = {
    "llama": COMMON | {"model_type": "llama", "num_hidden_layers": 4, "head_dim": 32},
    "gemma3": COMMON
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "head_dim": 32,
        "sliding_window": 64,
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
    },
    "gpt-oss": COMMON
    | {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 64,
        "layer_types": [SLIDING, FULL] * 2,
    },
    "deepseek": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    "granite": COMMON
    | MAMBA
    | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
    },
    "bamba": COMMON | MAMBA | {"model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [2]},
    "falcon-h1": COMMON
    | MAMBA
    | {
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "head_dim": 32,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
    },
    "nemotron": COMMON
    | {
        "model_type": "nemotron_h",
        "num_hidden_layers": 5,
        "head_dim": 32,
        "hybrid_override_pattern": "M-*ME",
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 32,
        "conv_kernel": 4,
    },
    "qwen3-next": COMMON
    | {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "layer_types": [LINEAR] * 3 + [FULL],
    },
}


def table(config, dtype="bfloat16", ssm=None, **options):
    config = TINY[config] if isinstance(config, str) else config
    return canonical_table(
        config, kv_dtype=dtype, state_dtypes={"conv": dtype, "ssm": ssm or dtype}, **options
    )


def names_and_units(made):
    return {row.name: row.units for row in made.rows}


def shapes(row):
    return {part.name: part.shape for part in row.parts}


def test_dense_layers_are_one_full_row_of_keys_then_values():
    made = table("llama")
    (row,) = made.rows
    assert (row.name, row.kind, row.units, row.block_tokens) == ("full", RowKind.CHAIN, (0, 1, 2, 3), 64)
    assert [(part.name, part.shape, part.dtype) for part in row.parts] == [
        ("k", (2, 32), "bfloat16"),
        ("v", (2, 32), "bfloat16"),
    ]
    # Observed: a page of 128 tokens of one layer has 32,768 bytes.
    assert table("llama", block_tokens=128).row("full").unit_bytes == 32_768
    assert row.rank_rule is RankRule.INTERSECTION


@pytest.mark.parametrize(
    ("name", "window_layers", "full_layers"),
    [("gemma3", (0, 1, 3, 4), (2, 5)), ("gpt-oss", (0, 2), (1, 3))],
)
def test_windows_and_full_layers_are_two_rows(name, window_layers, full_layers):
    made = table(name, block_tokens=128)
    assert names_and_units(made) == {"window-64": window_layers, "full": full_layers}
    assert (made.row("window-64").window, made.row("full").window) == (64, None)
    assert {row.unit_bytes for row in made.rows} == {32_768}


def test_latent_attention_is_one_row_that_all_ranks_hold_alike():
    (row,) = table("deepseek", "float32").rows
    assert (row.name, row.rank_rule) == ("mla-576", RankRule.ALL_UNION)
    assert shapes(row) == {"latent": (512,), "rope": (64,)}
    # Observed: 36,864 bytes a page of 16 tokens in float32.
    assert table("deepseek", "float32", grain_tokens=16).row("mla-576").unit_bytes == 36_864


def state_row(made):
    (row,) = made.snapshot_rows
    return row


@pytest.mark.parametrize(
    ("name", "dtype", "observed_bytes"),
    [
        ("granite", "float32", 36_608),
        ("bamba", "float32", 36_608),
        ("nemotron", "float32", 36_608),
        ("qwen3-next", "bfloat16", 68_608),
    ],
)
def test_a_state_has_the_bytes_that_the_engine_registers(name, dtype, observed_bytes):
    assert state_row(table(name, dtype)).unit_bytes == observed_bytes


def test_conv_and_matrix_of_a_state_have_types_of_their_own():
    row = state_row(table("qwen3-next", "bfloat16", ssm="float32"))
    assert [part.dtype for part in row.parts] == ["bfloat16", "float32"]
    assert row.unit_bytes == 3 * 512 * 2 + 2 * 128 * 128 * 4


# What the engine's own shape functions answer for the same configurations, in (conv, ssm) order.
ENGINE_SHAPES = {
    "granite": ((3, 320), (8, 32, 32)),
    "bamba": ((3, 320), (8, 32, 32)),
    "nemotron": ((3, 320), (8, 32, 32)),
    "falcon-h1": ((3, 192), (4, 32, 32)),
    "qwen3-next": ((3, 512), (2, 128, 128)),
}


@pytest.mark.parametrize("name", ENGINE_SHAPES)
def test_state_parts_are_conv_then_ssm_in_the_engines_shapes(name):
    row = state_row(table(name))
    assert [part.name for part in row.parts] == ["conv", "ssm"]
    assert tuple(part.shape for part in row.parts) == ENGINE_SHAPES[name]
    assert (row.kind, row.block_tokens, row.interval) == (RowKind.SNAPSHOT, 64, None)


LAYERS = {
    "granite": {"mamba2": (0, 1, 3), "full": (2,)},
    "bamba": {"mamba2": (0, 1, 3), "full": (2,)},
    "nemotron": {"mamba2": (0, 3), "full": (2,)},
    "falcon-h1": {"full": (0, 1), "mamba2": (0, 1)},
    "qwen3-next": {"gdn": (0, 1, 2), "full": (3,)},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_in_the_rows_of_what_they_keep(name):
    units = names_and_units(table(name))
    assert {row.split("-")[0]: layers for row, layers in units.items()} == LAYERS[name]


def test_equal_state_shapes_have_equal_names_in_any_family_and_others_differ():
    granite, bamba, falcon = (state_row(table(name)).name for name in ("granite", "bamba", "falcon-h1"))
    assert granite == bamba != falcon
    assert len(granite) == len("mamba2-") + 8


SPELLINGS = [
    ("granite", {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}),
    ("granite", {"layer_types": None, "layers_block_type": ["mamba", "mamba", "attention", "mamba"]}),
    ("granite", {"mamba_d_head": "auto"}),
    ("bamba", {"attn_layer_indices": None, "layer_types": [LINEAR, LINEAR, FULL, LINEAR]}),
    (
        "nemotron",
        {"hybrid_override_pattern": None, "layers_block_type": [LINEAR, "mlp", FULL, LINEAR, "moe"]},
    ),
    ("qwen3-next", {"layer_types": None, "full_attention_interval": 4}),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 3}),
    ("gemma3", {"layer_types": None, "_sliding_window_pattern": 3}),
    ("gpt-oss", {"layer_types": None}),
    ("llama", {"head_dim": None}),
    ("llama", {"layer_types": [FULL] * 4, "rope_parameters": {"rope_theta": 1.0}}),
    ("falcon-h1", {"mamba_d_ssm": None, "mamba_expand": 1}),
]


@pytest.mark.parametrize(("name", "fields"), SPELLINGS)
def test_old_and_new_spellings_of_a_config_give_the_same_table(name, fields):
    assert table(TINY[name] | fields).digest == table(name).digest


def test_a_wrapper_is_read_through_its_text_config():
    wrapper = {
        "model_type": "gemma3",
        "text_config": TINY["gemma3"],
        "vision_config": {"model_type": "siglip"},
    }
    assert table(wrapper).digest == table("gemma3").digest


def test_published_gemma_configs_leave_defaults_out():
    made = table(
        {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}
    )
    assert names_and_units(made)["full"] == (5, 11, 17, 23, 29)
    assert shapes(made.row("window-1024")) == {"k": (4, 256), "v": (4, 256)}


DENSE = COMMON | {"num_hidden_layers": 3, "head_dim": 32, "sliding_window": 100}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "mistral"}, {"window-100": (0, 1, 2)}),
        ({"model_type": "mistral", "sliding_window": None}, {"full": (0, 1, 2)}),
        ({"model_type": "llama", "sliding_window": 0}, {"full": (0, 1, 2)}),
        (
            {"model_type": "llama", "layer_types": [SLIDING, FULL, SLIDING]},
            {"window-100": (0, 2), "full": (1,)},
        ),
        ({"model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 1}, {"full": (0, 1, 2)}),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            {"full": (0,), "window-100": (1, 2)},
        ),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": [FULL] * 3}, {"full": (0, 1, 2)}),
        ({"model_type": "qwen3", "layer_types": [SLIDING] * 3}, {"full": (0, 1, 2)}),
    ],
)
def test_a_dense_model_has_windows_only_where_its_config_switches_them_on(fields, expected):
    assert names_and_units(table(DENSE | fields)) == expected


def test_one_family_has_a_head_size_that_does_not_follow_from_the_hidden_size():
    small = {key: value for key, value in DENSE.items() if key != "head_dim"}
    assert shapes(table(small | {"model_type": "qwen3"}).row("full"))["k"] == (2, 128)
    assert shapes(table(small | {"model_type": "qwen2"}).row("full"))["k"] == (2, 32)


def test_keys_and_values_are_as_many_as_queries_when_not_said():
    config = {key: value for key, value in TINY["llama"].items() if key != "num_key_value_heads"}
    assert shapes(table(config).row("full"))["k"] == (4, 32)


def test_rows_of_one_name_and_other_geometry_are_numbered():
    made = presets.rows_of(
        [(0, holding("full", 2)), (1, holding("full", 4)), (2, holding("full", 2)), (3, holding("full", 8))],
        block_tokens=64,
        grain_tokens=64,
    )
    assert [(row.name, row.units) for row in made] == [("full", (0, 2)), ("full.2", (1,)), ("full.3", (3,))]


def holding(name, heads):
    part = presets._layers.Part("k", (heads,), "int8")
    return presets._layers.Holding(name, RowKind.CHAIN, (part,))


@pytest.mark.parametrize("name", TINY)
def test_the_digest_depends_on_types_and_block_size_but_not_on_the_grid(name):
    base = table(name)
    assert table(name, "float32").digest != base.digest
    assert table(name, block_tokens=128).digest != base.digest
    assert table(name, grain_tokens=16, block_tokens=64).digest == base.digest
    assert base.grain_tokens == base.alignment_tokens == 64


def test_blocks_are_whole_grains():
    with pytest.raises(SpecError, match="block_tokens 96 is no multiple of grain_tokens 64"):
        table("llama", block_tokens=96)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "unheard_of"}, "no preset for model_type 'unheard_of'; known are bamba"),
        ({"model_type": "lama"}, "no preset for model_type 'lama'; did you mean llama"),
        ({}, "no preset for model_type None"),
        (TINY["llama"] | {"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        (TINY["llama"] | {"num_hidden_layers": None}, "llama has no num_hidden_layers"),
        (TINY["llama"] | {"num_hidden_layers": -1}, "num_hidden_layers = -1; expected a whole number"),
        (TINY["llama"] | {"num_key_value_heads": "2"}, "num_key_value_heads = '2'"),
        (
            TINY["llama"] | {"head_dim": None, "hidden_size": 130},
            "hidden_size 130 is no multiple of num_attention_heads 4",
        ),
        (TINY["llama"] | {"layer_types": ["chunked_attention"] * 4}, "unknown kind chunked_attention"),
        (TINY["llama"] | {"layer_types": 4}, "layer_types = 4; expected a list of names"),
        (TINY["gemma3"] | {"num_hidden_layers": 7}, "names 6 layers and has 7"),
        (TINY["llama"] | {"layer_types": [SLIDING] * 4}, "no sliding_window"),
        (TINY["granite"] | {"layer_types": None}, "granitemoehybrid has no layer_types"),
        (TINY["nemotron"] | {"hybrid_override_pattern": "MX*ME"}, "unknown kind X"),
        (TINY["nemotron"] | {"hybrid_override_pattern": None}, "neither hybrid_override_pattern"),
        (TINY["nemotron"] | {"hybrid_override_pattern": "-----"}, "no layer that keeps anything"),
    ],
)
def test_a_config_that_cannot_be_read_exactly_is_refused(config, message):
    with pytest.raises(SpecError) as caught:
        table(config)
    assert message in str(caught.value)


def test_models_with_states_need_their_types():
    with pytest.raises(SpecError, match=r"give state_dtypes\['conv'\]"):
        canonical_table(TINY["granite"], kv_dtype="bfloat16")
    with pytest.raises(SpecError, match="'auto' is not a resolved type"):
        table("granite", ssm="auto")


NOVEL = """
from ucm_core.spec.presets._layers import Shared, attention, draft_layers

def layers(facts):
    return [(0, attention(facts, 32)), (1, attention(facts, 32, window=9)), (2, Shared(0))]

FAMILIES = {"novel_model": layers}
DRAFTS = {"novel_model": lambda facts: [(n, attention(facts, 32)) for n in draft_layers(facts, "ahead")]}
"""


@pytest.fixture
def novel(monkeypatch, tmp_path):
    """A preset in a folder of its own: nothing else knows it."""
    (tmp_path / "novel.py").write_text(NOVEL)
    monkeypatch.setattr(presets, "__path__", [*presets.__path__, str(tmp_path)])
    families.cache_clear()
    drafts.cache_clear()
    yield COMMON | {"model_type": "novel_model", "ahead": 2, "num_hidden_layers": 3}
    sys.modules.pop(f"{presets.__name__}.novel", None)
    families.cache_clear()
    drafts.cache_clear()


def test_a_new_module_is_found_without_changing_any_other(novel):
    before = table("llama").digest
    assert names_and_units(table(novel)) == {"full": (0,), "window-9": (1,)}
    assert presets.shared_layers(novel) == {2: 0}
    assert names_and_units(draft_table(novel, kv_dtype="bfloat16")) == {"mtp.full": (3, 4)}
    assert table("llama").digest == before


def test_two_modules_cannot_claim_one_model_type(monkeypatch):
    double = types.SimpleNamespace(__name__="double", FAMILIES={"llama": None})
    monkeypatch.setattr(presets.importlib, "import_module", lambda name: double)
    families.cache_clear()
    try:
        with pytest.raises(SpecError, match="two presets claim the model type 'llama'"):
            families()
    finally:
        families.cache_clear()
