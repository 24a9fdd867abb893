"""The loop over the layers of one step on one rank: what an engine adapter hooks into.

Each request goes at its own pace: of those whose next layer's units are there, the one that is furthest
behind computes; only when none is ready the loop waits. ::

    before_layer     of one request
    read             every byte that attention reads is compared with the model
    write            after ``layer_s``; rubbish where something wrong was read, as a real layer would
    after_layer      once all requests have computed the layer; again when the layer is called again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ucm_core.flow.pipeline import LayerPipeline
from ucm_core.testing.engine.memory import Cells, PagedMemory
from ucm_core.testing.engine.work import Step, Tally, Work, Wrong

__all__ = ["LayerLoop", "LayerTime", "Reads"]

POLL_S, POLLS = 0.0005, 10_000
"""How often it is asked whether any request is ready, and how many times before one of them is waited for."""
RUBBISH = 0xA5
"""What changes the bytes that a layer computes from wrong ones, or in a call whose result is thrown away."""


@dataclass(slots=True)
class LayerTime:
    """What computing a layer takes."""

    layer_s: float = 0.0
    """Seconds for one layer of one request."""
    sleep: Callable[[float], None] = time.sleep
    """How they pass."""
    told: Callable[[int, Hashable], None] | None = None
    """Is told when a request has computed a layer."""

    def pass_(self, layer: int, request: Hashable) -> None:
        """Let it pass."""
        if self.layer_s:
            self.sleep(self.layer_s)
        if self.told is not None:
            self.told(layer, request)


Reads = Sequence[tuple[int, PagedMemory]]
"""What a layer reads: (the layer whose bytes they are, their memory); it writes those of its own."""


class LayerLoop:
    """The layers of one rank, step by step. For one thread at a time."""

    def __init__(self, reads: Mapping[int, Reads], pipeline: LayerPipeline, *, tally: Tally) -> None:
        """``reads`` has every layer of the rank, in the order in which they are called."""
        self._reads = reads
        self._pipeline = pipeline
        self._tally = tally
        self._nobody = threading.Event()  # is never set: waits for the time only
        self.time = LayerTime()
        """What computing takes."""

    def run(self, step: Step) -> None:
        """Compute all layers of all requests of ``step``."""
        calls = _calls(self._reads, step)
        runs = [_Run(work, loading=work.request in step.loads) for work in step.works]
        ended = 0
        while left := [run for run in runs if run.calls < len(calls)]:
            run = self._next(left, calls)
            self._call(run, calls[run.calls], step)
            run.calls += 1
            for call in calls[ended : (ended := min(run.calls for run in runs))]:
                if call.hooked:
                    self._pipeline.after_layer(call.layer)

    def _next(self, left: list[_Run], calls: Sequence[_Call]) -> _Run:
        """The ready request that is furthest behind; when none is for long, the one furthest behind."""
        left.sort(key=lambda run: run.calls)
        for _ in range(POLLS if len(left) > 1 else 0):
            for run in left:
                if self._ready(run, calls[run.calls]):
                    return run
            self._nobody.wait(POLL_S)
        return left[0]

    def _ready(self, run: _Run, call: _Call) -> bool:
        return not run.loading or self._pipeline.ready(call.layer, run.work.request)

    def _call(self, run: _Run, call: _Call, step: Step) -> None:
        layer, work = call.layer, run.work
        if call.hooked:
            self._pipeline.before_layer(layer, requests={work.request})
        for source, memory in self._reads[layer]:
            if wrong := self._wrong(memory, source, run):
                self._tally.wrong.append(Wrong(work.request, memory.row.name, layer, wrong))
                step.spoiled.add(work.request)
        self.time.pass_(layer, work.request)
        for source, memory in self._reads[layer]:
            if source == layer:
                spoil = RUBBISH if call.rubbish or work.request in step.spoiled else 0
                memory.write(layer, run.written(memory), spoil=spoil)

    def _wrong(self, memory: PagedMemory, layer: int, run: _Run) -> int:
        """How many entries that ``layer`` reads are not the model's."""
        if not run.work.begin:
            return 0
        cells = run.read(memory)
        self._tally.entries_read += len(cells.pages)
        return memory.wrong(layer, cells)


@dataclass(frozen=True, slots=True)
class _Call:
    layer: int
    hooked: bool
    """Whether the engine calls the hooks."""
    rubbish: bool
    """Whether the result is thrown away."""


class _Run:
    """One request in one step."""

    def __init__(self, work: Work, *, loading: bool) -> None:
        self.work = work
        self.loading = loading
        """Whether it waits for loads."""
        self.calls = 0
        """How many calls it is through with."""
        self._read: dict[str, Cells] = {}
        self._written: dict[str, Cells] = {}

    def read(self, memory: PagedMemory) -> Cells:
        """What attention looks back into: everything, a window, or the state before; alike in all layers."""
        name = memory.row.name
        if name not in self._read:
            self._read[name] = _read(memory, self.work)
        return self._read[name]

    def written(self, memory: PagedMemory) -> Cells:
        """What is computed."""
        name = memory.row.name
        if name not in self._written:
            self._written[name] = _written(memory, self.work)
        return self._written[name]


def _calls(layers: Iterable[int], step: Step) -> list[_Call]:
    """The calls of a step; the second ones come last, as those of a drafter's layers do."""
    first = [_Call(layer, layer not in step.skipped, layer in step.repeated) for layer in layers]
    return first + [replace(call, rubbish=False) for call in first if call.rubbish]


def _read(memory: PagedMemory, work: Work) -> Cells:
    """What attention over ``work`` looks back into: everything, a window, or the state before it."""
    name = memory.row.name
    if memory.state:
        return memory.state_cells([work.states_from[name]], work.digests[[work.begin - 1]])
    window = memory.row.window
    begin = 0 if window is None else max(0, work.begin - window + 1)
    return memory.cells(work.pages[name], work.digests, begin=begin, end=work.begin)


def _written(memory: PagedMemory, work: Work) -> Cells:
    """The entries, or the last states, that ``work`` computes."""
    name = memory.row.name
    if memory.state:
        pages = work.states_to[name]
        return memory.state_cells(pages, work.digests[work.end - len(pages) : work.end])
    return memory.cells(work.pages[name], work.digests, begin=work.begin, end=work.end)
