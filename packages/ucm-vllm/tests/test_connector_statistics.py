"""What UCM counts on its way through vLLM's own statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from connectors import engine, pair, run_step
from engine_doubles import request, scheduler_output
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.v1.outputs import KVConnectorOutput

from ucm_vllm import process_counters
from ucm_vllm.connector import UCMConnector


def test_what_is_counted_reaches_vllm_s_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_counters, "feed", process_counters.CounterFeed(interval_s=0))
    scheduler, worker, _ = pair(tmp_path)
    worker.get_kv_connector_stats()
    first = request(300)
    scheduler.get_num_new_matched_tokens(first, 0)
    stats = run_step(
        scheduler, worker, scheduler_output([(first, 0, 300, ([1, 2, 3],))], {})
    ).kv_connector_stats
    assert stats is not None
    again = UCMConnector.build_kv_connector_stats(json.loads(json.dumps(stats.to_dict())))
    assert again.aggregate(UCMConnector.build_kv_connector_stats()).reduce()["ucm_units_saved_total"] == 4
    again.reset()
    assert again.is_empty()
    for half in (scheduler, worker):
        half.shutdown()


@pytest.fixture
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[UCMConnector, UCMConnector]]:
    """Both halves, which tell nothing within an hour unless nobody may ask for long."""
    monkeypatch.setattr(process_counters, "feed", process_counters.CounterFeed(interval_s=3600))
    scheduler, worker, _ = pair(tmp_path)
    worker.get_kv_connector_stats()
    yield scheduler, worker
    for half in (scheduler, worker):
        half.shutdown()


def computed(scheduler: UCMConnector, worker: UCMConnector) -> KVConnectorOutput:
    """The step of a request that is over with it."""
    first = request(300)
    scheduler.get_num_new_matched_tokens(first, 0)
    step = run_step(scheduler, worker, scheduler_output([(first, 0, 300, ([1, 2, 3],))], {}))
    assert scheduler.get_kv_connector_stats() is None
    scheduler.request_finished_all_groups(first, ([],))
    return step


def test_after_the_last_request_everything_counted_goes_up(
    patient: tuple[UCMConnector, UCMConnector],
) -> None:
    """Nothing runs then, so vLLM may not ask again before the next request."""
    scheduler, worker = patient
    computed(scheduler, worker)
    stats = scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.reduce()["ucm_units_saved_total"] == 4


def test_the_step_that_tells_of_the_finished_takes_up_what_a_worker_counted(
    patient: tuple[UCMConnector, UCMConnector],
) -> None:
    """A worker in a process of its own: the scheduler half's readings are not its."""
    scheduler, worker = patient
    assert computed(scheduler, worker).kv_connector_stats is None
    stats = run_step(scheduler, worker, scheduler_output([], {})).kv_connector_stats
    assert stats is not None
    assert stats.reduce()["ucm_units_saved_total"] == 4


def test_statistics_of_other_processes_are_added_to_the_counters_of_this_one(tmp_path: Path) -> None:
    types = {kind: kind for kind in (Gauge, Counter, Histogram)}
    shown = UCMConnector.build_prom_metrics(engine(tmp_path), types, ["engine"], {0: ["0"]})
    before = REGISTRY.get_sample_value("ucm_requests_total") or 0.0
    shown.observe({"another": {json.dumps(["ucm_requests_total", {}]): 7.0}}, engine_idx=0)
    assert REGISTRY.get_sample_value("ucm_requests_total") == before + 7
