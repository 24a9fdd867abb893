"""Counters of one process in another: what grew goes up once, and is added under the same name."""

from __future__ import annotations

import json

import pytest
from prometheus_client import REGISTRY, Counter, Histogram

from ucm_core.ops import metrics
from ucm_vllm import process_counters
from ucm_vllm.process_counters import CounterFeed, Gains, process_name


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def key(name: str, **labels: str) -> str:
    return json.dumps([name, labels], sort_keys=True)


def grown(gains: Gains) -> dict[str, float]:
    return gains.get(process_name(), {})


class Clock:
    """A double of the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_grew_is_told_once() -> None:
    feed = CounterFeed(interval_s=0)
    feed.take()
    metrics.REQUESTS.inc(3)
    metrics.ERRORS.labels(where="open").inc()
    gains = grown(feed.take())
    assert gains[key("ucm_requests_total")] == 3
    assert gains[key("ucm_errors_total", where="open")] == 1
    assert feed.take() == {}


def test_it_is_not_read_more_often_than_the_interval() -> None:
    clock = Clock()
    feed = CounterFeed(interval_s=1.0, clock=clock)
    feed.take()
    metrics.REQUESTS.inc()
    clock.now = 0.9
    assert feed.take() == {}
    clock.now = 1.0
    assert grown(feed.take())[key("ucm_requests_total")] == 1


def test_the_last_reading_does_not_wait_for_the_interval() -> None:
    feed = CounterFeed(interval_s=1.0, clock=Clock())
    feed.take()
    metrics.REQUESTS.inc()
    assert grown(feed.take(is_last=True))[key("ucm_requests_total")] == 1
    metrics.REQUESTS.inc()
    assert feed.take() == {}


def test_a_time_is_told_by_buckets_and_its_sum() -> None:
    feed = CounterFeed(interval_s=0)
    feed.take()
    metrics.LAYER_WAIT.observe(0.002)
    metrics.LAYER_WAIT.observe(0.2)
    gains = grown(feed.take())
    assert gains.pop(key("ucm_layer_wait_seconds_sum")) == pytest.approx(0.202)
    buckets = {k: gain for k, gain in gains.items() if "_bucket" in k}
    assert buckets == {
        key("ucm_layer_wait_seconds_bucket", le="0.003"): 1,
        key("ucm_layer_wait_seconds_bucket", le="0.3"): 1,
    }


def test_what_another_process_counted_is_added_here() -> None:
    samples = {
        key("ucm_requests_total"): 5.0,
        key("ucm_errors_total", where="elsewhere"): 2.0,
        key("ucm_layer_wait_seconds_bucket", le="0.3"): 1.0,
        key("ucm_layer_wait_seconds_bucket", le="+Inf"): 1.0,
        key("ucm_layer_wait_seconds_sum"): 99.2,
        key("ucm_counted_by_a_later_version_total"): 1.0,
    }
    before = value("ucm_requests_total"), value("ucm_layer_wait_seconds_count")
    slow = value("ucm_layer_wait_seconds_sum")
    process_counters.add({"another": samples})
    after = value("ucm_requests_total"), value("ucm_layer_wait_seconds_count")
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 2]
    assert value("ucm_errors_total", where="elsewhere") == 2
    assert value("ucm_layer_wait_seconds_sum") - slow == pytest.approx(99.2)


def test_what_this_process_counted_is_not_added_to_itself() -> None:
    before = value("ucm_requests_total")
    process_counters.add({process_name(): {key("ucm_requests_total"): 5.0}})
    assert value("ucm_requests_total") == before


def test_where_prometheus_adds_processes_up_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "somewhere")
    before = value("ucm_requests_total")
    process_counters.add({"another": {key("ucm_requests_total"): 5.0}})
    assert value("ucm_requests_total") == before


def test_a_counter_that_began_again_is_told_by_what_it_counts_now() -> None:
    feed = CounterFeed(interval_s=0)
    errors = metrics.ERRORS.labels(where="began again")
    errors.inc(5)
    feed.take()
    errors.reset()
    assert key("ucm_errors_total", where="began again") not in grown(feed.take())
    errors.inc(2)
    assert grown(feed.take())[key("ucm_errors_total", where="began again")] == 2


HOSTILE = [
    {key("ucm_requests_total"): -3.0},
    {key("ucm_requests_total"): float("nan")},
    {key("ucm_requests_total"): None},
    {key("ucm_requests_total", of="nobody"): 3.0},
    {key("ucm_errors_total"): 3.0},
    {key("ucm_layer_wait_seconds_bucket", le="77"): 3.0},
    {key("ucm_layer_wait_seconds_sum"): -1.0},
    {"no json": 3.0},
    {"[]": 3.0},
]


@pytest.mark.parametrize("gains", HOSTILE)
def test_what_is_no_gain_is_left_out_and_the_others_are_added(gains: dict[str, float]) -> None:
    """Whoever serves ``/metrics`` goes on, and no counter goes down."""
    names = ("ucm_requests_total", "ucm_layer_wait_seconds_sum", "ucm_layer_wait_seconds_count")
    before = {name: value(name) for name in names}
    seen = value("ucm_objects_saved_total", row="abused", tier="ring")
    good = {key("ucm_objects_saved_total", row="abused", tier="ring"): 2.0}
    process_counters.add({"another": gains | good})
    assert {name: value(name) for name in names} == before
    assert value("ucm_objects_saved_total", row="abused", tier="ring") == seen + 2


def test_gains_of_two_steps_are_one() -> None:
    left, right = {"a": {"x": 1.0, "y": 2.0}}, {"a": {"y": 3.0}, "b": {"x": 4.0}}
    assert process_counters.together(left, right) == {"a": {"x": 1, "y": 5}, "b": {"x": 4}}
    assert left == {"a": {"x": 1.0, "y": 2.0}}


def test_totals_are_for_people() -> None:
    gains = {
        "a": {key("ucm_errors_total", where="x"): 1.0, key("ucm_layer_wait_seconds_bucket", le="1.0"): 4.0},
        "b": {key("ucm_errors_total", where="y"): 2.0},
    }
    assert process_counters.totals(gains) == {"ucm_errors_total": 3.0}


def test_everything_that_is_counted_goes_up() -> None:
    kinds = {type(metric) for metric in process_counters._metrics()}
    assert kinds == {Counter, Histogram}
    ours = [metric for metric in vars(metrics).values() if type(metric).__module__.startswith("prometheus")]
    assert len(process_counters._metrics()) == len(ours)
