"""What stands in SGLang's extra config: the cache's settings, SGLang's own keys, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ucm_core.errors import ConfigError
from ucm_sglang.settings import ENGINE_KEYS, Settings, read_linker_settings, read_settings


def settings(page_tokens: int = 64, **given: Any) -> Settings:
    return read_settings({"interface_v1": 1} | given, page_tokens=page_tokens)


def test_the_page_is_grain_and_block(tmp_path: Path) -> None:
    found = settings(16, root=str(tmp_path))
    assert (found.cache.grain_tokens, found.cache.block_tokens, found.cache.root) == (16, None, tmp_path)
    assert (found.model_path, found.compute_dtype, found.weights_are_static) == (None, None, False)


def test_sglangs_own_keys_are_left_out() -> None:
    assert settings(**dict.fromkeys(ENGINE_KEYS, 1)) == settings()


def test_ours_are_read() -> None:
    found = settings(model_path="/m", compute_dtype="bfloat16", weights_are_static=True, ring_bytes="1GiB")
    assert (found.model_path, found.compute_dtype, found.weights_are_static) == ("/m", "bfloat16", True)
    assert found.cache.ring_bytes == 1 << 30


@pytest.mark.parametrize("name", ["grain_tokens", "block_tokens"])
def test_a_grain_that_is_not_the_page_is_refused_with_both_numbers_and_the_flag(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = 64, .*page size is 16.*--page-size 64"):
        settings(16, **{name: 64})


def test_the_same_grain_may_be_named() -> None:
    assert settings(16, grain_tokens=16, block_tokens=16) == settings(16)


def test_blocks_of_several_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"block_tokens = 128, .*page size is 64"):
        settings(block_tokens=128)


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'ring_byte'; did you mean 'ring_bytes'"):
        settings(ring_byte=1)


@pytest.mark.parametrize("given", [None, {}, {"interface_v1": 0}, {"interface_v1": False}])
def test_the_slow_route_is_refused(given: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError, match='put "interface_v1": 1 into'):
        read_settings(given, page_tokens=64)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_path", 5), ("compute_dtype", ["bfloat16"]), ("weights_are_static", "yes")],
)
def test_values_of_another_kind_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"setting '{name}' = "):
        settings(**{name: value})


def test_what_is_given_is_not_changed() -> None:
    given = {"interface_v1": 1, "model_path": "/m", "prefetch_threshold": 16}
    read_settings(given, page_tokens=64)
    assert given == {"interface_v1": 1, "model_path": "/m", "prefetch_threshold": 16}


# -- of a linker


def test_a_linker_has_the_same_settings_and_a_budget() -> None:
    found = read_linker_settings({"weights_are_static": True, "ring_bytes": "1GiB"}, page_tokens=64)
    assert found == settings(weights_are_static=True, ring_bytes="1GiB")
    assert found.lookup_budget_s == 1.0
    assert read_linker_settings({"lookup_budget_s": 0}, page_tokens=64).lookup_budget_s == 0.0


@pytest.mark.parametrize("name", sorted(ENGINE_KEYS))
def test_keys_of_a_storage_backend_are_unknown_to_a_linker(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        read_linker_settings({name: 1}, page_tokens=64)


def test_an_unknown_field_of_a_linker_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'rout'; did you mean 'root'"):
        read_linker_settings({"rout": "/tmp"}, page_tokens=64)


@pytest.mark.parametrize("value", [-1, 61, "1", True, None])
def test_a_budget_that_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"'lookup_budget_s' = .*: give seconds from 0 to 60"):
        read_linker_settings({"lookup_budget_s": value}, page_tokens=64)


def test_a_linker_without_a_ring_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ring_bytes = 0, but SGLang aborts.*leave ring_bytes out"):
        read_linker_settings({"ring_bytes": 0}, page_tokens=64)


def test_a_linker_saves_layer_by_layer_where_it_is_asked_to() -> None:
    assert read_linker_settings({"layerwise_save": True}, page_tokens=64).layerwise_save
    assert not read_linker_settings({"layerwise_save": False}, page_tokens=64).layerwise_save
    assert not read_linker_settings({}, page_tokens=64).layerwise_save


def test_a_storage_backend_does_not() -> None:
    with pytest.raises(ConfigError, match="setting 'layerwise_save' is UCMLinker's"):
        settings(layerwise_save=True)


@pytest.mark.parametrize("value", [1, "yes"])
def test_what_is_no_yes_or_no_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"setting 'layerwise_save' = .*give a value of type bool"):
        read_linker_settings({"layerwise_save": value}, page_tokens=64)


def test_layers_do_not_wait_for_a_medium_that_is_asked_first() -> None:
    with pytest.raises(ConfigError, match="layerwise_save and sync are both set"):
        read_linker_settings({"layerwise_save": True, "sync": True}, page_tokens=64)
