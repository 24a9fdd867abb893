"""The rules of the pipeline, one by one, on doubles in simulated time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulation import EventDouble, LoadDouble, MediumDouble, SaveDouble, World, run_step

from ucm_core.errors import ClosedError
from ucm_core.flow.pipeline import LayerPipeline, StepLoad, StepSave
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.flow.trace import Trace
from ucm_core.ops import metrics
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_core.spec.units import UnitMap

PARTS = (Part("x", (4,), "int8"),)


def unit_map(shared: tuple[int, ...] = (), **rows: tuple[int, ...]) -> UnitMap:
    """Rows by name with their layers; those of ``shared`` share a tensor in the first row."""
    table = SpecTable(
        tuple(SpecRow(name, RowKind.CHAIN, 64, layers, PARTS) for name, layers in rows.items()), 64
    )
    return UnitMap(table, shared=[(next(iter(rows)), shared)] if shared else ())


class Bench:
    """A pipeline over four layers of one row, on media of eight lanes."""

    def __init__(
        self, units: UnitMap | None = None, *, layers: int = 4, wait: float = 1000, **settings: object
    ):
        self.world = World()
        self.reader, self.writer = MediumDouble(self.world, 8), MediumDouble(self.world, 8)
        self.layers = range(layers)
        self.memory = [100 + k for k in self.layers]
        self.pipeline = LayerPipeline(
            units or unit_map(full=tuple(self.layers)),
            wait_s=wait,
            clock=self.world.clock,
            **settings,  # type: ignore[arg-type]
        )

    def load(self, *times: float | None, **settings: object) -> LoadDouble:
        return LoadDouble(self.reader, self.world, times=times or [10] * len(self.layers), **settings)  # type: ignore[arg-type]

    def save(self) -> SaveDouble:
        return SaveDouble(self.writer, self.world, memory=self.memory, time=1)

    def run(self, loads: list[StepLoad], saves: list[StepSave] | None = None):
        return run_step(self.world, self.pipeline, layers=self.layers, loads=loads, saves=saves or [])


def of(request: str, handle: LoadDouble) -> StepLoad:
    return StepLoad(request, {"full": handle})


def to(request: str, handle: SaveDouble) -> StepSave:
    return StepSave(request, {"full": handle})


class TestLoads:
    def test_the_next_units_are_submitted_before_the_current_one_is_waited_for(self) -> None:
        bench = Bench(depth=2)
        load = bench.load()
        bench.pipeline.begin_step([of("r", load)], [])
        bench.pipeline.before_layer(0)
        assert load.asked == [(0, 0), (0, 1), (0, 2)]
        bench.pipeline.before_layer(1)
        assert load.asked[3:] == [(10, 3)]

    def test_a_second_wait_in_a_step_returns_at_once(self) -> None:
        bench = Bench()
        bench.pipeline.begin_step([of("r", bench.load())], [])
        for _ in range(3):
            bench.pipeline.before_layer(0)
        assert bench.world.now == 10

    def test_nothing_is_asked_twice_of_a_load_that_was_prefetched(self) -> None:
        bench = Bench(depth=2)
        load = of("r", bench.load())
        bench.pipeline.prefetch(load)
        assert [shard for _, shard in load.rows["full"].asked] == [0, 1]  # type: ignore[attr-defined]
        assert bench.run([load]).failed == {}
        assert [shard for _, shard in load.rows["full"].asked] == [0, 1, 2, 3]  # type: ignore[attr-defined]

    def test_a_prefetch_that_the_engine_planned_anew_is_given_up(self) -> None:
        bench = Bench(depth=2)
        old, new = bench.load(30, 30, 30, 30), bench.load()
        bench.pipeline.prefetch(of("r", old))
        assert bench.run([of("r", new)]).failed == {}
        assert old.ticket.done
        assert [shard for _, shard in old.asked] == [0, 1]
        assert bench.pipeline.unfinished == frozenset()

    def test_a_failed_unit_names_its_objects_and_the_step_goes_on(self) -> None:
        bench = Bench()
        bad = bench.load(objects=5, bad={2: [1, 3]})
        report = bench.run([of("bad", bad), of("good", bench.load(objects=2))])
        assert list(report.failed) == ["bad"]
        assert report.failed["bad"]["full"].tolist() == [False, True, False, True, False]

    def test_what_does_not_come_in_time_has_failed_and_others_go_on(self) -> None:
        bench = Bench(wait=50)
        late, good = bench.load(10, None, 10, 10), bench.load()
        report = bench.run([of("late", late), of("good", good)])
        assert list(report.failed) == ["late"]
        assert late.ticket.done
        assert report.exposed_s == 10 + 50
        assert report.busy == frozenset()

    def test_a_slow_request_costs_one_wait_in_a_step_and_one_at_its_end(self) -> None:
        bench = Bench(wait=50, depth=3)
        report = bench.run([of("slow", bench.load(10, 900, 900, 900))])
        assert report.exposed_s == 10 + 50 + 50
        assert report.busy == {"slow"}

    def test_bytes_that_land_after_their_layer_computed_are_not_believed(self) -> None:
        bench = Bench(wait=50)
        load = bench.load(10, 75, 10, 10)
        load.cancel = lambda: None  # type: ignore[method-assign]  # a store that cannot stop what has begun
        report = bench.run([of("r", load)])
        assert load.ticket.ok
        assert report.failed["r"]["full"].tolist() == [True]

    def test_a_target_that_is_still_written_to_is_said_to_be_busy(self) -> None:
        bench = Bench(wait=50)
        load = bench.load(10, 200, 10, 10)
        load.cancel = lambda: None  # type: ignore[method-assign]
        assert bench.run([of("r", load)]).busy == {"r"}
        assert bench.pipeline.unfinished == {"r"}
        assert bench.pipeline.drain(200)
        assert bench.pipeline.unfinished == frozenset()

    def test_a_store_that_raises_fails_its_load_only(self) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError("no")

        bench, before = Bench(), metrics.ERRORS.labels(where="layer_hook")._value.get()
        bad = bench.load(objects=3)
        bad.submit = refuse  # type: ignore[method-assign]
        report = bench.run([of("bad", bad), of("good", bench.load())])
        assert {request: mask["full"].tolist() for request, mask in report.failed.items()} == {
            "bad": [True] * 3
        }
        assert metrics.ERRORS.labels(where="layer_hook")._value.get() > before


class TestHooksThatDoNotCome:
    def test_a_load_that_nobody_waited_for_has_failed_and_is_waited_for_earlier_from_then_on(self) -> None:
        bench = Bench()
        for expected in ([(2,), ["r"]], [(2,), []]):
            load = bench.load(10, 10, 500, 10)
            bench.pipeline.begin_step([of("r", load)], [])
            for layer in (0, 1, 3):
                bench.pipeline.before_layer(layer)
            report = bench.pipeline.end_step()
            assert [report.unseen, list(report.failed)] == expected
            assert load.ticket.done

    def test_an_unknown_layer_is_ignored_and_counted(self) -> None:
        bench = Bench()
        bench.pipeline.begin_step([of("r", bench.load())], [to("r", bench.save())])
        bench.pipeline.before_layer(77)
        bench.pipeline.after_layer(77)
        assert bench.pipeline.ready(77, "r")
        assert bench.pipeline.end_step().ignored == 2

    def test_hooks_out_of_order_wait_for_their_own_layer(self) -> None:
        bench = Bench()
        load = bench.load(5, 40, 10, 20)
        bench.pipeline.begin_step([of("r", load)], [])
        for layer, now in ((3, 20), (0, 20), (1, 40), (2, 40)):
            bench.pipeline.before_layer(layer)
            assert bench.world.now == now
        assert bench.pipeline.end_step().failed == {}

    def test_hooks_outside_a_step_do_nothing(self) -> None:
        pipeline = Bench().pipeline
        pipeline.before_layer(0)
        pipeline.after_layer(0)
        assert pipeline.ready(0, "r")
        assert pipeline.end_step().failed == {}

    def test_a_step_that_never_ended_keeps_nothing_and_its_loads_are_told_next(self) -> None:
        bench = Bench()
        save = bench.save()
        bench.pipeline.begin_step([of("r", bench.load())], [to("r", save)])
        bench.pipeline.after_layer(0)
        assert list(bench.run([]).failed) == ["r"]
        assert (save.published, save.ticket.done) == (None, True)


class TestSaves:
    def test_each_unit_is_saved_once_after_its_layer(self) -> None:
        bench = Bench()
        save = bench.save()
        report = bench.run([], [to("r", save)])
        assert save.submitted == [0, 1, 2, 3]
        assert (report.units_saved_late, report.unseen) == (0, ())
        assert bench.pipeline.drain(100)
        assert save.published == bench.memory

    def test_what_was_saved_when_is_counted(self) -> None:
        counters = [metrics.UNITS_SAVED.labels(when=when) for when in ("layer", "step end")]
        before = [counter._value.get() for counter in counters]
        bench = Bench()
        bench.pipeline.begin_step([], [to("a", bench.save()), to("b", bench.save())])
        for layer in (0, 1, 1, 3):
            bench.pipeline.after_layer(layer)
        bench.pipeline.end_step()
        assert [counter._value.get() - was for counter, was in zip(counters, before, strict=True)] == [6, 2]

    def test_the_last_bytes_of_a_layer_win(self) -> None:
        bench = Bench()
        save = bench.save()
        bench.pipeline.begin_step([], [to("r", save)])
        for layer in (0, 1, 2, 3, 3, 3):
            bench.memory[layer] += 1
            bench.pipeline.after_layer(layer)
            bench.world.let_pass(10)
        bench.pipeline.end_step()
        assert save.published == bench.memory == [101, 102, 103, 106]

    def test_a_layer_whose_hook_did_not_come_is_saved_at_the_end_and_counted(self) -> None:
        bench, before = Bench(), metrics.LAYERS_UNSEEN._value.get()
        save = bench.save()
        bench.pipeline.begin_step([], [to("r", save)])
        for layer in (0, 1, 3):
            bench.pipeline.after_layer(layer)
        bench.memory[2] = 5
        report = bench.pipeline.end_step()
        assert (report.unseen, report.units_saved_late) == ((2,), 1)
        assert metrics.LAYERS_UNSEEN._value.get() == before + 1
        assert bench.pipeline.drain(100)
        assert save.published == [100, 101, 5, 103]

    def test_a_gather_begins_after_the_layers_event(self) -> None:
        bench = Bench()
        save = bench.save()
        bench.pipeline.begin_step([], [to("r", save)])
        for layer in bench.layers:
            bench.pipeline.after_layer(layer, computed=EventDouble(bench.world, 50))
        bench.world.let_pass(40)
        bench.memory[1] = 5  # the kernel writes
        bench.pipeline.end_step()
        assert bench.pipeline.drain(100)
        assert save.published == [100, 5, 102, 103]

    def test_the_end_of_a_step_does_not_wait_for_storage(self) -> None:
        bench = Bench()
        save = bench.save()
        bench.pipeline.begin_step([], [to("r", save)])
        for layer in bench.layers:
            bench.pipeline.after_layer(layer, computed=EventDouble(bench.world, 500))
        bench.pipeline.end_step()
        assert bench.world.now == 0
        assert bench.pipeline.unfinished == {"r"}
        assert not bench.pipeline.drain(100)
        assert bench.pipeline.drain(500)

    def test_nothing_is_kept_that_was_computed_on_a_failed_load(self) -> None:
        bench = Bench()
        bad, good = bench.save(), bench.save()
        report = bench.run([of("bad", bench.load(bad={3: [0]}))], [to("bad", bad), to("good", good)])
        assert report.given_up == {"bad"}
        assert bench.pipeline.drain(100)
        assert (bad.published, good.published) == (None, bench.memory)

    def test_requests_that_share_blocks_share_a_failed_load(self) -> None:
        bench = Bench()
        bad, good = bench.save(), bench.save()
        bench.pipeline.begin_step([of("bad", bench.load(bad={3: [0]}))], [to("bad", bad), to("good", good)])
        for layer in bench.layers:
            bench.pipeline.before_layer(layer)
            bench.pipeline.after_layer(layer)
        assert bench.pipeline.end_step(share_blocks=True).given_up == {"bad", "good"}
        assert bench.pipeline.drain(100)
        assert (bad.published, good.published) == (None, None)

    def test_a_store_that_raises_gives_up_its_save_only(self) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError("no")

        bench = Bench()
        bad, good = bench.save(), bench.save()
        bad.submit = refuse  # type: ignore[method-assign]
        bench.run([], [to("bad", bad), to("good", good)])
        assert bench.pipeline.drain(100)
        assert (bad.published, good.published) == (None, bench.memory)


class GoneDouble:
    """A handle of a process that forked this one: whatever is asked of its ticket raises."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @property
    def ticket(self) -> Ticket:
        raise ClosedError("another process's")

    def submit(self, shards: slice, **_: object) -> None:
        self.asked.append("submit")

    def cancel(self) -> None:
        self.asked.append("cancel")

    seal = abandon = cancel


