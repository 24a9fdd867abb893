"""A pipeline that is made or driven wrongly: refused when it is made, a miss while it runs."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from test_pipeline import Bench, of, to, unit_map

from ucm_core.errors import ConfigError, SpecError
from ucm_core.flow.pipeline import LayerPipeline, StepLoad, StepSave
from ucm_core.flow.ticket import ResultCode, Ticket

WAIT_S = 30.0


class TestSettings:
    @pytest.mark.parametrize("depth", [0, -1, 2.5, math.nan, "2", True])
    def test_a_depth_that_is_no_number_of_layers(self, depth: Any) -> None:
        with pytest.raises(ConfigError, match="look-ahead"):
            Bench(depth=depth)

    @pytest.mark.parametrize("wait", [-1, math.nan, "1", None])
    def test_a_wait_that_is_no_time(self, wait: Any) -> None:
        with pytest.raises(ConfigError, match="cannot wait"):
            Bench(wait=wait)

    @pytest.mark.parametrize(
        ("first_units", "message"),
        [({"fall": 1}, "no row"), ({"full": -1}, "no number"), ({"full": "1"}, "no number")],
    )
    def test_a_first_unit_of_no_row_or_that_is_none(self, first_units: Any, message: str) -> None:
        with pytest.raises(SpecError, match=message):
            LayerPipeline(unit_map(full=(0, 1)), first_units=first_units)

    @pytest.mark.parametrize("layers", [["0", 1], [0, None], [-1, 0], [0.0, 1]])
    def test_layers_that_are_no_numbers(self, layers: Any) -> None:
        with pytest.raises(SpecError, match="numbers"):
            LayerPipeline(unit_map(full=(0, 1)), layers=layers)


class TestTwoLoadsOfOneRequest:
    """A report names what failed by request: the failure of one must not stand for that of the other."""

    def test_they_are_refused(self) -> None:
        bench = Bench()
        first, second = bench.load(objects=2, bad={1: [0]}), bench.load(objects=2, bad={1: [1]})
        with pytest.raises(SpecError, match="'r' twice"):
            bench.pipeline.begin_step([of("r", first), of("r", second)], [])

    def test_and_the_step_before_goes_on(self) -> None:
        bench = Bench()
        bench.pipeline.begin_step([of("q", bench.load())], [])
        with pytest.raises(SpecError):
            bench.pipeline.begin_step([of("r", bench.load()), of("r", bench.load())], [])
        for layer in bench.layers:
            bench.pipeline.before_layer(layer)
        assert bench.pipeline.end_step().failed == {}


def test_what_is_no_handle_fails_and_raises_nowhere() -> None:
    bench = Bench()
    load, save = StepLoad("bad", {"full": None}), StepSave("bad", {"full": None})  # type: ignore[dict-item]
    good = bench.save()
    report = bench.run([load, of("good", bench.load())], [save, to("good", good)])
    assert list(report.failed) == ["bad"]
    bench.pipeline.cancel("bad")
    assert bench.pipeline.close(100)
    assert good.published == bench.memory


class TestALayerThatComputesOnceMore:
    """Its hook before came again, the one after did not: what was saved of it is not what it left."""

    def test_its_last_bytes_are_saved_at_the_end(self) -> None:
        bench = Bench()
        save = bench.save()
        bench.pipeline.begin_step([], [to("r", save)])
        for layer in bench.layers:
            bench.pipeline.before_layer(layer)
            bench.pipeline.after_layer(layer)
        bench.world.let_pass(10)
        bench.pipeline.before_layer(2)
        bench.memory[2] = 7
        report = bench.pipeline.end_step()
        bench.world.let_pass(10)
        assert save.published == [100, 101, 7, 103]
        assert (report.unseen, report.units_saved_late) == ((2,), 0)

    def test_it_is_not_saved_at_the_end_when_its_hook_came(self) -> None:
        bench = Bench()
        save = bench.save()
        bench.pipeline.begin_step([], [to("r", save)])
        for layer in (0, 1, 1, 2, 3):
            bench.pipeline.before_layer(layer)
            bench.pipeline.after_layer(layer)
        assert bench.pipeline.end_step().unseen == ()
        assert save.submitted == [0, 1, 1, 2, 3]


class TestACancelledLoadInAStep:
    """Nobody knows what it left where others compute, if they share blocks."""

    @pytest.mark.parametrize(("share_blocks", "kept"), [(True, False), (False, True)])
    def test_others_keep_nothing_where_they_share_blocks(self, share_blocks: bool, kept: bool) -> None:
        bench = Bench()
        save = bench.save()
        bench.pipeline.begin_step([of("gone", bench.load(10, 500, 10, 10))], [to("r", save)])
        bench.pipeline.before_layer(0)
        bench.pipeline.cancel("gone")
        for layer in bench.layers:
            bench.pipeline.after_layer(layer)
        report = bench.pipeline.end_step(share_blocks=share_blocks)
        bench.world.let_pass(600)
        assert (save.published is not None, report.failed) == (kept, {})
        assert report.given_up == (frozenset() if kept else {"r"})


class ShardDouble:
    """A double of a load of one object and two units, which come when the test says so."""

    together, small = 1, False

    def __init__(self) -> None:
        self.ticket = Ticket(1, 2, durable=False)

    def submit(self, shards: slice, *, urgency: int = 0, here: bool = False) -> None:
        """It is on its way."""

    def cancel(self) -> None:
        self.ticket.settle_rest(ResultCode.CANCELLED)


def test_threads_in_one_hook_wait_all() -> None:
    """Engines that overlap halves of a batch call hooks from several threads."""
    load, pipeline = ShardDouble(), LayerPipeline(unit_map(full=(0, 1)), wait_s=WAIT_S)
    pipeline.begin_step([StepLoad("r", {"full": load})], [])
    landed: list[bool] = []

    def hook() -> None:
        pipeline.before_layer(0)
        landed.append(load.ticket.wait(0.0, shard=0))

    first, second = threading.Thread(target=hook), threading.Thread(target=hook)
    first.start()
    while not load.ticket._shard_waiters:
        assert first.is_alive()
    second.start()
    second.join(0.2)  # it returns at once where it does not wait
    load.ticket.settle([0], ResultCode.OK, shards=slice(0, 1))
    for thread in (first, second):
        thread.join()
    assert landed == [True, True]
