"""What the pipeline costs, in simulated time: EXAMPLES 9, number for number (times in ms)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from simulation import LoadDouble, MediumDouble, SaveDouble, World, run_step

from ucm_core.flow.pipeline import LayerPipeline, StepLoad, StepSave
from ucm_core.flow.trace import Trace
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_core.spec.units import UnitMap

LOAD, COMPUTE, SAVE = 10.0, 10.0, 2.0


def dense(layers: int) -> UnitMap:
    """One row with a unit in every layer."""
    row = SpecRow("full", RowKind.CHAIN, 64, tuple(range(layers)), (Part("x", (4,), "int8"),))
    return UnitMap(SpecTable((row,), 64))


class Stage:
    """Three layers on a serial medium; saves have one of their own."""

    def __init__(
        self, layers: int = 3, *, depth: int | None = None, lanes: int = 1, trace: Trace | None = None
    ) -> None:
        self.world = World()
        self.layers = range(layers)
        self.reader, self.writer = MediumDouble(self.world, lanes), MediumDouble(self.world)
        self.pipeline = LayerPipeline(
            dense(layers), depth=depth, wait_s=1e6, clock=self.world.clock, trace=trace
        )

    def load(self, request: str = "r", **slow: float) -> StepLoad:
        """``unit1=50``: that unit takes so long."""
        times = [slow.get(f"unit{k}", LOAD) for k in self.layers]
        return StepLoad(request, {"full": LoadDouble(self.reader, self.world, times=times)})

    def save(self, request: str = "r") -> tuple[StepSave, SaveDouble]:
        handle = SaveDouble(self.writer, self.world, memory=[7 for _ in self.layers], time=SAVE)
        return StepSave(request, {"full": handle}), handle

    def end(self, handle: SaveDouble, *, begin: float) -> float:
        """The time from ``begin`` until everything is saved."""
        assert handle.ticket.wait()
        assert handle.ended is not None
        return handle.ended - begin


def test_the_first_load_hides_behind_the_queue_and_the_others_behind_the_layers() -> None:
    stage = Stage()
    load, (save, handle) = stage.load(), stage.save()
    stage.pipeline.prefetch(load)
    stage.world.let_pass(LOAD)  # the request is queued
    begin = stage.world.now
    report = run_step(stage.world, stage.pipeline, layers=stage.layers, loads=[load], saves=[save])
    assert report.exposed_s == 0
    assert stage.end(handle, begin=begin) == 32


def test_without_a_prefetch_only_the_first_load_shows() -> None:
    stage = Stage()
    load, (save, handle) = stage.load(), stage.save()
    report = run_step(stage.world, stage.pipeline, layers=stage.layers, loads=[load], saves=[save])
    assert report.exposed_s == LOAD
    assert stage.end(handle, begin=0) == 42


def test_submit_after_wait_one_layer_ahead_takes_42() -> None:
    stage = Stage()
    load, (_, handle) = stage.load(), stage.save()
    unit_load = load.rows["full"]
    unit_load.submit(slice(0, 1))
    for layer in stage.layers:
        unit_load.ticket.wait(shard=layer)
        unit_load.submit(slice(layer + 1, layer + 2))
        stage.world.let_pass(COMPUTE)
        handle.submit(slice(layer, layer + 1))
    handle.seal()
    assert stage.end(handle, begin=0) == 42


def test_all_loads_first_take_62() -> None:
    stage = Stage()
    load, (_, handle) = stage.load(), stage.save()
    load.rows["full"].submit(slice(None))
    assert load.rows["full"].ticket.wait()
    for layer in stage.layers:
        stage.world.let_pass(COMPUTE)
        handle.submit(slice(layer, layer + 1))
    handle.seal()
    assert stage.end(handle, begin=0) == 62


def test_one_slow_request_does_not_delay_what_another_is_ready_for() -> None:
    stage = Stage(lanes=8)
    stage.pipeline.begin_step([stage.load("slow", unit1=50), stage.load("quick")], [])
    stage.world.let_pass(LOAD)
    assert stage.pipeline.ready(1, "quick")
    assert not stage.pipeline.ready(1, "slow")
    stage.pipeline.before_layer(1, requests={"quick"})
    assert stage.world.now == LOAD
    stage.pipeline.before_layer(1, requests={"slow"})
    assert stage.world.now == 50


@pytest.mark.parametrize("depth", range(1, 11))
def test_a_medium_of_long_latency_needs_a_deeper_look_ahead(depth: int) -> None:
    # A load takes 100, a layer 10. Loads come in groups of d + 1, each submitted while the group before
    # computes: but for the first, a group shows the latency less d layers.
    groups = math.ceil(10 / (depth + 1))
    stage = Stage(10, depth=depth, lanes=100)
    load = stage.load(**{f"unit{k}": 100 for k in range(10)})
    report = run_step(stage.world, stage.pipeline, layers=stage.layers, loads=[load])
    assert report.failed == {}
    assert report.exposed_s == pytest.approx(100 + (groups - 1) * (100 - depth * COMPUTE))


def test_the_depth_follows_what_loads_and_layers_take() -> None:
    # A load takes 50, a layer 10, so five layers ahead; until that is known, two.
    stage = Stage(30, lanes=100)
    reports = []
    for _ in range(2):
        load = stage.load(**{f"unit{k}": 50 for k in range(30)})
        stage.pipeline.prefetch(load)
        stage.world.let_pass(50)
        reports.append(run_step(stage.world, stage.pipeline, layers=stage.layers, loads=[load]))
    assert [report.depth for report in reports] == [5, 5]  # as measured by the end of each
    assert reports[0].exposed_s > 0
    assert reports[1].exposed_s == 0


class TestTrace:
    """The example of above, traced: the first load hides behind the queue."""

    def test_the_intervals_are_those_that_happened(self, tmp_path: Path) -> None:
        stage = Stage(trace=switched_on(tmp_path))
        load, (save, handle) = stage.load(), stage.save()
        stage.pipeline.prefetch(load)
        stage.world.let_pass(LOAD)
        run_step(stage.world, stage.pipeline, layers=stage.layers, loads=[load], saves=[save])
        assert stage.pipeline.close()
        assert read(tmp_path) == {
            # The first two are prefetched before the switch is looked at; then: submitted when layer 0 was
            # waited for, landed 20 after that of layer 0, because the medium brings one at a time.
            "layer 2 load": [(10, 30)],
            **{f"layer {k} wait": [(10 + 10 * k, 10 + 10 * k)] for k in range(3)},
            **{f"layer {k} compute": [(10 + 10 * k, 20 + 10 * k)] for k in range(3)},
            **{f"layer {k} save": [(20 + 10 * k, 42)] for k in range(3)},
        }
        assert handle.ended == 42

    def test_a_wait_that_shows_has_its_length(self, tmp_path: Path) -> None:
        stage = Stage(trace=switched_on(tmp_path))
        load = stage.load(unit1=35)
        run_step(stage.world, stage.pipeline, layers=stage.layers, loads=[load])
        stage.pipeline.close()
        tracks = read(tmp_path)
        assert [tracks[f"layer {k} wait"] for k in range(3)] == [[(0, 10)], [(20, 45)], [(55, 55)]]
        assert [tracks[f"layer {k} load"] for k in range(3)] == [[(0, 10)], [(0, 45)], [(0, 55)]]

    def test_a_step_without_loads_and_saves_still_shows_its_layers(self, tmp_path: Path) -> None:
        stage = Stage(trace=switched_on(tmp_path))
        run_step(stage.world, stage.pipeline, layers=stage.layers)
        stage.pipeline.close()
        assert read(tmp_path) == {f"layer {k} compute": [(10 * k, 10 * k + 10)] for k in range(3)}


def switched_on(directory: Path) -> Trace:
    (directory / "on").touch()
    return Trace(directory)


def read(directory: Path) -> dict[str, list[tuple[float, float]]]:
    """Per track its intervals (begin, end), in ms."""
    (path,) = directory.glob("ucm-*.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks: dict[str, list[tuple[float, float]]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        begin = event["ts"] / 1e6
        tracks.setdefault(names[event["tid"]], []).append((begin, begin + event["dur"] / 1e6))
    return tracks
