"""Loads that a batch waits for layer by layer, and what SGLang's pools wait by before they read a layer.

SGLang begins the loads of a batch before its forward, and asks for the result behind it; a pool waits in
between, as often as it likes, or never for a layer that it does not read. SGLang's own counter waits without
a bound, on its scheduler's thread: this one waits no longer than `LOADS_WAIT_S` for all layers of a batch,
then the batch has failed and nothing waits for it any more. To wait for a layer is to wait for those before
it as well: who replays a whole forward, or copies the states of all layers, waits for the last only.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.presence import Mask
from ucm_core.flow.layers import LayerShards, Shard, runs
from ucm_core.flow.step import RunningLoad, StepLoad
from ucm_core.ops import border, metrics
from ucm_core.spec.keys import Keys
from ucm_core.spec.rows import SpecRow
from ucm_sglang.page_cache import View

__all__ = ["LOADS_WAIT_S", "LayerCounter", "LinkedLoad", "LoadBatch", "failed_batch", "plan_of"]

LOADS_WAIT_S = 8.0
"""How long one batch waits for its loads, all layers together."""
_GROWTH = 6


@dataclass(frozen=True, slots=True, eq=False)
class LinkedLoad:
    """What one request loads."""

    load: StepLoad
    """The request, and per row the handle of its load."""
    keys: Mapping[str, Keys]
    """Per row the keys of the handle's objects."""
    view: View
    """Whose stores bring it."""
    moment: int
    """What was saved later is newer than its failures (`Coordinator.moment`)."""

    def end(self, failed: Mapping[str, Mask]) -> None:
        """Release its lease; what ``failed``, the next lookup does not promise again."""
        space = self.view.space
        space.leases.release(Attempt(str(self.load.request)))
        for row, mask in failed.items():
            space.coordinator.failed(row, self.keys[row][mask], moment=self.moment)
        if failed:
            metrics.ERRORS.labels(where="load").inc()
            border.complaints.say(
                "load", f"request {self.load.request}: objects of {', '.join(failed)} did not load"
            )


def plan_of(rows: Iterable[SpecRow]) -> tuple[LayerShards, ...]:
    """What each layer needs and finishes of the rows as a rank holds them, and what is asked for with it.

    >>> from ucm_core import Part, RowKind
    >>> row = SpecRow("full", RowKind.CHAIN, 16, tuple(range(3, 10)), (Part("k", (8,), "float32"),))
    >>> [(each.layer, each.needs) for each in plan_of([row])][:2]
    [(3, (('full', 0),)), (4, (('full', 1),))]
    >>> [each.slice for layer in plan_of([row]) for each in layer.brings]
    [slice(0, 1, None), slice(1, 6, None), slice(6, 7, None)]
    """
    needs: dict[int, list[Shard]] = defaultdict(list)
    for row in rows:
        for shard, layer in enumerate(row.units):
            needs[layer].append((row.name, shard))
    ordered, together = sorted(needs.items()), defaultdict[int, list[Shard]](list)
    for position, (_, shards) in enumerate(ordered):
        together[_asked_with(position)] += shards
    return tuple(
        LayerShards(layer, tuple(shards), runs(together[position]), finishes=runs(shards), rewrites=())
        for position, (layer, shards) in enumerate(ordered)
    )


def _asked_with(position: int) -> int:
    """The layer for whose sake this one is asked for: the first alone, then five, thirty, and so on.

    A call costs some hundred microseconds, as each copy leaves the caches cold, and copies are faster than
    layers: what is awaited waits for little that is not.

    >>> [_asked_with(position) for position in (0, 1, 2, 5, 6, 35, 36)]
    [0, 1, 1, 1, 6, 6, 36]
    """
    begin = min(position, 1)
    while 0 < begin * _GROWTH <= position:
        begin *= _GROWTH
    return begin


