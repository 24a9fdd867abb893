"""The worker's saves: blocks layer by layer, states at the end of the step, and when their memory is free.

A block that is saved layer by layer may be read after the step has ended. So vLLM must not write it before
the save is over: a finished request's blocks are kept until the worker says so (`WorkerSaves.collect`), and
what a step may overwrite (`StepPlan.overwritten`, and blocks that fall out of a window) is read to the end or
given up before that step begins (`WorkerSaves.settle`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from ucm_core.cache import Cache
from ucm_core.coordinator.completions import Completions
from ucm_core.flow.handles import UnitSave
from ucm_core.flow.pipeline import StepSave
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.ops import border
from ucm_core.spec.keys import Keys
from ucm_core.spec.table import RowKind, SpecTable
from ucm_vllm.engine_memory import EngineMemory
from ucm_vllm.metadata import RowTransfer, SavePlan, StepPlan, job_name
from ucm_vllm.worker_news import News

SETTLE_WAIT_S = 1.0
"""How long a step waits for saves that read what it may overwrite, before they are given up."""

ABANDON_WAIT_S = 30.0
"""How long it waits for what was given up to stop reading."""

PROMISE_WAIT_S = 30.0
"""How long a finished request's blocks are kept for its saves, before those are given up."""

IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for a save, instead of spinning through empty steps."""


class _OpenSave:
    """A save that may still read the engine's blocks."""

    def __init__(self, plan: SavePlan) -> None:
        self.plan = plan
        self.handles: dict[str, UnitSave] = {}
        """What comes layer by layer, by row."""
        self.step_is_over = False
        """What does not come layer by layer was copied, or dropped."""
        self.ends_s = math.inf
        """When it is given up, on the monotonic clock."""

    @property
    def done(self) -> bool:
        """Whether the engine may write its blocks."""
        return self.step_is_over and all(handle.ticket.done for handle in self.handles.values())

    def wait(self, deadline: float) -> bool:
        """Wait, until ``deadline`` on the monotonic clock, for what comes layer by layer."""
        each = [handle.ticket.wait(max(0.0, deadline - time.monotonic())) for handle in self.handles.values()]
        return all(each)


