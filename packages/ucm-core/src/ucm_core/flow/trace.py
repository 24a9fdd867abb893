"""A trace of the layer pipeline, in the JSON that Chrome and Perfetto read; switched on and off by a file.

While the file ``on`` lies in the trace's directory, steps are recorded; when it goes away, or the trace is
closed, what was recorded is written beside it as ``ucm-PID-N.json``. One track per layer and kind.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger

__all__ = ["Interval", "IntervalKind", "Trace", "chrome_events"]

SWITCH = "on"
LOOK_EVERY_S = 1.0
"""How often the switch is looked at, at most."""
MOST_INTERVALS = 200_000
"""About 100 MB; of more, the last are kept."""

_log = quiet_logger(__name__)


class IntervalKind(IntEnum):
    """What went on."""

    LOAD = 0
    """From the submission of a layer's units to the landing of the last one."""
    WAIT = 1
    """A hook waited for loads."""
    COMPUTE = 2
    """From the end of the hook before a layer to the begin of the one after it."""
    SAVE = 3
    """From the handing over of a layer's units until every process here can read the objects."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One thing that took time."""

    kind: IntervalKind
    layer: int
    begin_s: float
    end_s: float
    request: Hashable = None
    """Whose it was; None = of the whole step."""


class Trace:
    """Records intervals while it is switched on; thread-safe.

    ``directory`` is where the switch lies and where traces are written; None = it is never on. What cannot be
    written is one log line and a count (``ucm_errors_total{where="trace"}``), nothing else.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        most: int = MOST_INTERVALS,
    ) -> None:
        self._directory, self._clock = directory, clock
        self._intervals: deque[Interval] = deque(maxlen=most)
        self._recorded = 0
        self._look_at_s = clock()
        self._on = False
        self._lock = threading.Lock()

    @property
    def on(self) -> bool:
        """Whether intervals are recorded."""
        return self._on

    def look(self) -> bool:
        """Look at the switch, at most once a second; returns `on`. Writes when it was switched off."""
        if self._directory is not None and self._clock() >= self._look_at_s:
            self._look_at_s = self._clock() + LOOK_EVERY_S
            was_on, self._on = self._on, _exists(self._directory / SWITCH)
            if was_on and not self._on:
                self._write(self._directory)
        return self._on

    def add(self, interval: Interval) -> None:
        """Record it, if the trace is on. When there are more than it holds, the oldest go."""
        if self._on:
            with self._lock:
                self._recorded += 1
                self._intervals.append(interval)

    def close(self) -> None:
        """Write what was recorded; the trace is off from then on. Idempotent."""
        was_on, self._on = self._on, False
        directory, self._directory = self._directory, None
        if was_on and directory is not None:
            self._write(directory)

    def _write(self, directory: Path) -> None:
        with self._lock:
            intervals, lost = list(self._intervals), self._recorded - len(self._intervals)
            self._intervals.clear()
            self._recorded = 0
        content = {
            "traceEvents": chrome_events(intervals, process=os.getpid()),
            "displayTimeUnit": "ms",
            "otherData": {"intervals": len(intervals), "forgotten": lost},
        }
        try:
            target = _write_new(directory, json.dumps(content))
        except OSError as error:
            metrics.ERRORS.labels(where="trace").inc()
            _log.warning("a trace of %d intervals could not be written: %s", len(intervals), error)
        else:
            _log.info("wrote a trace of %d intervals to %s", len(intervals), target)


def _write_new(directory: Path, text: str) -> Path:
    """Write a file of a name that is not taken, whole or not at all; its path."""
    target = next(_free_names(directory))
    unfinished = target.with_suffix(".part")
    with unfinished.open("x", encoding="utf-8") as file:  # never where a link leads
        try:
            file.write(text)
            file.flush()
            return unfinished.replace(target)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise


def chrome_events(intervals: Iterable[Interval], *, process: int) -> list[dict[str, object]]:
    """Return the intervals as complete events ("X", times in microseconds), and the names of their tracks.

    A track is a layer and a kind; what overlaps within it (loads of several requests) gets one beside it.
    """
    tracks: dict[tuple[int, IntervalKind, int], list[Interval]] = {}
    for interval, lane in _lanes(sorted(intervals, key=lambda each: each.begin_s)):
        tracks.setdefault((interval.layer, interval.kind, lane), []).append(interval)
    events: list[dict[str, object]] = []
    for track, (layer, kind, lane) in enumerate(sorted(tracks), start=1):
        name = f"layer {layer} {kind.name.lower()}" + (f" ({lane + 1})" if lane else "")
        about: dict[str, object] = {"ph": "M", "pid": process, "tid": track}
        events.append({**about, "name": "thread_name", "args": {"name": name}})
        events.append({**about, "name": "thread_sort_index", "args": {"sort_index": track}})
        events += [_event(each, process, track) for each in tracks[layer, kind, lane]]
    return events


def _event(interval: Interval, process: int, track: int) -> dict[str, object]:
    name = interval.kind.name.lower()
    event: dict[str, object] = {
        "ph": "X",
        "name": name if interval.request is None else f"{name} {interval.request}",
        "cat": name,
        "pid": process,
        "tid": track,
        "ts": interval.begin_s * 1e6,
        "dur": (interval.end_s - interval.begin_s) * 1e6,
    }
    return event


def _lanes(intervals: Iterable[Interval]) -> Iterator[tuple[Interval, int]]:
    """Each interval, in order of begin, with the first lane of its layer and kind that is free by then."""
    busy_until: dict[tuple[int, IntervalKind], list[float]] = {}
    for interval in intervals:
        ends = busy_until.setdefault((interval.layer, interval.kind), [])
        lane = next((lane for lane, end in enumerate(ends) if end <= interval.begin_s), len(ends))
        ends[lane : lane + 1] = [interval.end_s]
        yield interval, lane


def _free_names(directory: Path) -> Iterator[Path]:
    paths = (directory / f"ucm-{os.getpid()}-{number}.json" for number in itertools.count())
    return (path for path in paths if not any(map(os.path.lexists, (path, path.with_suffix(".part")))))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
