"""Hooks that vLLM calls twice or not at all, and a device that does not say when a layer has computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_doubles import request
from halves import WAIT_S, Halves
from test_layerwise import LAYERS, TABLES, plan_load, written

from ucm_core.coordinator.attempts import Attempt
from ucm_core.flow.pipeline import LayerPipeline
from ucm_core.store.block import BlockStore


def plan_asynchronous_load(engine: Halves) -> Any:
    asked = request(300, "again")
    assert engine.scheduler.matched_tokens(asked, 0) == (256, True)
    engine.scheduler.allocated(asked, TABLES, external_tokens=256)
    return engine.plan()


def plan_save(engine: Halves) -> Any:
    asked = request(300, "new")
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, TABLES, external_tokens=0)
    return engine.plan((asked, 0, 300, TABLES))


def no_event() -> None:
    raise RuntimeError("the device does not answer")


def run_without_events(engine: Halves, plan: Any, layers: list[str]) -> set[int]:
    """As vLLM's hooks, which let nothing out."""
    engine.worker._record = no_event
    engine.worker.before_step(plan)
    engine.worker.start_loads(plan)
    for name in layers:
        engine.worker.before_layer(plan, name)
        with pytest.raises(RuntimeError):
            engine.worker.after_layer(plan, name)
    engine.worker.end_step(plan)
    engine.worker.collect(plan)
    broken = engine.worker.broken_pages(plan)
    engine.scheduler.take_output(engine.worker.report(), broken_pages=broken)
    return broken


# -- asynchronous loads: each is begun once and told once


def test_loads_that_are_started_twice_are_begun_once(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would write on after the first was reported, into blocks that others may have by then."""
    _, reader = written(engines, load_asynchronously=True)
    begun: list[Any] = []
    real = BlockStore.load
    monkeypatch.setattr(BlockStore, "load", lambda *a, **k: begun.append(a) or real(*a, **k))
    plan = plan_asynchronous_load(reader)
    for _ in range(3):
        reader.worker.start_loads(plan)
    assert len(begun) == 1


def test_loads_that_are_not_started_are_begun_when_results_are_asked_for(engines: Any) -> None:
    """Else vLLM would wait for them for ever."""
    _, reader = written(engines, load_asynchronously=True)
    plan = plan_asynchronous_load(reader)
    reader.worker.end_step(plan)
    received = reader.worker.collect(plan)[0]
    assert received == {"again"} or reader.receive("again").failed == set()


# -- promises


def test_a_promise_is_kept_once_however_often_results_are_asked_for(engines: Any) -> None:
    """It frees what it is told of, and ends with an assertion when it hears of it again."""
    engine = engines()
    plan = replace(engine.plan(), promised=(Attempt("gone", 1),))
    assert [engine.worker.collect(plan)[2] for _ in range(3)] == [{"gone"}, set(), set()]


# -- compute events


def test_a_hook_that_did_not_come_fails_the_load_whatever_else_fails(engines: Any) -> None:
    _, reader = written(engines)
    plan = plan_load(reader, request(300, "again"))
    assert run_without_events(reader, plan, LAYERS[:3]) == {7, 8}


def test_what_may_not_have_been_computed_is_not_saved_and_its_blocks_come_back(engines: Any) -> None:
    engine = engines()
    run_without_events(engine, plan_save(engine), LAYERS)
    assert engine.worker.open_saves == 0
    assert not engine.scheduler.finished("new")
    assert engine.scheduler.matched_tokens(request(300, "again"), 0) == (0, False)


def test_it_is_given_up_before_the_pipeline_could_publish_it(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the engine's thread is after that, and quick the others are."""
    engine, end_step = engines(), LayerPipeline.end_step

    def end_and_drain(pipeline: LayerPipeline, **more: Any) -> Any:
        report = end_step(pipeline, **more)
        assert pipeline.drain(WAIT_S)
        return report

    monkeypatch.setattr(LayerPipeline, "end_step", end_and_drain)
    run_without_events(engine, plan_save(engine), LAYERS)
    assert engine.scheduler.matched_tokens(request(300, "again"), 0) == (0, False)
