"""Saves whose shards come one unit at a time (`ucm_core.flow.handles.UnitSave`).

::

    begin          present: OK; a slot: ours to fill; no slot, or somebody else fills it: late
    submit         gathered into the slots, one submission after the other, each after its event
    seal           all shards there: publish, hand to the writer; then the late ones, whole, as `Save` does
                   a shard is missing: given up, CANCELLED

Submissions of one save are gathered by one thread at a time, in their order; a shard that was submitted again
is gathered for the last of them only. So no earlier bytes land after later ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ucm_core import _native
from ucm_core.flow.copy import BlockSource, Int64s
from ucm_core.flow.handles import ComputeEvent
from ucm_core.flow.own import OwnCondition
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.store.payloads import SlotPayloads
from ucm_core.store.pool import Priority
from ucm_core.store.ring import Outcome
from ucm_core.store.saving import Save
from ucm_core.store.tiers import KeyBatch, copy_each, count_failures
from ucm_core.store.unit_slots import OwnedSlots
from ucm_core.store.unit_work import SLICE_S, UnitDesk, bytes_of, shard_range
from ucm_core.store.writing import WriteOrder, Writer


@dataclass(frozen=True, slots=True, eq=False)
class SaveOrder:
    """What one save asks for."""

    batch: KeyBatch
    ticket: Ticket
    source: BlockSource
    absent: bool = False
    """Whether the caller has just looked, and no key was on the medium."""


@dataclass(frozen=True, slots=True, eq=False)
class _Submission:
    """One call of `ShardSave.submit`."""

    number: int
    begin: int
    end: int
    ready: ComputeEvent | None
    deadline: float


class ShardSave:
    """One save by units of a `ucm_core.store.block.BlockStore`."""

    def __init__(self, order: SaveOrder, desk: UnitDesk, *, writer: Writer) -> None:
        self._order, self._desk, self._tiers, self._writer = order, desk, desk.tiers, writer
        self._geometry = desk.tiers.files.geometry
        self._lock = OwnCondition()
        self._mine = OwnedSlots(desk.tiers.ring)
        self._late: Int64s = np.zeros(0, dtype=np.int64)
        self._newest = np.zeros(self._geometry.shards, dtype=np.int64)  # submission, by shard; 0 = none
        self._gathered = np.zeros(self._geometry.shards, dtype=np.bool_)  # of the newest submission
        self._waiting: deque[_Submission] = deque()
        self._working = self._sealed = self._over = False

    @classmethod
    def begin(cls, order: SaveOrder, desk: UnitDesk, *, writer: Writer) -> ShardSave:
        """Claim slots without waiting; what is present is settled."""
        save = cls(order, desk, writer=writer)
        if desk.enter(save):
            desk.run(save._claim, otherwise=save._give_up)
        else:
            save._over = True
            order.ticket.settle_rest(ResultCode.CANCELLED)
        return save

    @property
    def ticket(self) -> Ticket:
        """Codes of each object."""
        return self._order.ticket

    def submit(self, shards: slice, *, ready: ComputeEvent | None = None) -> None:
        """Gather these shards; see `ucm_core.flow.handles.UnitSave.submit`."""
        begin, end = shard_range(shards, self._geometry)
        deadline = time.monotonic() + self._tiers.limits.event_wait_s
        with self._lock:
            if self._sealed or self._over:
                return
            number = int(self._newest.max()) + 1
            self._newest[begin:end] = number
            self._gathered[begin:end] = False
            self._waiting.append(_Submission(number, begin, end, ready, deadline))
            start = self._start()
        if start:
            self._queue_work(Priority.GATHER)

    def seal(self) -> None:
        """No more shards come; see `ucm_core.flow.handles.UnitSave.seal`."""
        with self._lock:
            first = not (self._sealed or self._over)
            self._sealed = True
            start = first and self._start()
        if start:
            self._queue_work(Priority.GATHER)

    def abandon(self) -> None:
        """Give up what is not published."""
        self.ticket.cancel()
        with self._lock:
            now = not (self._working or self._over)  # else who works sees it
            self._over |= now
        if now:
            self._give_up(ResultCode.CANCELLED)

    def close(self) -> None:
        """What is sealed is kept, all else abandoned."""
        if not self._sealed:
            self.abandon()

    # -- begin

    def _claim(self) -> None:
        batch, ring = self._order.batch, self._tiers.ring
        present = self._tiers.on_file(batch.keys, absent=self._order.absent)
        if present.any():
            self.ticket.settle_present(batch.positions(np.flatnonzero(present)))
        ids = np.flatnonzero(~present)
        claims = ring.claim(batch.keys[ids], batch.parents(ids))
        outcome = claims.outcome
        owned, full = outcome == Outcome.OWNER, outcome == Outcome.READY
        self._mine.take(ids[owned], claims.slots[owned], versions=claims.version[owned])
        others = claims.slots[outcome == Outcome.LOADING]
        if others.size:
            ring.release(others)  # they are looked for again when all is gathered
        self._late = ids[~owned & ~full]
        if full.any():
            self._keep(ids[full], SlotPayloads(ring, claims.slots[full]))
        if not (self._mine.ids.size or self._late.size):
            self._over = True
            self._desk.leave(self)

    # -- one thread at a time

    def _start(self) -> bool:
        """Whether nobody works yet; somebody does from now on."""
        start, self._working = not self._working, True
        return start

    def _queue_work(self, priority: Priority) -> None:
        self._queue(priority, self._work)

    def _work(self) -> None:
        """Gather what was submitted, in order, until nothing is left or an event is not reached."""
        while (submission := self._next()) is not None:
            wanted = self._wanted(submission)
            if wanted.size and not (submission.ready is None or submission.ready.wait(SLICE_S)):
                if time.monotonic() < submission.deadline:
                    self._queue_work(Priority.WAIT)
                    return
                metrics.ERRORS.labels(where="compute_event").inc()
                wanted = wanted[:0]
            for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1):
                self._gather(submission, run)
            with self._lock:
                self._waiting.popleft()
        if self._ends():
            self._end()

    def _next(self) -> _Submission | None:
        with self._lock:
            return self._waiting[0] if self._waiting and not self.ticket.cancelled else None

    def _ends(self) -> bool:
        """Whether this thread ends the save; else whoever submits next begins again."""
        with self._lock:
            if self._waiting and not self.ticket.cancelled:
                self._queue_work(Priority.GATHER)  # it came just now
                return False
            self._working = False
            ends = not self._over and (self._sealed or self.ticket.cancelled)
            self._over |= ends
            return ends

    def _wanted(self, submission: _Submission) -> Int64s:
        """The shards that were not submitted again."""
        window = self._newest[submission.begin : submission.end]
        return submission.begin + np.flatnonzero(window == submission.number)

    def _gather(self, submission: _Submission, shards: Int64s) -> None:
        """Gather neighbouring shards of every object that has a slot; those that raise are given up."""
        if not shards.size:
            return
        begin, end = int(shards[0]), int(shards[-1]) + 1
        mine = self._mine.ids
        if mine.size:
            gather = partial(self._order.source.gather, span=bytes_of((begin, end), self._geometry))
            first = self._order.batch.first[mine]
            codes = copy_each(gather, first, address=self._mine.addresses, who="a source")
            if np.count_nonzero(codes):
                self._fail(self._mine.abort(codes != ResultCode.OK), ResultCode.INVALID)
        with self._lock:
            self._gathered[begin:end] |= self._newest[begin:end] == submission.number

    # -- the end

    def _end(self) -> None:
        if self.ticket.cancelled or not self._gathered.all():
            self._give_up(ResultCode.CANCELLED)
            return
        self._publish()
        if self._late.size:
            deadline = time.monotonic() + self._tiers.limits.save_wait_s
            self._queue(Priority.WAIT, partial(self._await_others, deadline))
        else:
            self._desk.leave(self)

    def _publish(self) -> None:
        if not self._mine.ids.size:
            return
        geometry = self._geometry
        if geometry.shard_bytes != geometry.stride:
            _native.zero_padding(self._mine.addresses, geometry.shards, geometry.shard_bytes, geometry.stride)
        ids, payloads = self._mine.publish()
        self._keep(ids, payloads)
        self._fail(self._mine.abort(), ResultCode.UNAVAILABLE)  # not ours any more

    def _keep(self, ids: Int64s, payloads: SlotPayloads) -> None:
        """Settle what the ring holds, and hand its slots to the writer."""
        self._order.batch.settle(self.ticket, ids, codes=ResultCode.OK)
        self._writer.saved_in_ring.inc(ids.size)
        self._writer.write(WriteOrder(self._order.batch, self.ticket, ids), payloads)

    def _await_others(self, deadline: float) -> None:
        """Wait a little for who fills the same keys; then save what is late as a whole."""
        ring = self._tiers.ring
        claims = ring.pin(self._order.batch.keys[self._late])
        loading = claims.outcome == Outcome.LOADING
        try:
            ring.wait(claims.slots[loading], claims.version[loading], timeout_s=SLICE_S)
        finally:
            ring.release(claims.slots[claims.slots >= 0])
        if loading.any() and time.monotonic() < deadline and not self.ticket.cancelled:
            self._queue(Priority.WAIT, partial(self._await_others, deadline))
        else:
            self._queue(Priority.WRITE, self._save_late)

    def _save_late(self) -> None:
        order = self._order
        save = Save(self._tiers, self._writer, order.batch, order.ticket, source=order.source)
        save.run(on_io_thread=True, ids=self._late)
        self._desk.leave(self)

    def _queue(self, priority: Priority, work: Callable[[], None]) -> None:
        self._desk.queue(priority, work, otherwise=self._give_up)

    def _give_up(self, code: ResultCode) -> None:
        """Everything that has no code gets this one; nobody works on it any more."""
        with self._lock:
            self._over = True
            self._waiting.clear()
        try:
            self._mine.abort()
        finally:
            self._fail(np.arange(len(self._order.batch)), code)
            if code == ResultCode.UNAVAILABLE:
                self.ticket.settle_rest(code)
            self._desk.leave(self)

    def _fail(self, ids: Int64s, code: ResultCode) -> None:
        """Settle and count what has no code."""
        if ids.size:
            positions = self._order.batch.positions(ids)
            pending = int(np.count_nonzero(self.ticket.object_results[positions] == ResultCode.PENDING))
            count_failures("save", np.full(pending, code, dtype=np.uint8))
            self.ticket.settle(positions, code)
