"""vLLM's groups on the canonical table's rows: each layer claimed once, each disagreement refused by name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import families
import torch
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, get_kv_cache_spec_kind

from ucm_core.errors import ConfigError, SpecError
from ucm_vllm.spec_from_engine import EngineSpec, engine_spec, layer_number, map_groups


def kind(spec: Any) -> str:
    return str(get_kv_cache_spec_kind(spec).value)


def spec_of(model: families.TinyModel, align: int = 128) -> EngineSpec:
    return engine_spec(model.table, model.groups, spec_kind=kind, engine_align_tokens=align)


def refusal(groups: list[Any], model: families.TinyModel = families.DENSE) -> str:
    with pytest.raises(SpecError) as error:
        map_groups(model.table, groups, spec_kind=kind)
    return str(error.value)


@pytest.mark.parametrize("name", families.ALL)
def test_every_layer_of_every_row_is_claimed(name: str) -> None:
    model = families.ALL[name]
    rows = spec_of(model).rows
    claimed = {(row, unit) for row, groups in rows.items() for g in groups for _, unit in g.layers}
    assert claimed == {(row.name, unit) for row in model.table.rows for unit in range(len(row.units))}


@pytest.mark.parametrize(
    ("name", "groups", "asynchronous"),
    [
        ("llama", 1, False),
        ("deepseek", 1, False),
        ("gpt_oss", 2, True),
        ("granite", 4, True),
        ("qwen3_next", 4, True),
    ],
)
def test_how_a_table_is_loaded(name: str, groups: int, asynchronous: bool) -> None:
    spec = spec_of(families.ALL[name])
    assert (spec.group_count, spec.loads_asynchronously) == (groups, asynchronous)


def test_a_model_of_windows_only_loads_asynchronously() -> None:
    """A failed block would send vLLM back to where its window, which was never loaded, is gone."""
    layers = [families.attention(number) for number in range(4)]
    config = {**families.COMMON, "model_type": "mistral", "num_hidden_layers": 4, "sliding_window": 64}
    model = families.TinyModel(config, (families.group(layers, families.window()),))
    spec = engine_spec(model.table, model.groups, spec_kind=kind, engine_align_tokens=128)
    assert (spec.group_count, spec.loads_asynchronously) == (1, True)


def test_one_row_may_live_in_several_groups() -> None:
    (row,) = families.GRANITE.table.snapshot_rows
    groups = spec_of(families.GRANITE).rows[row.name]
    assert [(g.index, g.page_tokens, g.layers) for g in groups] == [
        (0, 128, (("model.layers.0.mixer", 0),)),
        (1, 128, (("model.layers.1.mixer", 1),)),
        (2, 128, (("model.layers.3.mixer", 2),)),
    ]


@pytest.mark.parametrize(("engine", "joint"), [(32, 128), (128, 128), (384, 384), (544, 2176)])
def test_hits_are_multiples_of_both_alignments(engine: int, joint: int) -> None:
    assert spec_of(families.DENSE, align=engine).align_tokens == joint


def test_an_alignment_that_no_prompt_reaches_is_refused_with_the_numbers() -> None:
    with pytest.raises(SpecError, match=r"134217344 tokens and UCM's of 64.*limit of 1048576"):
        spec_of(families.DENSE, align=1_048_573)


def test_layers_of_different_sizes_in_one_group_are_looked_at_one_by_one() -> None:
    layers = [families.attention(n) for n in range(4)]
    uniform = UniformTypeKVCacheSpecs(
        block_size=128, kv_cache_specs={name: families.full() for name in layers}
    )
    assert (
        map_groups(families.DENSE.table, [families.group(layers, uniform)], spec_kind=kind)["full"][
            0
        ].page_tokens
        == 128
    )
    odd = {name: families.full(num_kv_heads=2 + (name == layers[2])) for name in layers}
    uniform = UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs=odd)
    assert layers[2] in refusal([families.group(layers, uniform)])


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"num_kv_heads": 4}, "((4, 32), (4, 32)) in vLLM and ((2, 32), (2, 32)) in the row"),
        ({"head_size": 64}, "((2, 64), (2, 64)) in vLLM and ((2, 32), (2, 32)) in the row"),
        ({"head_size_v": 16}, "((2, 32), (2, 16)) in vLLM and ((2, 32), (2, 32)) in the row"),
        ({"dtype": torch.float32}, "('float32', 'float32') in vLLM and ('bfloat16', 'bfloat16') in the row"),
        ({"dtype": torch.uint8}, "KV cache dtype uint8 is not supported"),
        ({"sliding_window": 64}, "remove --disable-hybrid-kv-cache-manager"),
        ({"tokens_per_state": 4}, "4 tokens per stored entry"),
    ],
)
def test_an_attention_layer_that_differs_is_refused(changes: dict[str, Any], numbers: str) -> None:
    message = refusal([families.group([families.attention(0)], families.full(**changes))])
    assert families.attention(0) in message
    assert numbers in message


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        (families.window(sliding_window=128), "sliding window is 128 in vLLM and 64 in the row"),
        (families.window(extra_retained_tokens=3), "tokens kept beyond the window is 3 in vLLM and 0"),
        (families.full(), "sliding window is None in vLLM and 64 in the row"),
    ],
)
def test_a_window_that_differs_is_refused(spec: Any, numbers: str) -> None:
    message = refusal([families.group(["model.layers.0.attn.attn"], spec)], families.GPT_OSS)
    assert numbers in message


@pytest.mark.parametrize("shapes", [((320, 3), (8, 32, 32)), ((3, 320), (8, 32, 16))])
def test_a_state_of_another_shape_is_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    message = refusal(
        [families.group(["model.layers.0.mixer"], families.state(shapes, 128))], families.GRANITE
    )
    assert str(shapes) in message
    assert str(families.MAMBA_SHAPES) in message


def test_states_that_are_not_kept_at_boundaries_are_refused() -> None:
    spec = families.state(families.MAMBA_SHAPES, 128, mamba_cache_mode="none")
    with pytest.raises(ConfigError, match="enable_prefix_caching=True"):
        map_groups(families.GRANITE.table, [families.group(["model.layers.0.mixer"], spec)], spec_kind=kind)


def test_a_missing_layer_is_named() -> None:
    groups = [families.group([families.attention(n) for n in (0, 1, 3)], families.full())]
    assert refusal(groups) == "row 'full' has 4 layers, vLLM's groups hold 3 of them: layer 2 is missing"


def test_a_layer_that_no_row_has_is_named() -> None:
    assert "no row with layer 9" in refusal([families.group([families.attention(9)], families.full())])


def test_a_layer_claimed_twice_is_refused() -> None:
    twice = families.group([families.attention(0)], families.full())
    assert "the same unit" in refusal([twice, twice])


def test_draft_layers_are_refused() -> None:
    draft = families.group([families.attention(0)], families.full(), is_eagle_group=True)
    assert "draft layers" in refusal([draft])


@pytest.mark.parametrize("layer", ["model.embed", "draft_model.layers.0.attn", "encoder.3.layers.1.attn"])
def test_a_layer_without_a_certain_number_is_refused(layer: str) -> None:
    with pytest.raises(SpecError, match=layer):
        layer_number(layer)
