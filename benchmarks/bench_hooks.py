"""What the pipeline's hooks cost an engine: a layer with nothing to do, and one whose loads have landed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

from benchmarks.frame import Figure, allowed, in_turns, timed
from ucm_core.flow.pipeline import LayerPipeline, StepLoad, StepSave
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_core.spec.units import UnitMap

LAYERS, REQUESTS = 96, 16
MOST_S = 10e-6
"""Of both hooks of one layer that has nothing to do."""


class LandedLoad:
    """A double of a load whose every unit was there before it was asked for."""

    together, small = 1, False

    def __init__(self) -> None:
        self.ticket = Ticket(1, LAYERS, durable=False)
        self.ticket.settle([0], ResultCode.OK)

    def submit(self, shards: slice, *, urgency: int = 0, here: bool = False) -> None: ...

    def cancel(self) -> None: ...


class SwallowedSave:
    """A double of a save whose every unit is gathered at once."""

    def __init__(self) -> None:
        self.ticket = Ticket(1, durable=False)
        self.ticket.settle([0], ResultCode.OK)

    def submit(self, shards: slice, *, ready: object = None) -> None: ...

    def seal(self) -> None: ...

    def abandon(self) -> None: ...


def figures() -> Iterator[Figure]:
    """Microseconds of the two hooks of one layer."""
    row = SpecRow("full", RowKind.CHAIN, 64, tuple(range(LAYERS)), (Part("x", (4,), "int8"),))
    pipeline = LayerPipeline(UnitMap(SpecTable((row,), 64)))
    outside, empty = functools.partial(hooks, pipeline), functools.partial(step, pipeline, requests=0)
    yield per_layer("both hooks of a layer outside a step", outside)
    yield per_layer("both hooks of a layer in a step without transfers", empty)
    full = functools.partial(step, pipeline, requests=REQUESTS)
    name = f"both hooks of a layer, per load and save of {REQUESTS}, all there"
    yield dataclasses.replace(per_layer(name, full, calls=REQUESTS), limit=None)


def per_layer(name: str, call: Callable[[], None], *, calls: int = 1) -> Figure:
    """The least of the rounds: what others do to the machine only adds. ``calls``: requests at each hook."""
    costs = in_turns({"ours": timed(call)}, times=49)["ours"]
    each_s = min(cost.wall_s for cost in costs) / (LAYERS * calls)
    return allowed(name, each_s * 1e6, MOST_S * 1e6, unit="us")


def hooks(pipeline: LayerPipeline) -> None:
    for layer in range(LAYERS):
        pipeline.before_layer(layer)
        pipeline.after_layer(layer)


def step(pipeline: LayerPipeline, *, requests: int) -> None:
    loads = [StepLoad(request, {"full": LandedLoad()}) for request in range(requests)]
    saves = [StepSave(request, {"full": SwallowedSave()}) for request in range(requests)]
    pipeline.begin_step(loads, saves)
    hooks(pipeline)
    report = pipeline.end_step()
    assert (report.failed, report.unseen) == ({}, ())
