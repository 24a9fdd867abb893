"""Whoever caches is told of every change of weights, and whether SGLang's tree still holds older ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ucm_core.engine_cache import EngineCache
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.model import Resolved, read_model
from ucm_sglang.weight_updates import WeightUpdates


@pytest.fixture
def updates() -> WeightUpdates:
    return WeightUpdates()


@pytest.fixture
def told(updates: WeightUpdates) -> list[bool]:
    heard: list[bool] = []
    updates.subscribe(heard.append)
    return heard


def test_nothing_has_happened_at_first(updates: WeightUpdates, told: list[bool]) -> None:
    assert (updates.overtaken, updates.stale, told) == (False, False, [])


def test_an_update_without_a_flush_leaves_the_tree_stale(updates: WeightUpdates, told: list[bool]) -> None:
    updates.changed(forwards=7)
    assert (updates.overtaken, updates.stale, told) == (True, True, [False])


def test_an_update_with_a_flush_is_over_at_once(updates: WeightUpdates, told: list[bool]) -> None:
    updates.flushed(forwards=7)
    updates.changed(forwards=7)
    assert (updates.overtaken, updates.stale, told) == (True, False, [True])


def test_a_flush_before_the_last_step_is_none(updates: WeightUpdates, told: list[bool]) -> None:
    updates.flushed(forwards=7)
    updates.changed(forwards=8)
    assert told == [False]


def test_unknown_steps_are_steps(updates: WeightUpdates, told: list[bool]) -> None:
    updates.flushed(forwards=None)
    updates.changed(forwards=None)
    assert told == [False]


def test_a_later_flush_ends_it(updates: WeightUpdates, told: list[bool]) -> None:
    updates.changed(forwards=7)
    updates.flushed(forwards=9)
    updates.flushed(forwards=9)
    assert (updates.overtaken, updates.stale, told) == (True, False, [False, True])


def test_within_a_session_no_flush_ends_it(updates: WeightUpdates, told: list[bool]) -> None:
    updates.session_begins()
    updates.flushed(forwards=7)
    updates.changed(forwards=7)
    assert (updates.stale, told) == (True, [False])
    updates.session_ends(forwards=7)
    assert (updates.stale, told) == (False, [False, True])


def test_a_session_after_which_something_was_computed_needs_a_flush(
    updates: WeightUpdates, told: list[bool]
) -> None:
    updates.session_begins()
    updates.flushed(forwards=7)
    updates.session_ends(forwards=8)
    assert (updates.stale, told) == (True, [False])
    updates.flushed(forwards=8)
    assert (updates.stale, told) == (False, [False, True])


def test_a_flush_of_current_weights_is_nobodys_business(updates: WeightUpdates, told: list[bool]) -> None:
    updates.flushed(forwards=3)
    assert (updates.overtaken, told) == (False, [])


def test_every_update_of_a_current_tree_is_told(updates: WeightUpdates, told: list[bool]) -> None:
    for _ in range(3):
        updates.flushed(forwards=1)
        updates.changed(forwards=1)
    assert told == [True, True, True]


def test_who_unsubscribed_is_told_no_more(updates: WeightUpdates, told: list[bool]) -> None:
    second: list[bool] = []
    end = updates.subscribe(second.append)
    end()
    end()
    updates.changed(forwards=None)
    assert (told, second) == ([False], [])


def test_one_callback_may_subscribe_twice_and_end_once(updates: WeightUpdates) -> None:
    heard: list[bool] = []
    end = updates.subscribe(heard.append)
    updates.subscribe(heard.append)
    end()
    updates.changed(forwards=None)
    assert heard == [False]


def test_one_that_fails_keeps_it_from_nobody(caplog: pytest.LogCaptureFixture) -> None:
    updates, heard = WeightUpdates(), list[bool]()

    def fail(current: bool) -> None:
        raise RuntimeError("the disk is gone")

    updates.subscribe(fail)
    updates.subscribe(heard.append)
    caplog.set_level(logging.WARNING)
    updates.changed(forwards=None)
    assert heard == [False]
    assert "the disk is gone" in caplog.text


def test_a_cache_that_is_told_goes_on_where_nobody_else_finds_anything(
    updates: WeightUpdates, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path, Resolved(compute_dtype="float32", kv_dtype="float32"))
    settings = CacheConfig(root=tmp_path / "root", ring_bytes=0)
    cache = EngineCache(model, settings, digest=lambda _: "5a" * 32)
    try:
        updates.subscribe(lambda _: cache.weights_changed())
        before = cache.identity
        updates.changed(forwards=None)
        after = cache.identity
        assert (before.private_token, after.generation) == ("", before.generation + 1)
        assert after.private_token
        assert after.namespace != before.namespace
    finally:
        cache.close()
