"""The layer pipeline: loads come ahead of the layers that need them, saves follow those that finish them.

One per worker; the engine's thread calls it. The order within a step::

    prefetch        before the step, when a request's verdict is known: its first units are submitted
    begin_step      what the step loads and saves
    before_layer    submits the loads of the next layers, then waits for this one's
    after_layer     submits the units that this layer finished
    end_step        what the hooks did not do, what failed; does not wait for storage

No hook raises (`begin_step` does for two loads of one request). A hook for a layer that the map does not
know, one that comes again, out of order or not at all costs a miss at most, and is counted: a load that
nobody waited for has failed, and a unit whose hook did not come is saved at the end of the step, when its
bytes are final.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from ucm_core.errors import ConfigError, shown
from ucm_core.flow.handles import ComputeEvent
from ucm_core.flow.layers import LayerShards, Shard, plan_layers
from ucm_core.flow.lookahead import LEAST_DEPTH, Backlog, LookAhead, due, joined, reach_of
from ucm_core.flow.step import (
    Failed,
    RunningLoad,
    RunningSave,
    StepLoad,
    StepReport,
    StepSave,
    tried,
    wait_for,
)
from ucm_core.flow.trace import Interval, IntervalKind, Trace
from ucm_core.ops import metrics
from ucm_core.spec.rows import refuse_repeats
from ucm_core.spec.units import UnitMap

__all__ = ["LayerPipeline", "StepLoad", "StepReport", "StepSave"]

WAIT_S = 10.0
QUEUE_LOADS = 1024
"""Submitted and not landed, of one layer and request each. A full queue delays what is loaded ahead; what a
layer waits for is always submitted."""


class _Step:
    """What is under way between `begin_step` and `end_step`."""

    def __init__(self, loads: list[RunningLoad], saves: list[RunningSave]) -> None:
        self.loads = loads
        self.saves = saves
        self.before: set[int] = set()
        """Positions whose hook came."""
        self.after: set[int] = set()
        self.depth = LEAST_DEPTH
        self.computing_since_s: dict[int, float] = {}
        """When the layer at a position began to compute; only while the step is traced."""
        self.traced = False
        self.exposed_s = 0.0
        self.saved_late = 0
        self.ignored = 0
        self.cancelled = False
        """Whether a load was cancelled in it, so that nobody knows what it left in its target."""

    def expect(self, position: int, layer: LayerShards) -> None:
        """The layer at ``position`` is about to compute, perhaps once more."""
        self.before.add(position)
        if position in self.after:
            self.after.discard(position)
            for save in self.saves:
                save.expect(layer)

    def forget(self, request: Hashable) -> None:
        """A request takes part no more."""
        self.cancelled |= any(load.request == request for load in self.loads)
        self.loads = [load for load in self.loads if load.request != request]
        self.saves = [save for save in self.saves if save.request != request]


class LayerPipeline:
    """Loads and saves of a stage's layers, unit by unit.

    ``layers`` are those of this stage (None = all of the map), ``first_units`` by row the global number of
    the unit that is shard 0 of the handles. ``depth`` is the number of layers loaded ahead; None = adapted to
    the measured times, see `LookAhead`. A hook waits ``wait_s`` at most; what has not come then has failed.
    ``trace`` records the steps that begin while it is on.
    """

    def __init__(
        self,
        units: UnitMap,
        *,
        layers: Sequence[int] | None = None,
        first_units: Mapping[str, int] | None = None,
        depth: int | None = None,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
    ) -> None:
        self._plan = plan_layers(units, layers, first_units=first_units)
        self._positions = {plan.layer: position for position, plan in enumerate(self._plan)}
        self._needed = _count_by_row(shard for plan in self._plan for shard in plan.needs)
        self._written = frozenset(
            shard for plan in self._plan for run in (*plan.finishes, *plan.rewrites) for shard in run
        )
        self._ahead = LookAhead(depth)
        if not (isinstance(wait_s, int | float) and wait_s >= 0):
            raise ConfigError(f"a hook cannot wait {shown(wait_s)} seconds; give a number of at least 0")
        self._wait_s, self._clock = wait_s, clock
        self._trace = trace or Trace(None)
        self._step: _Step | None = None
        self._prefetched: list[RunningLoad] = []
        self._flying: list[tuple[RunningLoad, int]] = []
        self._measuring = False
        self._hookless: set[int] = set()
        self._tail: list[RunningLoad | RunningSave] = []
        self._lost: dict[Hashable, Failed] = {}

    @property
    def depth(self) -> int:
        """Layers that are loaded ahead now."""
        return self._ahead.depth

    @property
    def unfinished(self) -> frozenset[Hashable]:
        """Requests whose memory a load may still write to, or a save may still read."""
        self._forget_done()
        open_ = self._step.loads + self._step.saves if self._step else ()
        return frozenset(each.request for each in (*self._tail, *open_, *self._prefetched))

    # -- before the layers

    def prefetch(self, load: StepLoad) -> None:
        """Submit the first units of a load whose step is still to come; where the queue is full, later."""
        self._prefetched.append(RunningLoad(load))
        self._submit_prefetched()

    def begin_step(self, loads: Sequence[StepLoad], saves: Sequence[StepSave]) -> None:
        """Begin a step with these loads (prefetched before, or not) and saves.

        A step that was not ended is given up first: its loads have failed, its saves are not kept.
        SpecError, and nothing changes, where two loads are of one request: what of which failed?
        """
        refuse_repeats("a step loads for request", (load.request for load in loads))
        self._give_up_step()
        self._forget_done()
        step = self._step = _Step(
            [self._running(load) for load in loads], [RunningSave(save, self._written) for save in saves]
        )
        step.traced = self._trace.look()
        if loads:
            step.depth = self._ahead.depth
            self._bring_small(step)
            self._wait(step, step.loads, range(self._also_now(0)))

    def before_layer(self, layer: int, *, requests: Collection[Hashable] | None = None) -> None:
        """Return when what ``layer`` needs has landed or failed, for these requests or all of the step."""
        step = self._step
        if step is None or not (step.loads or step.saves or step.traced):
            return
        position = self._positions.get(layer)
        if position is None:
            step.ignored += 1
            return
        step.expect(position, self._plan[position])
        loads = [load for load in step.loads if requests is None or load.request in requests]
        if loads:
            self._note_computed(loads, position)
            self._wait(step, loads, range(position, self._also_now(position + 1)))
        now_s = self._clock()
        for load in loads:
            load.computing_since_s = now_s
        if step.traced:
            step.computing_since_s.setdefault(position, now_s)

    def ready(self, layer: int, request: Hashable) -> bool:
        """Whether `before_layer` would return at once for this request."""
        position = self._positions.get(layer)
        if position is None or self._step is None:
            return True
        mine = [load for load in self._step.loads if load.request == request]
        self._ask(self._step, mine, position + 1)
        return all(load.landed(self._plan[position]) for load in mine)

    def end_loads(self) -> Mapping[Hashable, Failed]:
        """End the loads of the step before it ends itself, and say what failed.

        For an engine that asks for results first, when all layers of this pipeline have had their hooks: as
        at `end_step`, a load has failed where one of them did not come.
        """
        return {} if self._step is None else self._end_loads(self._step)

    # -- after the layers

    def after_layer(self, layer: int, *, computed: ComputeEvent | None = None) -> None:
        """Save what ``layer`` finished, once ``computed`` is reached; again in a step, the last bytes win."""
        step = self._step
        if step is None or not (step.saves or step.traced):
            return
        position = self._positions.get(layer)
        if position is None:
            step.ignored += 1
            return
        step.after.add(position)
        units = sum(save.submit(self._plan[position], computed) for save in step.saves)
        if step.traced:
            self._trace_layer(step, position)
        if units:
            metrics.UNITS_SAVED.labels(when="layer").inc(units)

    def end_step(self, *, computed: ComputeEvent | None = None, share_blocks: bool = False) -> StepReport:
        """End the step, whose last layer has computed once ``computed`` is reached; say what became of it.

        Its loads have ended then, well or not; its saves go on by themselves. Those of a request whose load
        failed are given up: what it computed is not right. So are all others where requests ``share_blocks``:
        they may have computed on what that load left, or one that was cancelled.
        """
        step, self._step = self._step, None
        failed, self._lost = self._lost, {}
        if step is None:
            return StepReport(failed=failed, depth=self.depth)
        failed |= self._end_loads(step)
        all_of_it = share_blocks and (failed or step.cancelled)
        given_up = {save.request for save in step.saves if save.request in failed or all_of_it}
        for save in step.saves:
            if save.request in given_up:
                save.give_up()
            else:
                step.saved_late += save.finish(computed)
        self._tail += _open(step)
        unseen = self._unseen(step)
        metrics.LAYERS_UNSEEN.inc(len(unseen))
        metrics.UNITS_SAVED.labels(when="step end").inc(step.saved_late)
        self._submit_prefetched()
        return StepReport(
            failed=failed,
            given_up=frozenset(given_up),
            busy=frozenset(load.request for load in step.loads if not load.done),
            unseen=unseen,
            units_saved_late=step.saved_late,
            ignored=step.ignored,
            exposed_s=step.exposed_s,
            depth=self.depth,
        )

    # -- the end

    def cancel(self, request: Hashable) -> None:
        """Let go of a request (abort, preemption): loads are cancelled, saves are given up unless published.

        Its memory is free once `unfinished` does not have it.
        """
        step = self._step
        for each in [*self._prefetched, *self._tail, *(step.loads + step.saves if step else ())]:
            if each.request == request:
                each.give_up()
                if each not in self._tail:
                    self._tail.append(each)
        self._prefetched = [load for load in self._prefetched if load.request != request]
        if step is not None:
            step.forget(request)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no load or save of ended steps is under way; False when it is after ``timeout_s``."""
        deadline = self._clock() + timeout_s
        for each in self._tail:
            for handle in each.rows.values():
                tried(wait_for, handle, deadline - self._clock())
        self._forget_done()
        return not self._tail

    def close(self, timeout_s: float = WAIT_S) -> bool:
        """Give up an open step and all prefetched loads, then `drain`; write what was traced."""
        self._give_up_step()
        for load in self._prefetched:
            load.give_up()
        self._tail += self._prefetched
        self._prefetched = []
        drained = self.drain(timeout_s)
        self._trace.close()
        return drained

    # -- private

    def _running(self, load: StepLoad) -> RunningLoad:
        """The load as it was prefetched, asked for again because it is more urgent now, or anew.

        What else was prefetched for the request is given up: the engine has planned anew.
        """
        mine = [known for known in self._prefetched if known.request == load.request]
        self._prefetched = [known for known in self._prefetched if known not in mine]
        same = next((known for known in mine if known.rows == load.rows), RunningLoad(load))
        for known in mine:
            if known is not same:
                known.give_up()
                self._tail.append(known)
        for position in range(same.reach):
            same.submit([self._plan[position]], urgency=position)
        return same

    def _also_now(self, end: int) -> int:
        """The end of the positions to wait for: those whose hooks do not come are waited for before them."""
        while end in self._hookless:
            end += 1
        return end

    def _bring_small(self, step: _Step) -> None:
        """Copy the step's only load at once, where it is small: that costs less than to hand it over."""
        load, last = step.loads[0], len(self._plan)
        if len(step.loads) == 1 and load.small and self._room() >= last:
            begin_s = self._clock()
            self._submit(load, range(load.reach, last), here=True)
            step.exposed_s += self._clock() - begin_s

    def _wait(self, step: _Step, loads: Sequence[RunningLoad], positions: range) -> None:
        """Submit what comes next (R3), then wait for ``positions``, all loads together ``wait_s`` at most."""
        self._ask(step, loads, positions.stop)
        begin_s = self._clock()
        for load in loads:
            for position in positions:
                load.wait(self._plan[position], lambda: begin_s + self._wait_s - self._clock())
        end_s = self._clock()
        step.exposed_s += end_s - begin_s
        if positions:
            metrics.LAYER_WAIT.observe(end_s - begin_s)
            layer = self._plan[positions.start].layer
            self._trace.add(Interval(IntervalKind.WAIT, layer, begin_s, end_s))

    def _ask(self, step: _Step, loads: Sequence[RunningLoad], urgent: int) -> None:
        """Submit what is due now that ``loads`` wait for positions before ``urgent``."""
        for load in loads:
            load.urgent = max(load.urgent, urgent)
        backlogs = [self._backlog(load, load.urgent + step.depth) for load in step.loads]
        for positions, index in joined(backlogs, due(backlogs, room=self._room())):
            self._submit(step.loads[index], positions)
        self._submit_prefetched()

    def _backlog(self, load: RunningLoad, end: int) -> Backlog:
        """What of a load is due when it is loaded ahead to ``end`` at least."""
        last = len(self._plan)
        reach = reach_of(max(load.reach, load.urgent), min(last, end), together=load.together)
        return Backlog(load.reach, load.urgent, min(last, reach), load.together)

    def _submit_prefetched(self) -> None:
        """Submit the first units of what is queued, behind everything that a step waits for."""
        if not self._prefetched:
            return
        backlogs = [self._backlog(load, self._ahead.depth) for load in self._prefetched]
        for positions, index in joined(backlogs, due(backlogs, room=self._room())):
            self._submit(self._prefetched[index], positions, behind=len(self._plan))

    def _submit(self, load: RunningLoad, positions: range, *, behind: int = 0, here: bool = False) -> None:
        begin_s = self._clock()
        load.reach = positions.stop
        layers = self._plan[positions.start : positions.stop]
        asked = load.submit(layers, urgency=behind + positions.start, here=here)
        for position in itertools.compress(positions, asked):
            self._flying.append((load, position))
            measure = not (behind or self._measuring or len(positions) > 1)  # one load at a time
            if measure or self._trace.on:
                self._measuring |= measure
                self._follow(load, position, begin_s, measure=measure)

    def _follow(self, load: RunningLoad, position: int, begin_s: float, *, measure: bool) -> None:
        load.when_landed(
            self._plan[position], lambda: self._note_landed(load, position, begin_s, measure=measure)
        )

    def _note_landed(self, load: RunningLoad, position: int, begin_s: float, *, measure: bool) -> None:
        """On any thread."""
        end_s = self._clock()
        if measure:
            self._ahead.loaded(end_s - begin_s)
            self._measuring = False
        layer = self._plan[position].layer
        self._trace.add(Interval(IntervalKind.LOAD, layer, begin_s, end_s, load.request))

    def _room(self) -> int:
        if len(self._flying) >= QUEUE_LOADS:
            self._flying = [
                (load, position) for load, position in self._flying if not load.landed(self._plan[position])
            ]
        return QUEUE_LOADS - len(self._flying)

    def _note_computed(self, loads: Sequence[RunningLoad], position: int) -> None:
        """Measure the time between a request's layers, at its first call for the later one."""
        if loads[0].urgent <= position and loads[0].computing_since_s is not None:
            self._ahead.computed(self._clock() - loads[0].computing_since_s)

    def _trace_layer(self, step: _Step, position: int) -> None:
        """Record what a layer computed, and what it saves when that has ended."""
        now_s, layer = self._clock(), self._plan[position].layer
        since_s = step.computing_since_s.pop(position, None)
        if since_s is not None:
            self._trace.add(Interval(IntervalKind.COMPUTE, layer, since_s, now_s))
        for save in step.saves if self._plan[position].finishes else ():
            save.when_done(lambda save=save: self._note_saved(save, layer, now_s))  # type: ignore[misc]

    def _note_saved(self, save: RunningSave, layer: int, begin_s: float) -> None:
        """On any thread."""
        self._trace.add(Interval(IntervalKind.SAVE, layer, begin_s, self._clock(), save.request))

    def _end_loads(self, step: _Step) -> dict[Hashable, Failed]:
        """End the loads of a step; what failed."""
        begin_s = self._clock()
        ends = [
            (load.request, load.finish(self._needed, lambda: begin_s + self._wait_s - self._clock()))
            for load in step.loads
        ]
        step.exposed_s += self._clock() - begin_s
        self._measuring = False
        self._flying = [entry for entry in self._flying if entry[0] in self._prefetched]
        return {request: failed for request, failed in ends if failed}

    def _give_up_step(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        self._lost |= self._end_loads(step)
        for save in step.saves:
            save.give_up()
        self._tail += _open(step)

    def _unseen(self, step: _Step) -> tuple[int, ...]:
        """The layers whose hooks did not come; their loads are waited for one layer earlier from now on."""
        loaded = set().union(*(load.rows for load in step.loads))
        saved = set().union(*(save.rows for save in step.saves))
        silent = {
            position
            for position, plan in enumerate(self._plan)
            if position not in step.before and any(row in loaded for row, _ in plan.needs)
        }
        self._hookless = (self._hookless | silent) - step.before
        unsaved = {
            position
            for position, plan in enumerate(self._plan)
            if position not in step.after
            and any(run.row in saved for run in (*plan.finishes, *plan.rewrites))
        }
        return tuple(self._plan[position].layer for position in sorted(silent | unsaved))

    def _forget_done(self) -> None:
        self._tail = [each for each in self._tail if not each.done]


def _open(step: _Step) -> list[RunningLoad | RunningSave]:
    every: list[RunningLoad | RunningSave] = [*step.loads, *step.saves]
    return [each for each in every if not each.done]


def _count_by_row(shards: Iterable[Shard]) -> Mapping[str, int]:
    """The number of different shards of each row."""
    return Counter(row for row, _ in set(shards))
