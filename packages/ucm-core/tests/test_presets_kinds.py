"""What is special in single presets: numbers of real engines, rules of sharing and chunks, and refusals.

Bytes are those that vLLM 0.32 states for its own caches: 656 a token for 8-bit latents of sparse attention,
132 for their index keys, 584 an entry for the compressed family (`flashmla_sparse.py`,
`deepseek_v4/attention.py`).
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preset_configs import CHUNKED, FULL, LINEAR, SLIDING, SPARSE, STATE_DTYPES, config_of

from ucm_core.coordinator.coverage import coverage
from ucm_core.errors import SpecError
from ucm_core.spec.presets import canonical_table, shared_layers
from ucm_core.spec.presets.stress import x_hybrid_96
from ucm_core.spec.table import RankRule, RowKind
from ucm_core.spec.units import UnitMap


def table(model_type, *, kv_dtype="bfloat16", states=STATE_DTYPES, grain_tokens=64, **fields):
    config = config_of(model_type, **fields)
    return canonical_table(config, kv_dtype=kv_dtype, state_dtypes=states, grain_tokens=grain_tokens)


def row_called(made, start):
    (row,) = [row for row in made.rows if row.name.startswith(start)]
    return row


def shapes(row):
    return {part.name: (part.shape, part.dtype) for part in row.parts}


# Indexers


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_index_keys_ride_on_the_latents_and_all_ranks_hold_them(model_type):
    made = table(model_type, kv_dtype="float8_e4m3fn")
    latents, keys = made.row("mla-576"), made.row("indexer-128")
    assert (latents.unit_bytes, keys.unit_bytes) == (64 * 656, 64 * 132)
    assert (keys.kind, keys.follows, keys.rank_rule) == (RowKind.FOLLOWER, "mla-576", RankRule.ALL_UNION)
    assert [part.name for part in latents.parts] == ["latent", "scale", "rope"]


def test_index_keys_of_16_bits_have_no_scales():
    made = table("deepseek_v32", states={"index": "bfloat16"})
    assert shapes(made.row("indexer-128")) == {"key": ((128,), "bfloat16")}
    assert made.digest != table("deepseek_v32").digest


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({}, (0, 1, 2, 3)),
        ({"index_topk_freq": 1}, (0, 1, 2, 3)),
        ({"index_topk_pattern": "FSSF"}, (0, 3)),
        ({"index_topk_freq": 2}, (0, 1, 3)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, (1, 3)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, (0,)),
    ],
)
def test_layers_that_use_an_earlier_layers_choice_have_no_index_keys(fields, own):
    made = table("glm_moe_dsa", indexer_types=None, **fields)
    assert made.row("indexer-128").units == own
    assert made.row("mla-576").units == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["full"]}, "names 1 layers and has 4"),
        ({"indexer_types": ["full", "none", "full", "full"]}, "unknown kind none"),
        ({"index_head_dim": 96}, "has 96 values, no multiple of the 128"),
        ({"index_head_dim": None}, "has no index_head_dim"),
        ({"kv_dtype": "int8"}, "sparse attention over int8 latents"),
        ({"states": {}}, r"give state_dtypes\['index'\]"),
        ({"states": {"index": "auto"}}, "'auto' is not a resolved type"),
    ],
)
def test_an_indexer_that_is_not_understood_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        table("glm_moe_dsa", **fields)


# Compressed entries


def test_compressed_rows_have_whole_entries_and_meet_at_the_coarsest():
    made = table("deepseek_v4")
    tokens = {row.name: row.block_tokens for row in made.chain_rows}
    assert tokens == {"mla-512-window-128": 64, "mla-512-c128": 128, "mla-512-c4": 64}
    assert made.alignment_tokens == 128
    assert made.row("mla-512-c4").unit_bytes == 64 // 4 * 512 * 2
    assert made.row("mla-512-c128").unit_bytes == 1 * 512 * 2


def test_8_bit_entries_have_the_bytes_that_an_engine_stores():
    made = table("deepseek_v4", kv_dtype="float8_e4m3fn")
    assert made.row("mla-512-window-128").unit_bytes == 64 * 584
    assert made.row("mla-512-c4").unit_bytes == 16 * 584
    assert made.row("indexer-128-c4").unit_bytes == 16 * 132
    assert {row.rank_rule for row in made.rows if row.kind is not RowKind.NONE} == {RankRule.ALL_UNION}


def test_an_odd_grain_takes_blocks_that_cut_no_entry():
    made = table("deepseek_v4", grain_tokens=24)
    assert {row.name: row.block_tokens for row in made.chain_rows} == {
        "mla-512-window-128": 24, "mla-512-c128": 384, "mla-512-c4": 24,
    }  # fmt: skip


@given(st.integers(1, 60))
def test_a_compressor_row_holds_all_that_the_next_entries_need(boundary_entries):
    # The oracle: entry j of ratio r is made of tokens [j*r - overlap, (j + 1)*r).
    for ratio, overlap, kept in ((4, 4, 4), (128, 0, 0)):
        boundary = boundary_entries * 128
        later = range(boundary // ratio, boundary // ratio + 3)
        needed = {token for j in later for token in range(j * ratio - overlap, (j + 1) * ratio)}
        assert {token for token in needed if token < boundary} == set(range(boundary - kept, boundary))


def test_a_compressor_state_has_the_engines_widths():
    made = table("deepseek_v4")
    state = row_called(made, "compressor-4")
    assert shapes(state) == {"attention": ((4, 2048), "float32"), "indexer": ((4, 512), "float32")}
    assert (state.kind, made.row("compressor-128").kind) == (RowKind.SNAPSHOT, RowKind.NONE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_ratios": None}, "has no compress_ratios or layer_types"),
        ({"compress_ratios": [0, 4]}, "names 2 layers in compress_ratios and has 4"),
        (
            {"compress_ratios": [0, 4, 16, 0]},
            r"compress_ratios = \[0, 4, 16, 0\]; expected 0, 1, 4, 128 per layer",
        ),
        ({"compress_ratios": 4}, "compress_ratios = 4; expected a list of whole numbers"),
        (
            {"layer_types": [SLIDING] * 4},
            "layer 1 as coarse and window in compress_ratios and layer_types",
        ),
        ({"vision_n_layers": 2}, "image tokens that look past their window"),
        ({"kv_dtype": "float8_e5m2"}, r"stores 448 \+ 64 values as float8_e5m2"),
        ({"kv_dtype": "float8_e4m3fn", "head_dim": 256}, r"stores 192 \+ 64 values"),
    ],
)
def test_a_compressed_model_that_is_not_understood_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        table("deepseek_v4", **fields)


def test_ratios_may_be_said_by_kind_and_1_is_none():
    kinds = [
        SLIDING,
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ]
    by_kind = table("deepseek_v4", compress_ratios=None, layer_types=kinds)
    assert by_kind.digest == table("deepseek_v4", compress_ratios=[1, 128, 4, 128]).digest
    assert by_kind.digest == table("deepseek_v4").digest


# States at every token


def test_a_state_that_exists_at_every_token_is_kept_at_an_interval():
    row = row_called(table("kimi_linear"), "kda-")
    assert shapes(row) == {"conv": ((3, 3 * 32 * 128), "bfloat16"), "ssm": ((32, 128, 128), "float32")}
    assert (row.block_tokens, row.interval) == (64, 256)


@given(st.integers(1, 700))
def test_the_interval_is_the_first_multiple_of_the_grid_from_256_on(grain_tokens):
    row = row_called(table("kimi_linear", grain_tokens=grain_tokens), "kda-")
    assert row.interval == next(n for n in range(grain_tokens, 2000, grain_tokens) if n >= 256)


@pytest.mark.parametrize("interval", [64, 128, 4096])
def test_the_stress_table_takes_intervals_on_its_grid(interval):
    assert x_hybrid_96(kda_interval=interval).row("kda_perslot").interval == interval


@pytest.mark.parametrize("interval", [0, 32, 100, -64, 1 << 40])
def test_the_stress_table_refuses_intervals_off_its_grid(interval):
    with pytest.raises(SpecError, match=f"interval {interval} is no multiple of its grid 64"):
        x_hybrid_96(kda_interval=interval)


def test_nested_and_flat_spellings_of_delta_layers_agree():
    kinds = [LINEAR] * 3 + [FULL]
    flat = table("kimi_linear", linear_attn_config=None, layer_types=kinds)
    assert flat.digest == table("kimi_linear").digest == table("kimi_linear", layer_types=kinds).digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"linear_attn_config": None}, "has no layer_types or linear_attn_config"),
        ({"linear_attn_config": [1]}, r"linear_attn_config = \[1\]; expected a mapping"),
        (
            {"linear_attn_config": {}},
            r"kda_layers \(\) and full_attn_layers \(\); expected each of 1 to 4 once",
        ),
        (
            {"linear_attn_config": {"kda_layers": [1, 2, 3, 4], "full_attn_layers": [4]}},
            "each of 1 to 4 once",
        ),
        ({"linear_attn_config": {"kda_layers": [0, 1, 2, 3]}}, "each of 1 to 4 once"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3, 4]}}, "linear_attn_config has no num_heads"),
        (
            {"layer_types": [LINEAR] * 4},
            "has layer 3 as state and full in layer_types and linear_attn_config",
        ),
    ],
)
def test_delta_layers_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        table("kimi_linear", **fields)


def test_a_lightning_layer_keeps_one_matrix_per_query_head():
    row = row_called(table("minimax_text_01"), "lightning-")
    assert shapes(row) == {"ssm": ((32, 128, 128), "float32")}
    assert row.name == row_called(table("minimax"), "lightning-").name


@pytest.mark.parametrize("types", [None, [0, 1], [0, 1, 2], [0, 1, True], "001"])
def test_attention_types_that_do_not_fit_the_layers_are_refused(types):
    with pytest.raises(SpecError, match="attn_type_list"):
        table("minimax_m1", attn_type_list=types)


# Block-sparse attention


def test_both_spellings_of_sparse_layers_agree():
    assert table("minimax_m3_text").digest == table("minimax_m3_vl_text").digest
    assert shapes(table("minimax_m3_text").row("indexer-128")) == {"key": ((128,), "float8_e4m3fn")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layer_types": [FULL] * 3},
            "has layer 1 as full and sparse in layer_types and sparse_attention_freq",
        ),
        (
            {"sparse_attention_config": SPARSE | {"sparse_attention_freq": [0]}},
            "names 1 layers in sparse_attention_freq and has 3",
        ),
        (
            {"sparse_attention_config": SPARSE | {"sparse_disable_index_value": [1, 1, 0]}},
            "keeps index values",
        ),
        ({"sparse_attention_config": SPARSE | {"sparse_index_dim": None}}, "has no sparse_index_dim"),
        ({"sparse_attention_config": SPARSE | {"sparse_disable_index_value": [1]}}, "keeps index values"),
    ],
)
def test_sparse_layers_that_are_not_understood_are_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        table("minimax_m3_text", **fields)


# Shared keys and values


def test_sharing_layers_read_the_last_layer_of_their_kind_before_them():
    config = config_of("gemma3n_text")
    assert shared_layers(config) == {10: 8, 11: 8, 12: 8, 13: 8, 14: 9}
    units = UnitMap(table("gemma3n_text"), follows=shared_layers(config))
    assert units.units_of(10) == units.save_after(14) == ()
    assert units.await_before(14) == units.units_of(9) == (("full", 1),)
    assert units.await_before(10) == (("window-512", 7),)


def test_without_sharing_layers_every_layer_owns_its_bytes():
    assert shared_layers(config_of("gemma3n_text", num_kv_shared_layers=0)) == {}
    assert shared_layers(config_of("llama")) == {}
    assert sum(len(row.units) for row in table("gemma3n_text", num_kv_shared_layers=0).rows) == 15


@given(st.integers(0, 15), st.lists(st.booleans(), min_size=15, max_size=15))
def test_every_layer_owns_bytes_or_shares_those_of_its_own_kind(shared, full):
    kinds = [FULL if is_full else SLIDING for is_full in full]
    fields = {"layer_types": kinds, "num_kv_shared_layers": shared}
    first = 15 - shared
    if not set(kinds[first:]) <= set(kinds[:first]) or not first:
        with pytest.raises(SpecError, match=r"share a|keeps anything"):
            table("gemma3n_text", **fields)
        return
    sources = shared_layers(config_of("gemma3n_text", **fields))
    assert sources == {n: max(m for m in range(first) if kinds[m] == kinds[n]) for n in range(first, 15)}
    assert sorted(layer for row in table("gemma3n_text", **fields).rows for layer in row.units) == list(
        range(first)
    )


# Chunks of the sequence


def chunk_row(chunk, block_tokens=1):
    return table("llama4_text", attention_chunk_size=chunk, grain_tokens=block_tokens).row(f"chunk-{chunk}")


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 200))
def test_a_chunk_row_never_asks_for_less_than_the_next_token_can_see(chunk, block_tokens, boundary):
    # The oracle, token by token: what the token at the boundary sees before it is its own chunk.
    seen = {token for token in range(boundary) if token // chunk == boundary // chunk}
    blocks = coverage(chunk_row(chunk, block_tokens), boundary)
    assert seen <= {
        token for block in blocks for token in range(block * block_tokens, (block + 1) * block_tokens)
    }


@pytest.mark.parametrize("chunk", [2, 3, 8, 17])
def test_no_smaller_window_would_be_enough_for_a_chunk(chunk):
    boundary = 3 * chunk - 1
    seen = [token for token in range(boundary) if token // chunk == boundary // chunk]
    assert len(coverage(chunk_row(chunk), boundary)) == len(seen) == chunk - 1


def test_layers_without_rotary_positions_are_full():
    made = table("llama4_text", no_rope_layers=[0, 1, 1, 0, 1])
    assert made.row("chunk-8192").units == (1, 2, 4)
    assert made.row("full").units == (0, 3)
    assert made.row("chunk-8192").window == 8192


def test_a_chunk_is_no_sliding_window_of_its_size():
    kinds = [SLIDING, SLIDING, SLIDING, FULL, SLIDING]
    window = table("gemma3_text", num_hidden_layers=5, head_dim=128, sliding_window=8192, layer_types=kinds)
    assert window.row("full").parts == table("llama4_text").row("full").parts
    assert window.digest != table("llama4_text").digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "names 2 layers in no_rope_layers and has 5"),
        ({"no_rope_layers": "10"}, "no_rope_layers = '10'; expected a list of whole numbers"),
        ({"layer_types": [CHUNKED] * 5}, "has layer 3 as full and chunk in no_rope_layers and layer_types"),
        ({"attention_chunk_size": -1}, "attention_chunk_size = -1"),
    ],
)
def test_chunks_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        table("llama4_text", **fields)


def test_without_a_chunk_size_every_layer_is_full():
    assert [row.name for row in table("llama4_text", attention_chunk_size=None).rows] == ["full"]


# Sinks, cross attention


def test_sinks_are_weights_and_change_nothing_that_is_cached():
    assert table("gpt_oss", attention_sinks=True, num_sink_tokens=4).digest == table("gpt_oss").digest


def test_cross_layers_are_in_the_table_and_cached_nowhere():
    made = table("mllama_text_model")
    assert (made.row("cross").kind, made.row("cross").block_tokens) == (RowKind.NONE, 0)
    assert UnitMap(made).units_of(3) == ()
    assert not coverage(made.row("cross"), 640)
    with pytest.raises(SpecError, match="has the cross layer 9 and 5 layers"):
        table("mllama_text_model", cross_attention_layers=[3, 9])


def test_cross_layers_are_where_published_checkpoints_have_them():
    made = table("mllama_text_model", num_hidden_layers=40, cross_attention_layers=None)
    assert made.row("cross").units == (3, 8, 13, 18, 23, 28, 33, 38)


@pytest.mark.parametrize("fields", [{"mamba_expand": "2"}, {"mamba_expand": 0}, {"attn_layer_indices": 2}])
def test_odd_mamba_keys_are_refused_by_name(fields):
    with pytest.raises(SpecError, match=next(iter(fields))):
        table("bamba", **fields)
