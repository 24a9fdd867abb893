"""This process's counters on their way to the process that vLLM's ``/metrics`` asks.

Counters live in the process that counts: vLLM's engine core and its workers. What they gained goes up with
vLLM's own statistics after a step, and is added to the same counters of the process that serves ``/metrics``,
so they have one name everywhere. Where prometheus_client adds the processes up by itself (a directory in
``PROMETHEUS_MULTIPROC_DIR``), and in the process that counted, nothing is added.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Counter, Histogram

from ucm_core.ops import border, metrics

INTERVAL_S = 0.1
"""Shortest time between two readings: reading all counters takes some 100 us."""

Gains = dict[str, dict[str, float]]
"""Process -> sample (JSON of its name and labels) -> how much it grew."""

_TOKEN = uuid.uuid4().hex


def process_name() -> str:
    """Names this process among all that may report to one another."""
    return f"{os.getpid()}-{_TOKEN}"


class CounterFeed:
    """What the counters of this process gained since somebody last asked. Thread-safe."""

    def __init__(
        self, *, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._lock = threading.Lock()
        self._taken: dict[str, float] = {}
        self._taken_s = -interval_s

    def take(self, *, is_last: bool = False) -> Gains:
        """The gains; empty where there are none, or within the interval unless nobody may ask for long."""
        with self._lock:
            now = self._clock()
            if now - self._taken_s < self._interval_s and not is_last:
                return {}
            taken, self._taken, self._taken_s = self._taken, _samples(), now
        gains = {key: _gain(taken.get(key, 0.0), value) for key, value in self._taken.items()}
        grown = {key: gain for key, gain in gains.items() if gain > 0}
        return {process_name(): grown} if grown else {}


feed = CounterFeed()
"""The one of this process: both halves may live in it, and what one takes the other does not."""


def together(left: Mapping[str, Mapping[str, float]], right: Mapping[str, Mapping[str, float]]) -> Gains:
    """The gains of both."""
    gains = {process: dict(grown) for process, grown in left.items()}
    for process, grown in right.items():
        mine = gains.setdefault(process, {})
        for key, gain in grown.items():
            mine[key] = mine.get(key, 0.0) + gain
    return gains


def totals(gains: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """By sample name, over all processes and labels; for people."""
    sums: dict[str, float] = {}
    for grown in gains.values():
        for key, gain in grown.items():
            name, labels = json.loads(key)
            if "le" not in labels:
                sums[name] = sums.get(name, 0.0) + gain
    return sums


def add(gains: Mapping[str, Mapping[str, float]]) -> None:
    """Add the gains of other processes to the counters of this one; what is no gain is left out."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    known = {_name(metric): metric for metric in _metrics()}
    for process, grown in gains.items():
        if process == process_name():
            continue
        for key, gain in grown.items():
            _add_sample(known, key, gain=gain)


@border.guarded("statistics", lambda: None)
def _add_sample(known: Mapping[str, Any], key: str, *, gain: float) -> None:
    name, counted_under = json.loads(key)
    if not gain > 0:
        raise ValueError(f"{name} grew by {gain}: counters only grow")
    if name in known:
        metric = known[name]
        (metric.labels(**counted_under) if counted_under else metric).inc(gain)
    elif name.endswith("_sum") and (histogram := known.get(name.removesuffix("_sum"))) is not None:
        histogram._sum.inc(gain)
    elif name.endswith("_bucket") and (histogram := known.get(name.removesuffix("_bucket"))) is not None:
        histogram._buckets[histogram._upper_bounds.index(float(counted_under["le"]))].inc(gain)


def _gain(before: float, now: float) -> float:
    """How much a counter grew; one that is smaller began again at zero."""
    return now - before if now >= before else now


def _samples() -> dict[str, float]:
    """Every sample that only grows; buckets each by itself, not the sum of those below."""
    samples: dict[str, float] = {}
    for metric in _metrics():
        below = 0.0
        for family in metric.collect():
            for sample in family.samples:
                if sample.name.endswith(("_created", "_count")):
                    continue
                value = sample.value
                if sample.name.endswith("_bucket"):
                    value, below = value - below, value
                samples[json.dumps([sample.name, sample.labels], sort_keys=True)] = value
    return samples


def _metrics() -> list[Any]:
    return [metric for metric in vars(metrics).values() if isinstance(metric, Counter | Histogram)]


def _name(metric: Any) -> str:
    return str(metric._name) + ("_total" if isinstance(metric, Counter) else "")
