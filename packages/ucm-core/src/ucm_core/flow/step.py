"""The loads and saves of one step: what was asked of their handles, and what became of it.

Only this module calls handles. What one of them raises is caught here, counted
(``ucm_errors_total{where="layer_hook"}``) and makes that load fail or that save be given up: no hook raises.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import ParamSpec

import numpy as np
import numpy.typing as npt

from ucm_core.flow.handles import ComputeEvent, UnitLoad, UnitSave
from ucm_core.flow.layers import LayerShards, Shard, Shards, runs
from ucm_core.flow.ticket import Codes, ResultCode
from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger

__all__ = ["Failed", "RunningLoad", "RunningSave", "StepLoad", "StepReport", "StepSave"]

_log = quiet_logger(__name__)
_P = ParamSpec("_P")
_chained = itertools.chain.from_iterable
_cancel, _seal, _abandon = methodcaller("cancel"), methodcaller("seal"), methodcaller("abandon")
"""Of a handle, looked up where `tried` catches what that raises."""

_PENDING = np.uint8(ResultCode.PENDING)

Mask = npt.NDArray[np.bool_]
Failed = Mapping[str, Mask]
"""By row, ``bool[objects]``: True where the bytes are not to be used."""


@dataclass(frozen=True, slots=True, eq=False)
class StepLoad:
    """What one request loads before a step's layers compute."""

    request: Hashable
    rows: Mapping[str, UnitLoad]


@dataclass(frozen=True, slots=True, eq=False)
class StepSave:
    """What one request saves of a step's layers."""

    request: Hashable
    rows: Mapping[str, UnitSave]


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """What became of a step."""

    failed: Mapping[Hashable, Failed] = field(default_factory=dict)
    """The requests whose loads failed, and which objects: the engine computes these again. A cancelled
    request is not among them."""
    given_up: frozenset[Hashable] = frozenset()
    """Requests whose saves of this step were given up: what they computed on a failed load is wrong."""
    busy: frozenset[Hashable] = frozenset()
    """Requests whose failed load may still write to its target: keep that until `LayerPipeline.unfinished` no
    longer has them."""
    unseen: tuple[int, ...] = ()
    """Layers that had something to load or to save and whose hook did not come."""
    units_saved_late: int = 0
    """Units that were saved at the end of the step, because their layer's hook did not come."""
    ignored: int = 0
    """Calls for layers that the map does not know."""
    exposed_s: float = 0.0
    """Time that hooks waited for loads."""
    depth: int = 0
    """Layers that were loaded ahead."""


class RunningLoad:
    """One request's load in the pipeline; used by the engine's thread only."""

    def __init__(self, load: StepLoad) -> None:
        self.request = load.request
        self.rows = load.rows
        self.reach = 0
        """Positions ``[0, reach)`` were submitted."""
        self.urgent = 0
        """Positions ``[0, urgent)`` are waited for."""
        self.computing_since_s: float | None = None
        """When its last layer began to compute."""
        self.together = sys.maxsize
        """How many layers at most are submitted by one call: as many as suit all rows."""
        self.small = True
        """Whether all rows are small copies."""
        self._given_up = False
        self._broken = False
        self._landed: set[Shard] = set()  # their codes are known: none of them changes
        self._settled: set[Shard] = set()  # and a layer waited for them
        self._failed: dict[str, Mask] = {row: np.zeros(0, dtype=np.bool_) for row in load.rows}
        for row in load.rows:
            self._broken |= not tried(self._meet, row)

    @property
    def done(self) -> bool:
        """Whether nothing writes to the targets any more."""
        return all(is_done(handle) for handle in self.rows.values())

    def submit(self, layers: Sequence[LayerShards], *, urgency: int, here: bool = False) -> list[bool]:
        """Ask for what ``layers`` need and no earlier one, or say that it is more urgent now.

        For each of them, whether there is anything to ask for. ``here``: see `UnitLoad.submit`.
        """
        each = [self._brought(layer) for layer in layers]
        for run in runs(_chained(_chained(each))):
            ask = methodcaller("submit", run.slice, urgency=urgency, here=here)
            self._broken |= not tried(ask, self.rows[run.row])
        return list(map(bool, each))

    def when_landed(self, layer: LayerShards, call: Callable[[], None]) -> None:
        """Call once, on any thread, when what was submitted for ``layer`` has landed or failed."""
        shards = [shard for run in layer.brings if run.row in self.rows for shard in run]
        count_down = countdown(len(shards), call)
        for row, number in shards:
            tried(_call_when_known, self.rows[row], number, count_down)

    def landed(self, layer: LayerShards) -> bool:
        """Whether `wait` would return at once."""
        return all(
            shard in self._settled or is_done(self.rows[shard[0]], shard[1])
            for shard in layer.needs
            if shard[0] in self.rows
        )

    def wait(self, layer: LayerShards, left_s: Callable[[], float]) -> None:
        """Wait for what ``layer`` needs, each shard once; what is not there in ``left_s()`` has failed.

        Then the whole load is given up: what else landed in time counts, nothing is waited for any more.
        """
        for shard in layer.needs:
            if shard[0] in self.rows and shard not in self._settled:
                if shard not in self._landed:  # most often it landed with one that was waited for before
                    self._broken |= not tried(self._settle, shard, 0.0 if self._given_up else left_s())
                self._settled.add(shard)  # not before: another thread in this hook would not wait

    def give_up(self) -> None:
        """Cancel what has not begun."""
        self._given_up = True
        for handle in self.rows.values():
            self._broken |= not tried(_cancel, handle)

    def finish(self, promised: Mapping[str, int], left_s: Callable[[], float]) -> Failed:
        """End the load with its step and return what failed; it may not be `done` even after ``left_s()``.

        ``promised`` is the number of shards of each row that layers of the stage need. A layer may have
        computed without the shards that nobody waited for, so then all objects have failed.
        """
        if len(self._settled) < sum(promised.get(row, 0) for row in self.rows):
            self._broken = True
        if not self.done:
            self.give_up()
            for handle in self.rows.values():
                self._broken |= not tried(wait_for, handle, left_s())
        for row in self.rows:
            self._broken |= not tried(self._note_all, row)
        if self._broken:
            return {row: np.ones_like(mask) for row, mask in self._failed.items()}
        return {row: mask for row, mask in self._failed.items() if mask.any()}

    def _brought(self, layer: LayerShards) -> list[Shards]:
        return [run for run in layer.brings if run.row in self.rows and not self._given_up]

    def _settle(self, shard: Shard, timeout_s: float) -> None:
        row, number = shard
        in_time = self.rows[row].ticket.wait(timeout_s, shard=number)
        codes = self.rows[row].ticket.results
        known = ~(codes == _PENDING).any(axis=0)
        self._landed.update((row, each) for each in np.flatnonzero(known).tolist())
        self._note(row, codes[:, number : number + 1])
        if not in_time and not self._given_up:
            _log.warning("request %s: unit %d of row %s did not come in time", self.request, number, row)
            self.give_up()

    def _note_all(self, row: str) -> None:
        self._note(row, self.rows[row].ticket.results)

    def _note(self, row: str, codes: Codes) -> None:
        """What has no good code by now has failed, whatever comes later."""
        if np.count_nonzero(codes):  # of `ResultCode.OK`, most often, there is nothing to note
            self._failed[row] |= codes.any(axis=1)

    def _meet(self, row: str) -> None:
        handle = self.rows[row]
        self._failed[row] = np.zeros(len(handle.ticket.results), dtype=np.bool_)
        self.together = min(self.together, handle.together)
        self.small &= handle.small