class LoadBatch:
    """The loads of one batch, from its start to its end; for SGLang's scheduler thread.

    ``is_current`` says whether a view is of the weights that SGLang computes with now.
    """

    def __init__(
        self,
        loads: Sequence[LinkedLoad | None],
        plan: Sequence[LayerShards],
        *,
        is_current: Callable[[View], bool],
        wait_s: float,
    ) -> None:
        """Submit the layers of all loads in order, the plan's; None stands for one that could not begin."""
        self._deadline_s = time.monotonic() + wait_s
        self._loads = [load for load in loads if load is not None]
        self._whole, self._is_current = len(self._loads) == len(loads), is_current
        self._plan, self._layers = tuple(plan), [each.layer for each in plan]
        self._reached = 0  # layers [0, reached) of the plan were waited for
        self._running = [RunningLoad(each.load) for each in self._loads]
        for position, layer in enumerate(plan):
            for load in self._running:
                load.submit([layer], urgency=position)

    @property
    def end_layer(self) -> int:
        """One more than the last layer that may have to wait; 0: none has to."""
        return self._layers[-1] + 1 if self._layers else 0

    def wait_until(self, layer: int) -> None:
        """Return when everything that ``layer`` and those before it need has come, or failed."""
        end = bisect_right(self._layers, layer)
        for needed in self._plan[self._reached : end]:
            for load in self._running:
                load.wait(needed, self._left_s)
        self._reached = max(self._reached, end)  # not before: another thread in this hook would not wait

    def finish(self) -> bool:
        """Whether everything came. Nothing is written to SGLang's memory any more when this returns.

        What did not come counts as absent from now on.
        """
        self.wait_until(self.end_layer)  # also for those that no pool waited for
        promised = Counter(row for layer in self._plan for row, _ in layer.needs)
        failures = [load.finish(promised, self._left_s) for load in self._running]
        self._quiesce()
        for load, failed in zip(self._loads, failures, strict=True):
            load.end(failed)
        current = all(self._is_current(load.view) for load in self._loads)
        return self._whole and current and not any(failures)

    def give_up(self) -> None:
        """Let nothing come any more; waits for what is being copied, not for a medium."""
        self._quiesce()
        for load in self._loads:
            load.end({})

    def _quiesce(self) -> None:
        for load in self._running:
            if not load.done:
                load.give_up()
            for handle in load.rows.values():
                handle.ticket.wait()

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())


def failed_batch() -> LoadBatch:
    """A batch of which nothing comes."""
    return LoadBatch([None], (), is_current=lambda _: False, wait_s=0.0)


class LayerCounter:
    """What SGLang's pools wait by, in the place of its own `LayerWiseLoadCounter`.

    ``first_layer`` is the model's number of the first layer of this pipeline stage.
    """

    def __init__(self, first_layer: int = 0) -> None:
        self.consumer_index = -1
        """The batch whose forward runs; -1: one without loads."""
        self._first_layer = first_layer
        self._begun = 0
        self._batches: dict[int, LoadBatch] = {}

    @property
    def num_layers(self) -> int:
        """Layers of this stage up to the last that may have to wait, for the batch whose forward runs.

        SGLang reads it to wait for all of them at once.
        """
        batch = self._batches.get(self.consumer_index)
        return 0 if batch is None else max(0, batch.end_layer - self._first_layer)

    def begin(self, batch: LoadBatch) -> int:
        """The number of a batch whose loads have begun."""
        index, self._begun = self._begun, self._begun + 1
        self._batches[index] = batch
        return index

    def set_consumer(self, index: int) -> None:
        """The forward of batch ``index`` begins; -1: of one without loads."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Return when the layers up to ``threshold`` of this stage may be read, or have failed."""
        batch = self._batches.get(self.consumer_index)
        if batch is not None:
            batch.wait_until(self._first_layer + threshold)

    def finish(self, index: int) -> bool:
        """Whether all of the batch came: of -1 nothing had to, and what is not there (any more) did not."""
        batch = self._batches.pop(index, None)
        return index < 0 if batch is None else batch.finish()

    def reset(self) -> None:
        """End all batches. Nothing is written to SGLang's memory any more when this returns."""
        self.consumer_index = -1
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            batch.give_up()