class WorkerSaves:
    """Saves under way; for the worker's thread."""

    def __init__(
        self, table: SpecTable, memory: EngineMemory, news: News, *, layerwise: bool, worker: int = 0
    ) -> None:
        self._table, self._memory, self._news = table, memory, news
        self._layerwise, self._worker = layerwise, worker
        self._windows = {row.name for row in table.rows if row.window is not None}
        self._completions = Completions()
        self._open: list[_OpenSave] = []
        self._step: list[_OpenSave] = []
        self._storing: list[tuple[str, Keys, Ticket]] = []
        self._writing: list[Ticket] = []

    @property
    def open_count(self) -> int:
        """Saves that still read engine blocks."""
        return len(self._open)

    def settle(self, plan: StepPlan) -> None:
        """Before the step writes anything: no older save reads what it may overwrite."""
        self._end([save for save in self._open if self._is_at_risk(save, plan)])

    def begin_step(self, cache: Cache | None, plan: StepPlan) -> list[StepSave]:
        """Begin the saves of the step that come layer by layer."""
        self._end_step()
        self._step = [_OpenSave(save) for save in plan.saves]
        self._open += self._step
        for save in self._step:
            if save.plan.job:
                self._completions.submit(save.plan.attempt, save.plan.job)
            if cache is not None:
                self._begin(cache, save)
        return [StepSave(save.plan.request_id, save.handles) for save in self._step if save.handles]

    def give_up_step(self) -> None:
        """Keep nothing of what the step has begun."""
        for save in self._step:
            self._give_up(save)

    def end_step(self, cache: Cache | None, *, trusted: bool) -> None:
        """Save what does not come layer by layer; all of it has been copied when this returns.

        Not ``trusted``: the step may have computed on garbage, and nothing of it is kept.
        """
        for save in self._step:
            if cache is None or not trusted:
                self._give_up(save)
            else:
                self._save_whole(cache, save)
        self._end_step()

    def collect(self, plan: StepPlan) -> set[str]:
        """Requests that were promised and whose blocks are not read any more; each once.

        A medium that hangs keeps no blocks for ever: saves that take too long are given up.
        """
        now_s = time.monotonic()
        for attempt in plan.promised:
            self._completions.promise(attempt)
        for save in self._open:
            if save.plan.attempt in plan.promised:
                save.ends_s = now_s + PROMISE_WAIT_S
            if save.ends_s <= now_s:
                save.ends_s = math.inf
                self._give_up(save)
        if plan.idle and self._open:
            self._open[0].wait(time.monotonic() + IDLE_WAIT_S)
        self._end_done()
        return {attempt.request_id for attempt in self._completions.poll()}

    def report(self) -> None:
        """Note what the store has got since the last report."""
        self._end_done()
        storing, self._storing = self._storing, []
        for row, keys, ticket in storing:
            if not ticket.done:
                self._storing.append((row, keys, ticket))
                continue
            kept = ticket.stored
            if kept.any():
                self._news.stored.append((row, keys[kept]))
        self._writing = [
            ticket for ticket in self._writing if (ticket.durable_results == ResultCode.PENDING).any()
        ]

    def wait_durable(self, timeout_s: float) -> bool:
        """Wait until all that was not given up is on the medium; False when some is not, or not in time."""
        deadline = time.monotonic() + timeout_s
        return all(ticket.wait_durable(max(0.0, deadline - time.monotonic())) for ticket in self._writing)

    def close(self) -> None:
        """Let saves read to the end, or give them up: the engine takes its memory back."""
        self._end_step()
        self._end(self._open)
        self._end_done()

    def check_integrity(self) -> None:
        """SpecError when the books do not balance."""
        self._completions.check_integrity()

    # -- private

    def _is_at_risk(self, save: _OpenSave, plan: StepPlan) -> bool:
        """Whether the step may write what the save reads: vLLM frees blocks that fall out of a window."""
        return save.plan.request_id in plan.overwritten or not self._windows.isdisjoint(save.handles)

    def _comes_by_layer(self, transfer: RowTransfer) -> bool:
        return self._layerwise and self._table.row(transfer.row).kind is not RowKind.SNAPSHOT

    def _begin(self, cache: Cache, save: _OpenSave) -> None:
        for transfer in filter(self._comes_by_layer, save.plan.rows):
            try:
                handle = cache.stores[transfer.row].begin_save(
                    transfer.keys, self._memory.source(transfer), parents=transfer.parents, absent=True
                )
            except Exception as error:  # noqa: BLE001 (the border: these bytes are not kept, the engine goes on)
                self._failed(save, error)
            else:
                save.handles[transfer.row] = handle
                self._note(transfer, handle.ticket)

    def _save_whole(self, cache: Cache, save: _OpenSave) -> None:
        for transfer in save.plan.rows:
            if self._comes_by_layer(transfer):
                continue
            try:
                store, source = cache.stores[transfer.row], self._memory.source(transfer)
                ticket = store.save(transfer.keys, source, parents=transfer.parents, absent=True)
                self._note(transfer, ticket)
            except Exception as error:  # noqa: BLE001 (the border: these bytes are not kept, the engine goes on)
                self._failed(save, error)

    def _note(self, transfer: RowTransfer, ticket: Ticket) -> None:
        self._storing.append((transfer.row, transfer.keys, ticket))
        self._writing.append(ticket)

    def _failed(self, save: _OpenSave, error: Exception) -> None:
        border.failed("save", error)
        self._news.dropped.add(save.plan.request_id)

    def _give_up(self, save: _OpenSave) -> None:
        """Keep nothing of it that is not published; the scheduler half may plan it again."""
        self._news.dropped.add(save.plan.request_id)
        for handle in save.handles.values():
            self._writing = [ticket for ticket in self._writing if ticket is not handle.ticket]
            try:
                handle.abandon()
            except Exception as error:  # noqa: BLE001 (the border)
                border.failed("save", error)

    def _end(self, saves: Iterable[_OpenSave]) -> None:
        """Wait until they read no more; those that take too long are given up first."""
        deadline = time.monotonic() + SETTLE_WAIT_S
        late = [save for save in saves if not save.wait(deadline)]
        for save in late:
            self._give_up(save)
        deadline = time.monotonic() + ABANDON_WAIT_S
        for save in late:
            if not save.wait(deadline):
                border.complaints.say(
                    "settle",
                    f"request {save.plan.request_id}: a save that was given up reads on",
                )

    def _end_step(self) -> None:
        for save in self._step:
            save.step_is_over = True
        self._step = []

    def _end_done(self) -> None:
        still_open = []
        for save in self._open:
            if not save.done:
                still_open.append(save)
            elif save.plan.job:
                self._completions.end(save.plan.attempt, save.plan.job)
                self._news.saved.append((save.plan.attempt, job_name(save.plan.job, self._worker)))
        self._open = still_open