class RunningSave:
    """One request's save in the pipeline; used by the engine's thread only."""

    def __init__(self, save: StepSave, promised: Iterable[Shard]) -> None:
        self.request = save.request
        self.rows = save.rows
        self._missing = {shard for shard in promised if shard[0] in save.rows}
        self._stale: set[Shard] = set()
        self._given_up = False

    @property
    def done(self) -> bool:
        """Whether nothing reads the sources any more."""
        return all(is_done(handle) for handle in self.rows.values())

    def submit(self, layer: LayerShards, ready: ComputeEvent | None) -> int:
        """Save what ``layer`` finished, and again what it rewrote; the number of units saved first."""
        again = (run for run in layer.rewrites if not self._missing.issuperset(run))
        return self._submit((*layer.finishes, *again), ready)

    def expect(self, layer: LayerShards) -> None:
        """``layer`` computes once more: what was saved of it is not final."""
        written = (shard for run in (*layer.finishes, *layer.rewrites) for shard in run)
        self._stale.update(shard for shard in written if shard[0] in self.rows)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call once, on any thread, when all of it is published or given up."""
        count_down = countdown(len(self.rows), call)
        for handle in self.rows.values():
            tried(_call_when_known, handle, None, count_down)

    def finish(self, ready: ComputeEvent | None) -> int:
        """Save what no layer's last hook saved; no more comes. The number of units that none saved."""
        late = self._submit(runs(self._missing | self._stale), ready)
        for handle in self.rows.values():
            if not self._given_up and not tried(_seal, handle):
                self.give_up()
        return late

    def give_up(self) -> None:
        """Nothing that is not published will be."""
        self._given_up = True
        for handle in self.rows.values():
            tried(_abandon, handle)

    def _submit(self, shards: Iterable[Shards], ready: ComputeEvent | None) -> int:
        before = len(self._missing)
        for run in shards:
            handle = self.rows.get(run.row)
            if handle is None or self._given_up:
                continue
            if not tried(methodcaller("submit", run.slice, ready=ready), handle):
                self.give_up()
            self._missing.difference_update(run)
            self._stale.difference_update(run)
        return before - len(self._missing)


def tried(call: Callable[_P, object], /, *args: _P.args, **keywords: _P.kwargs) -> bool:
    """Make the call; False, counted and logged, where it raised."""
    try:
        call(*args, **keywords)
    except Exception as error:  # noqa: BLE001 (the border: a store's failure is no failure of the engine)
        metrics.ERRORS.labels(where="layer_hook").inc()
        _log.warning("a store could not do what a layer asked: %s", error)
        return False
    return True


def countdown(count: int, call: Callable[[], None]) -> Callable[[object], None]:
    """A function that calls ``call`` when it is called the ``count``-th time, by whatever threads."""
    left = itertools.count(1)

    def one_more(_: object) -> None:
        if next(left) == count:  # a step of this counter is one operation
            call()

    return one_more


def wait_for(handle: UnitLoad | UnitSave, timeout_s: float) -> bool:
    """Wait until all of a handle's codes are known."""
    return handle.ticket.wait(timeout_s)


def _call_when_known(
    handle: UnitLoad | UnitSave, shard: int | None, callback: Callable[[object], None]
) -> None:
    if shard is None:
        handle.ticket.add_done_callback(callback)
    else:
        handle.ticket.add_shard_callback(shard, callback)


def is_done(handle: UnitLoad | UnitSave, shard: int | None = None) -> bool:
    """Whether its codes are known; also where it cannot say: whoever acts on it hears of that."""
    try:
        return handle.ticket.wait(0.0, shard=shard)
    except Exception:  # noqa: BLE001 (the border, as above)
        return True
