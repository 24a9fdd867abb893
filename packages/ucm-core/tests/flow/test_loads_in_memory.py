"""Loads of which neighbouring layers are better submitted by one call, in simulated time."""

from __future__ import annotations

import pytest
from test_pipeline import Bench, of, unit_map

from ucm_core.flow.pipeline import StepLoad
from ucm_core.flow.ticket import ResultCode


class TestLoadsInMemory:
    """Loads of which neighbours are better submitted by one call."""

    def test_the_first_comes_alone_and_the_others_in_groups_when_they_are_due(self) -> None:
        bench = Bench(layers=12, depth=2)
        load = bench.load(together=5)
        bench.pipeline.begin_step([of("r", load), of("slow", slow := bench.load())], [])
        calls = [list(load.calls)]
        for layer in bench.layers:
            bench.pipeline.before_layer(layer)
            calls.append(list(load.calls))
            bench.pipeline.after_layer(layer)
        assert calls[0] == calls[4] == [[0], [1, 2, 3, 4, 5]]
        assert calls[5] == calls[9] == [*calls[0], [6, 7, 8, 9, 10]]
        assert calls[10] == calls[12] == [*calls[5], [11]]
        assert slow.calls == [[layer] for layer in bench.layers]
        assert bench.pipeline.end_step().failed == {}

    def test_no_more_go_together_than_suits_every_row(self) -> None:
        bench = Bench(unit_map(full=(0, 1, 2, 3, 4, 5), other=(0, 1, 2, 3, 4, 5)), layers=6, depth=9)
        rows = {"full": bench.load(together=2), "other": bench.load(together=99)}
        bench.pipeline.begin_step([StepLoad("r", rows)], [])
        assert rows["full"].calls == rows["other"].calls == [[0], [1, 2], [3, 4], [5]]

    def test_a_load_is_small_where_every_row_is(self) -> None:
        bench = Bench(unit_map(full=(0, 1, 2), other=(0, 1, 2)), layers=3, depth=9)
        for small in (True, False):
            rows = {"full": bench.load(small=True), "other": bench.load(small=small)}
            bench.pipeline.begin_step([StepLoad("r", rows)], [])
            for load in rows.values():
                assert load.calls == ([[0, 1, 2]] if small else [[0], [1], [2]])

    def test_a_layer_waits_for_its_own_unit_of_a_group(self) -> None:
        bench = Bench(depth=2)
        bench.pipeline.begin_step([of("r", bench.load(10, 10, 20, 70, together=3))], [])
        for layer, now in ((0, 10), (1, 10), (2, 20), (3, 70)):
            bench.pipeline.before_layer(layer)
            assert bench.world.now == now
        assert bench.pipeline.end_step().failed == {}

    def test_a_failed_unit_of_a_group_names_its_objects(self) -> None:
        bench = Bench(depth=2)
        report = bench.run([of("r", bench.load(objects=3, bad={3: [1]}, together=3))])
        assert report.failed["r"]["full"].tolist() == [False, True, False]

    def test_a_cancelled_group_comes_no_more(self) -> None:
        bench = Bench(depth=9)
        bench.pipeline.begin_step([of("r", load := bench.load(10, 10, None, None, together=3))], [])
        assert load.calls == [[0], [1, 2, 3]]
        bench.pipeline.cancel("r")
        bench.world.let_pass(10)
        assert load.ticket.done
        assert load.ticket.results.tolist() == [[0, 0, *[ResultCode.CANCELLED] * 2]]
        assert bench.pipeline.end_step().failed == {}

    def test_the_only_load_of_a_step_is_asked_for_by_one_call_where_that_is_small(self) -> None:
        bench = Bench(depth=2)
        load = bench.load(small=True)
        assert bench.run([of("r", load)]).failed == {}
        assert (load.calls, load.calls_here) == ([[0, 1, 2, 3]], 1)

    def test_a_hook_that_does_not_come_fails_a_small_load_too(self) -> None:
        bench = Bench(depth=2)
        bench.pipeline.begin_step([of("r", bench.load(small=True))], [])
        for layer in (0, 1, 3):
            bench.pipeline.before_layer(layer)
            bench.world.let_pass(10)
        assert list(bench.pipeline.end_step().failed) == ["r"]

    @pytest.mark.parametrize("other", ["larger", "prefetched", "one of two", "queue"])
    def test_what_is_not_so_comes_layer_by_layer(self, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench(depth=2)
        loads = [of("r", load := bench.load(together=4, small=other != "larger"))]
        if other == "prefetched":
            bench.pipeline.prefetch(loads[0])
        if other == "one of two":
            loads.append(of("s", bench.load(small=True)))
        if other == "queue":
            monkeypatch.setattr("ucm_core.flow.pipeline.QUEUE_LOADS", 3)
        bench.pipeline.begin_step(loads, [])
        assert load.calls[0] == [0]
        assert [0, 1, 2, 3] not in load.calls
        assert not load.calls_here
