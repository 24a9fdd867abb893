"""UCM's plugin in a real SGLang: its registry puts the hooks where weights change, and they fire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import import_doubles
import pytest

from ucm_sglang import weight_updates

pytest.importorskip("sglang")
import_doubles.install()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """What a subscriber hears while SGLang's classes are hooked."""
    from real_engine import hooked

    monkeypatch.setattr(weight_updates, "updates", weight_updates.WeightUpdates())
    heard: list[bool] = []
    weight_updates.subscribe(heard.append)
    with hooked():
        yield heard


def scheduler(**answers: bool) -> Any:
    from real_engine import SchedulerDouble

    return SchedulerDouble(**answers)


def test_the_hooks_are_installed_only_while_they_are(told: list[bool]) -> None:
    assert weight_updates.installed()
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert len(HookRegistry._patched) == len(weight_updates.CHANGES) + 1


def test_without_the_plugin_nothing_is_installed() -> None:
    assert not weight_updates.installed()


def test_one_hook_that_is_not_applied_is_noticed(told: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "flush_cache", Scheduler.flush_cache.__wrapped__)
    assert not weight_updates.installed()


def test_an_update_that_flushes_is_told_once_as_over(told: list[bool]) -> None:
    assert scheduler().update(flush_cache=True)
    assert (told, weight_updates.stale(), weight_updates.overtaken()) == ([True], False, True)


def test_an_update_that_does_not_flush_is_told_and_a_flush_ends_it(told: list[bool]) -> None:
    engine = scheduler()
    assert engine.update(flush_cache=False)
    assert (told, weight_updates.stale()) == ([False], True)
    assert engine.flush()
    assert (told, weight_updates.stale()) == ([False, True], False)


def test_an_update_whose_flush_is_refused_leaves_the_tree_stale(told: list[bool]) -> None:
    engine = scheduler(idle=False)
    assert not engine.update(flush_cache=True)
    assert (told, weight_updates.stale()) == ([False], True)
    assert not engine.flush()
    assert told == [False]


def test_an_update_that_fails_may_have_changed_something(told: list[bool]) -> None:
    assert not scheduler(loads=False).update(flush_cache=True)
    assert (told, weight_updates.overtaken()) == ([False], True)


def test_an_update_that_raises_is_told_and_raises(told: list[bool]) -> None:
    engine = scheduler()
    engine.updater.tp_worker = None
    with pytest.raises(AttributeError):
        engine.update(flush_cache=True)
    assert told == [False]


def test_a_flush_alone_changes_nothing(told: list[bool]) -> None:
    assert scheduler().flush()
    assert (told, weight_updates.overtaken()) == ([], False)


@pytest.mark.parametrize(("tags", "expected"), [(["kv_cache"], []), (["weights"], [False]), (None, [False])])
def test_memory_that_comes_back_counts_if_it_held_weights(
    told: list[bool], tags: list[str] | None, expected: list[bool]
) -> None:
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    engine = scheduler()
    engine.updater.offload_tags = set()
    with pytest.raises((KeyError, AttributeError)):  # nothing was released before
        engine.updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
    assert told == expected


def test_an_open_session_stays_stale_until_it_ends_and_the_tree_is_flushed(told: list[bool]) -> None:
    engine = scheduler()
    assert weight_updates.around_begin(lambda updater: "begun", engine.updater) == "begun"
    assert engine.flush()
    assert (told, weight_updates.stale()) == ([False], True)
    assert weight_updates.around_end(lambda updater: "ended", engine.updater) == "ended"
    assert (told, weight_updates.stale()) == ([False, True], False)