class TestHandlesOfAnotherProcess:
    def test_no_hook_raises_and_nothing_of_them_is_believed(self, tmp_path: Path) -> None:
        (tmp_path / "on").touch()
        bench = Bench(trace=Trace(tmp_path))
        load, save = GoneDouble(), GoneDouble()
        report = bench.run([StepLoad("r", {"full": load})], [StepSave("r", {"full": save})])
        assert list(report.failed) == ["r"]
        assert report.given_up == {"r"}
        assert bench.pipeline.close()
        assert "submit" in load.asked

    def test_they_can_be_prefetched_and_cancelled(self) -> None:
        bench = Bench()
        bench.pipeline.prefetch(StepLoad("r", {"full": GoneDouble()}))
        bench.pipeline.cancel("r")
        assert bench.pipeline.unfinished == frozenset()


class TestSharedTensors:
    """Layers 1 and 3 of a row share a tensor."""

    UNITS = unit_map(shared=(1, 3), full=(0, 1, 2, 3))

    def test_all_of_it_is_awaited_before_its_first_layer(self) -> None:
        bench = Bench(self.UNITS)
        bench.pipeline.begin_step([of("r", bench.load(10, 10, 10, 90))], [])
        bench.pipeline.before_layer(1)
        assert bench.world.now == 90

    def test_a_layer_whose_predecessor_was_skipped_waits_for_itself(self) -> None:
        bench = Bench(self.UNITS)
        bench.pipeline.begin_step([of("r", bench.load(10, 10, 10, 90))], [])
        bench.pipeline.before_layer(3)
        assert bench.world.now == 90

    def test_it_is_saved_once_after_its_last_layer(self) -> None:
        bench = Bench(self.UNITS)
        save = bench.save()
        bench.run([], [to("r", save)])
        assert save.submitted == [0, 2, 1, 3]

    def test_what_a_layer_rewrites_after_the_last_is_saved_again(self) -> None:
        bench = Bench(self.UNITS)
        save = bench.save()
        bench.pipeline.begin_step([], [to("r", save)])
        for layer in (0, 1, 2, 3, 1):
            bench.memory[layer] += 1
            bench.pipeline.after_layer(layer)
            bench.world.let_pass(10)
        bench.pipeline.end_step()
        assert save.published == bench.memory == [101, 103, 103, 104]


