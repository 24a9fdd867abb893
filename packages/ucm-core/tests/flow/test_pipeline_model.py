"""Random steps against an oracle: whatever hooks come, in whatever order, nothing wrong is believed or kept.

The oracle only watches: what a layer reads when its hook has returned, and what is in the engine's memory
when the step ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from simulation import LoadDouble, MediumDouble, SaveDouble, World

from ucm_core.flow.pipeline import LayerPipeline, StepLoad, StepReport, StepSave
from ucm_core.flow.ticket import ResultCode
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_core.spec.units import UnitMap

LAYERS, OBJECTS, WAIT = 3, 2, 40.0
ROWS: Mapping[str, tuple[int, ...]] = {"full": (0, 1, 2), "window": (0, 2)}
REQUESTS = ("a", "b")
UNKNOWN = 99

Mask = npt.NDArray[np.bool_]

PARTS = (Part("x", (4,), "int8"),)
TABLE = SpecTable(tuple(SpecRow(name, RowKind.CHAIN, 64, layers, PARTS) for name, layers in ROWS.items()), 64)
MAPS = (UnitMap(TABLE), UnitMap(TABLE, shared=[("full", (0, 2))]), UnitMap(TABLE, follows={3: 1}))

layers = st.sampled_from([*range(LAYERS + 1), UNKNOWN])
some = st.sampled_from([None, {"a"}, {"b"}])
hooks = st.one_of(
    st.tuples(st.just("before"), layers, some),
    st.tuples(st.just("after"), layers, st.none()),
    st.tuples(st.just("ready"), layers, st.sampled_from(REQUESTS)),
    st.tuples(st.just("compute"), st.integers(1, 30), st.none()),
    st.tuples(st.just("cancel"), st.just(0), st.sampled_from((*REQUESTS, "nobody"))),
)
in_order = st.lists(st.integers(1, 20), min_size=LAYERS, max_size=LAYERS).map(
    lambda times: [
        hook
        for layer, time in enumerate(times)
        for hook in (("before", layer, None), ("compute", time, None), ("after", layer, None))
    ]
)
steps = st.one_of(in_order, st.lists(hooks, max_size=15))
times = st.sampled_from([0, 5, 20, 45, 70, 150, None])


class Engine:
    """An engine of two requests with a pipeline, and the oracle that watches."""

    def __init__(self, units: UnitMap, data: st.DataObject) -> None:
        self.world, self.units, self.data = World(), units, data
        lanes = data.draw(st.sampled_from([1, 2, 9]))
        self.reader, self.writer = MediumDouble(self.world, lanes), MediumDouble(self.world, lanes)
        depth = data.draw(st.sampled_from([None, 1, 3]))
        self.pipeline = LayerPipeline(units, depth=depth, wait_s=WAIT, clock=self.world.clock)
        self.writes = self.steps = 0
        self.handles: list[LoadDouble | SaveDouble] = []

    def step(self) -> None:
        self.steps += 1
        loads = [StepLoad(request, self.new_loads()) for request in self.pick()]
        for load in loads:
            if self.data.draw(st.booleans()):
                self.pipeline.prefetch(load)
                self.world.let_pass(self.data.draw(st.integers(0, 20)))
        saves = [StepSave(request, self.new_saves()) for request in self.pick()]
        watched = Watched(self, loads, saves)
        self.pipeline.begin_step(loads, saves)
        watched.begin()
        for hook in self.data.draw(steps):
            watched.call(*hook)
        watched.judge(self.pipeline.end_step())

    def pick(self) -> list[str]:
        return [request for request in REQUESTS if self.data.draw(st.booleans())]

    def new_loads(self) -> dict[str, LoadDouble]:
        objects = st.lists(st.integers(0, OBJECTS - 1), max_size=2)
        return {row: self.known(
            LoadDouble(
                self.reader, self.world, objects=OBJECTS,
                times=self.data.draw(st.lists(times, min_size=len(own), max_size=len(own))),
                bad=self.data.draw(st.dictionaries(st.sampled_from(range(len(own))), objects, max_size=1)),
                together=self.data.draw(st.integers(1, 4)),
                small=self.data.draw(st.booleans()),
            )) for row, own in ROWS.items()}  # fmt: skip

    def new_saves(self) -> dict[str, SaveDouble]:
        return {row: self.known(SaveDouble(self.writer, self.world, memory=[0] * len(own), time=3))
                for row, own in ROWS.items()}  # fmt: skip

    def known(self, handle):
        self.handles.append(handle)
        return handle


class Watched:
    """One step: what its layers read and wrote."""

    def __init__(self, engine: Engine, loads: Sequence[StepLoad], saves: Sequence[StepSave]) -> None:
        self.engine = engine
        self.loads = {load.request: load for load in loads}
        self.saves = {save.request: save for save in saves}
        self.wrong: dict[str, dict[str, Mask]] = defaultdict(
            lambda: {row: np.zeros(OBJECTS, dtype=bool) for row in ROWS}
        )
        self.read: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.seen: dict[str, dict[int, dict[str, Mask]]] = defaultdict(dict)
        """By request and layer: what was missing as its hook first returned; -1: as the step began."""
        self.cancelled: set[str] = set()

    def begin(self) -> None:
        for request in self.loads:
            self.seen[request][-1] = self.missing(request)

    def call(self, what: str, number: int, requests: set[str] | str | None) -> None:
        pipeline, world = self.engine.pipeline, self.engine.world
        if what == "before":
            begin = world.now
            pipeline.before_layer(number, requests=requests)
            assert world.now <= begin + WAIT
            for request in self.loads if requests is None else requests:
                self.layer_reads(number, request)
        elif what == "after":
            self.layer_writes(number)
            pipeline.after_layer(number)
        elif what == "ready":
            self.check_ready(number, requests)
        elif what == "compute":
            world.let_pass(number)
        else:
            pipeline.cancel(requests)
            self.cancelled.add(requests)

    def check_ready(self, layer: int, request: str) -> None:
        """Ready says that the hook would return at once, and nothing else."""
        begin = self.engine.world.now
        ready = self.engine.pipeline.ready(layer, request)
        assert self.engine.world.now == begin
        if ready:
            self.call("before", layer, {request})
            assert self.engine.world.now == begin

    def needs(self, layer: int) -> set[tuple[str, int]]:
        return {*self.engine.units.units_of(layer), *self.engine.units.await_before(layer)}

    def layer_reads(self, layer: int, request: str) -> None:
        if request not in self.loads:
            return
        self.seen[request].setdefault(layer, self.missing(request))
        for row, shard in self.needs(layer) - self.read[request]:
            codes = self.loads[request].rows[row].ticket.results[:, shard]
            self.wrong[request][row] |= codes != ResultCode.OK
            self.read[request].add((row, shard))

    def missing(self, request: str) -> dict[str, Mask]:
        """Per row, what has no good code now, ``bool[objects, shards]``."""
        return {
            row: handle.ticket.results != ResultCode.OK for row, handle in self.loads[request].rows.items()
        }

    def layers_without_hook_read(self, request: str) -> None:
        """They may have computed right after the last hook that came before, or the begin of the step."""
        for layer in range(LAYERS):
            before = max(known for known in self.seen[request] if known < layer)
            for row, shard in self.needs(layer) - self.read[request]:
                self.wrong[request][row] |= self.seen[request][before][row][:, shard]

    def layer_writes(self, layer: int) -> None:
        self.engine.writes += 1
        for row, shard in self.engine.units.units_of(layer):
            for save in self.saves.values():
                save.rows[row]._memory[shard] = self.engine.writes

    def judge(self, report: StepReport) -> None:
        going_on = {
            request
            for request, load in self.loads.items()
            if not all(handle.ticket.done for handle in load.rows.values())
        }
        assert report.busy == going_on - self.cancelled
        for request in self.loads.keys() - self.cancelled:
            self.judge_load(request, report.failed.get(request, {}))
        assert set(report.failed) <= self.loads.keys() - self.cancelled
        memory = {request: self.memory(request) for request in self.saves}
        for request in self.saves.keys() - self.cancelled:
            assert (request in report.given_up) == (request in report.failed)
        assert self.engine.pipeline.drain(1000)
        for request, save in self.saves.items():
            published = {row: handle.published for row, handle in save.rows.items()}
            spoiled = request in report.failed or request in self.cancelled
            assert published == (dict.fromkeys(ROWS) if spoiled else memory[request])

    def memory(self, request: str) -> dict[str, list[int]]:
        return {row: list(handle._memory) for row, handle in self.saves[request].rows.items()}

    def judge_load(self, request: str, failed: Mapping[str, Mask]) -> None:
        """All that a layer read before it was there has failed, and nothing else where all were seen."""
        all_read = len(self.read[request]) == sum(map(len, ROWS.values()))
        self.layers_without_hook_read(request)
        for row in ROWS:
            told = failed.get(row, np.zeros(OBJECTS, dtype=bool))
            assert not (self.wrong[request][row] & ~told).any()
            if all_read and self.engine.steps == 1:  # in later steps a hook may wait for the next layer too
                assert (told == self.wrong[request][row]).all()


@given(st.sampled_from(MAPS), st.data())
def test_nothing_wrong_is_believed_or_kept(units: UnitMap, data: st.DataObject) -> None:
    engine = Engine(units, data)
    for _ in range(data.draw(st.integers(1, 3))):
        engine.step()
    assert engine.pipeline.close(1000)
    assert engine.pipeline.unfinished == frozenset()
    assert all(handle.ticket.done for handle in engine.handles)
