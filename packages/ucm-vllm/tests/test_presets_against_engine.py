"""Presets against configuration classes and shape functions of the installed engine, not against copies."""

import json

import pytest
from transformers import AutoConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

from ucm_core.spec.presets import canonical_table, shared_layers
from ucm_core.spec.table import RowKind, SpecTable

STATES = {"conv": "bfloat16", "ssm": "float32", "index": "float8_e4m3fn"}

# Kinds of layers as the configuration classes spell them, and the row that such a layer must be in.
ROW_OF_KIND = {
    "full_attention": ("full", "mla-"),
    "sliding_attention": ("window-", "mla-512-window-"),
    "linear_attention": ("gdn-", "kda-", "lightning-"),
    "chunked_attention": ("chunk-",),
    "indexed_attention": ("indexer-",),
    "compressed_sparse_attention": ("mla-512-c4",),
    "heavily_compressed_attention": ("mla-512-c128",),
}
FAMILIES = (
    "gemma3_text", "gemma3n_text", "gpt_oss", "llama4_text", "deepseek_v32", "deepseek_v4", "glm_moe_dsa",
    "kimi_linear", "minimax", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
)  # fmt: skip


def default_config(model_type):
    """What the class says of a model whose checkpoint leaves everything out."""
    return AutoConfig.for_model(model_type)


def read(config):
    """The configuration as a checkpoint that spells out every key would have it."""
    return json.loads(config.to_json_string(use_diff=False))


def table_of(config) -> SpecTable:
    return canonical_table(read(config), kv_dtype="bfloat16", state_dtypes=STATES)


def state_shapes(table):
    (row,) = table.snapshot_rows
    return tuple(part.shape for part in row.parts)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_layer_is_in_the_row_of_the_kind_that_the_class_gives_it(model_type):
    config = default_config(model_type)
    table, shared = table_of(config), shared_layers(read(config))
    for layer, kind in enumerate(config.layer_types):
        rows = [row.name for row in table.rows if shared.get(layer, layer) in row.units]
        assert any(name.startswith(ROW_OF_KIND[kind]) for name in rows), (layer, kind, rows)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_row_has_a_layer_of_another_kind(model_type):
    config = default_config(model_type)
    for row in table_of(config).chain_rows:
        kinds = {config.layer_types[layer] for layer in row.units}
        full = row.name.startswith(("full", "mla-576"))
        assert len(kinds) == 1 or full or "-window-" in row.name


def test_delta_states_have_the_engines_shapes():
    config = default_config("kimi_linear")
    expected = MambaStateShapeCalculator.kda_state_shape(
        1, config.linear_num_heads, config.linear_head_dim, conv_kernel_size=config.linear_conv_kernel_dim
    )
    assert state_shapes(table_of(config)) == expected


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_gated_delta_states_have_the_engines_shapes(model_type):
    config = default_config(model_type)
    expected = MambaStateShapeCalculator.gated_delta_net_state_shape(
        1,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )
    assert state_shapes(table_of(config)) == expected


def test_lightning_states_have_the_engines_shape():
    config = default_config("minimax")
    dim = config.hidden_size // config.num_attention_heads
    expected = MambaStateShapeCalculator.linear_attention_state_shape(config.num_attention_heads, 1, dim)
    assert state_shapes(table_of(config)) == expected


def test_compressor_states_have_the_engines_width():
    # twice (1 + overlap) * head_dim float32 values a token: vectors and scores (compressor.py: state_dim)
    config = default_config("deepseek_v4")
    table = table_of(config)
    widths = [shape[1] for shape in state_shapes(table)]
    assert widths == [2 * 2 * config.head_dim, 2 * 2 * config.index_head_dim]
    assert {row.kind for row in table.rows} == set(RowKind)


def test_sharing_layers_are_those_of_the_class():
    config = default_config("gemma3n_text")
    first = config.num_hidden_layers - config.num_kv_shared_layers
    assert sorted(shared_layers(read(config))) == list(range(first, config.num_hidden_layers))
    # vLLM takes the last layers before the sharing ones: two before them for a window, one for a full one
    sources = {"sliding_attention": first - 2, "full_attention": first - 1}
    for layer, source in shared_layers(read(config)).items():
        assert sources[config.layer_types[layer]] == source