class TestCancel:
    def test_a_cancelled_request_is_neither_waited_for_nor_kept_nor_reported(self) -> None:
        bench = Bench()
        load, save = bench.load(10, None, None, None), bench.save()
        bench.pipeline.begin_step([of("gone", load), of("r", bench.load())], [to("gone", save)])
        bench.pipeline.before_layer(0)
        bench.pipeline.cancel("gone")
        for layer in (1, 2, 3):
            bench.pipeline.before_layer(layer)
        assert bench.pipeline.end_step().failed == {}
        assert bench.world.now < 100
        assert (load.ticket.done, save.ticket.done, bench.pipeline.unfinished) == (True, True, frozenset())

    def test_a_prefetched_request_can_be_cancelled(self) -> None:
        bench = Bench()
        load = bench.load()
        bench.pipeline.prefetch(of("r", load))
        bench.pipeline.cancel("r")
        assert bench.pipeline.unfinished == {"r"}  # what has begun still writes
        assert bench.run([]).failed == {}
        assert (load.ticket.done, bench.pipeline.unfinished) == (True, frozenset())

    def test_saves_of_steps_that_ended_are_given_up_too(self) -> None:
        bench = Bench()
        save = bench.save()
        bench.pipeline.begin_step([], [to("r", save)])
        bench.pipeline.after_layer(0, computed=EventDouble(bench.world, 500))
        bench.pipeline.end_step()
        bench.pipeline.cancel("r")
        assert save.ticket.object_results.tolist() == [ResultCode.CANCELLED]

    def test_an_unknown_request_is_nothing_to_cancel(self) -> None:
        Bench().pipeline.cancel("nobody")

    def test_closing_cancels_everything(self) -> None:
        bench = Bench()
        queued, running = bench.load(), bench.load()
        bench.pipeline.begin_step([of("r", running)], [])
        bench.pipeline.prefetch(of("q", queued))
        assert bench.pipeline.close(100)
        assert queued.ticket.done
        assert running.ticket.done


