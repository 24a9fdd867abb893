"""Traces: switched by a file, bounded, JSON that tools read, tracks and intervals that happened."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.flow.trace import Interval, IntervalKind, Trace, chrome_events
from ucm_core.ops import metrics

times = st.integers(0, 20)
intervals = st.lists(
    st.builds(
        lambda kind, layer, begin, length, request: Interval(kind, layer, begin, begin + length, request),
        st.sampled_from(IntervalKind), st.integers(0, 2), times, st.integers(1, 9), st.just("r"),
    )
)  # fmt: skip


class ClockDouble:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def switched_on(directory: Path, clock: ClockDouble, **settings: int) -> Trace:
    (directory / "on").touch()
    trace = Trace(directory, clock=clock, **settings)
    assert trace.look()
    return trace


def written(directory: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("ucm-*.json"))]


def wait(layer: int) -> Interval:
    return Interval(IntervalKind.WAIT, layer, 1.0, 2.5)


@given(intervals)
def test_every_interval_is_one_event_at_its_time(recorded: list[Interval]) -> None:
    events = [event for event in chrome_events(recorded, process=7) if event["ph"] == "X"]
    told = Counter((event["cat"], event["ts"] / 1e6, event["dur"] / 1e6) for event in events)
    assert told == Counter(
        (each.kind.name.lower(), each.begin_s, each.end_s - each.begin_s) for each in recorded
    )
    assert all(event["pid"] == 7 for event in events)


@given(intervals)
def test_nothing_overlaps_within_a_track(recorded: list[Interval]) -> None:
    ends: dict[int, float] = {}
    for event in chrome_events(recorded, process=7):
        if event["ph"] == "X":
            assert event["ts"] >= ends.get(event["tid"], 0)
            ends[event["tid"]] = event["ts"] + event["dur"]


@given(intervals)
def test_a_layer_has_as_many_tracks_of_a_kind_as_overlap(recorded: list[Interval]) -> None:
    names = {
        event["args"]["name"]
        for event in chrome_events(recorded, process=7)
        if event["name"] == "thread_name"
    }
    expected = set()
    for kind in IntervalKind:
        for layer in range(3):
            mine = [each for each in recorded if (each.kind, each.layer) == (kind, layer)]
            most = max(
                (sum(each.begin_s <= now < each.end_s for each in mine) for now in range(30)), default=0
            )
            name = f"layer {layer} {kind.name.lower()}"
            expected |= {name if lane == 0 else f"{name} ({lane + 1})" for lane in range(most)}
    assert names == expected


def test_tracks_are_sorted_by_layer_then_kind() -> None:
    recorded = [Interval(kind, layer, 0, 1) for layer in (1, 0) for kind in reversed(IntervalKind)]
    events = chrome_events(recorded, process=7)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    kinds = ("load", "wait", "compute", "save")
    assert [names[track] for track in sorted(names)] == [
        f"layer {layer} {kind}" for layer in (0, 1) for kind in kinds
    ]


def test_what_a_file_switches_on_is_written_when_it_goes(tmp_path: Path) -> None:
    clock = ClockDouble()
    trace = switched_on(tmp_path, clock)
    trace.add(wait(3))
    (tmp_path / "on").unlink()
    clock.now_s += 1
    assert not trace.look()
    trace.add(wait(4))
    (content,) = written(tmp_path)
    assert [event["name"] for event in content["traceEvents"] if event["ph"] == "X"] == ["wait"]
    assert content["otherData"] == {"intervals": 1, "forgotten": 0}
    assert [path.name for path in tmp_path.iterdir()] == [f"ucm-{os.getpid()}-0.json"]


def test_each_recording_has_a_file_of_its_own(tmp_path: Path) -> None:
    for _ in range(3):
        trace = switched_on(tmp_path, ClockDouble())
        trace.add(wait(0))
        trace.close()
        trace.close()
    assert len(written(tmp_path)) == 3


def test_the_switch_is_looked_at_once_a_second(tmp_path: Path) -> None:
    clock = ClockDouble()
    trace = Trace(tmp_path, clock=clock)
    assert not trace.look()
    (tmp_path / "on").touch()
    clock.now_s += 0.9
    assert not trace.look()
    clock.now_s += 0.2
    assert trace.look()


def test_the_last_intervals_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    trace = switched_on(tmp_path, ClockDouble(), most=2)
    for layer in range(5):
        trace.add(wait(layer))
    trace.close()
    (content,) = written(tmp_path)
    names = [event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["layer 3 wait", "layer 4 wait"]
    assert content["otherData"] == {"intervals": 2, "forgotten": 3}


def test_without_a_directory_it_is_never_on() -> None:
    trace = Trace(None)
    assert not trace.look()
    trace.close()


def test_a_directory_that_is_not_there_is_off(tmp_path: Path) -> None:
    assert not Trace(tmp_path / "missing").look()


def test_what_cannot_be_written_is_counted_and_nothing_else(tmp_path: Path) -> None:
    before = metrics.ERRORS.labels(where="trace")._value.get()
    trace = switched_on(tmp_path, ClockDouble())
    (tmp_path / "on").unlink()
    tmp_path.rmdir()
    trace.close()
    assert metrics.ERRORS.labels(where="trace")._value.get() == before + 1


def test_what_is_written_in_part_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "replace", full)
    before = metrics.ERRORS.labels(where="trace")._value.get()
    switched_on(tmp_path, ClockDouble()).close()
    assert metrics.ERRORS.labels(where="trace")._value.get() == before + 1
    assert [path.name for path in tmp_path.iterdir()] == ["on"]


@pytest.mark.parametrize("end", ["json", "part"])
def test_nothing_is_written_where_a_link_leads(tmp_path: Path, end: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / f"ucm-{os.getpid()}-0.{end}").symlink_to(elsewhere)
    switched_on(tmp_path, ClockDouble()).close()
    assert not elsewhere.exists()
    assert (tmp_path / f"ucm-{os.getpid()}-1.json").is_file()


@pytest.mark.parametrize("name", ["\0", "x" * 5000])
def test_a_directory_that_cannot_be_is_off(tmp_path: Path, name: str) -> None:
    assert not Trace(tmp_path / name).look()