class TestQueues:
    def test_a_full_queue_delays_prefetches_and_drops_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ucm_core.flow.pipeline.QUEUE_LOADS", 4)
        bench = Bench(depth=2)
        loads = [bench.load() for _ in range(5)]
        for number, load in enumerate(loads):
            bench.pipeline.prefetch(of(f"r{number}", load))
        assert [len(load.asked) for load in loads] == [2, 2, 0, 0, 0]
        for count in ([2, 2, 2, 1, 1], [2, 2, 2, 2, 2]):
            bench.world.let_pass(10)
            bench.run([])
            assert [len(load.asked) for load in loads] == count

    def test_what_a_layer_waits_for_is_submitted_whatever_the_queue(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ucm_core.flow.pipeline.QUEUE_LOADS", 1)
        bench = Bench(depth=2)
        loads = [bench.load() for _ in range(9)]
        report = bench.run([of(f"r{number}", load) for number, load in enumerate(loads)])
        assert report.failed == {}
        assert all(len(load.asked) == 4 for load in loads)


class TestStages:
    """A stage holds some of a row's units: its handles count from its own first."""

    def test_shards_count_from_the_stages_first_unit(self) -> None:
        units = unit_map(full=(0, 1, 2, 3), other=(1, 3))
        bench = Bench(units, layers=4)
        bench.pipeline = LayerPipeline(
            units,
            layers=(2, 3),
            first_units={"full": 2, "other": 1},
            wait_s=1000,
            clock=bench.world.clock,
        )
        load = StepLoad("r", {"full": bench.load(10, 10), "other": bench.load(30)})
        bench.pipeline.begin_step([load], [])
        for layer, now in ((2, 10), (3, 30)):
            bench.pipeline.before_layer(layer)
            assert bench.world.now == now
        assert bench.pipeline.end_step().failed == {}

    def test_handles_of_more_shards_than_the_stage_has_fail_instead_of_being_believed(self) -> None:
        bench = Bench()
        assert list(bench.run([of("r", bench.load(10, 10, 10, 10, 10))]).failed) == ["r"]

    def test_handles_of_fewer_shards_fail_too(self) -> None:
        bench = Bench()
        assert list(bench.run([of("r", bench.load(10, 10))]).failed) == ["r"]

    def test_a_row_that_the_stage_does_not_have_fails(self) -> None:
        bench = Bench()
        assert list(bench.run([StepLoad("r", {"fool": bench.load()})]).failed) == ["r"]


def test_masks_are_arrays_of_bool() -> None:
    bench = Bench()
    mask = bench.run([of("r", bench.load(bad={0: [0]}))]).failed["r"]["full"]
    assert mask.dtype == np.bool_
