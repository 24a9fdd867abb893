"""Saves whose shards come one unit at a time (`ucm_core.flow.handles.UnitSave`).

::

    begin          present: OK; a slot: ours to fill; no slot, or somebody else fills it: late
    submit         gathered into the slots, one submission after the other, each after its event
    seal           all shards there: publish, hand to the writer; then the late ones, whole, as `Save` does
                   a shard is missing: given up, CANCELLED
    abandon        CANCELLED at once, whatever is queued; what is being gathered, when that is over

One thread at a time works on a save. Submissions are gathered in their order; a shard that was submitted
again is gathered for the last of them only. So no earlier bytes land after later ones.
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
from ucm_core.store.arrays import Mask
from ucm_core.store.held import HeldSlots
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
class _Piece:
    """A piece of work of one save."""

    priority: Priority
    work: Callable[[], _Piece | None]
    """Returns what follows; None: nothing before somebody asks for more."""


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
        self._untold: Mask = np.ones(len(order.batch), dtype=np.bool_)  # neither kept nor counted as failed
        self._busy = False  # a piece of work is queued, or running
        self._running = self._sealed = self._over = False

    @classmethod
    def begin(cls, order: SaveOrder, desk: UnitDesk, *, writer: Writer) -> ShardSave:
        """Claim slots without waiting; what is present is settled."""
        save = cls(order, desk, writer=writer)
        try:
            if desk.enter(save):
                desk.run(partial(save._run, _Piece(Priority.GATHER, save._claim)), otherwise=save._give_up)
            else:
                save._over = True
                order.ticket.settle_rest(ResultCode.CANCELLED)
        except BaseException:  # a signal's handler ended this call: nobody else will end the save
            save.abandon()
            raise
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
            self._queue(self._gathering)

    def seal(self) -> None:
        """No more shards come; see `ucm_core.flow.handles.UnitSave.seal`."""
        with self._lock:
            first = not (self._sealed or self._over)
            self._sealed = True
            start = first and self._start()
        if start:
            self._queue(self._gathering)

    def abandon(self) -> None:
        """Give up what is not published; at once, unless a thread gathers right now."""
        self.ticket.cancel()
        with self._lock:
            now = not (self._running or self._over)  # else who runs sees it
            self._over |= now
        if now:
            self._give_up(ResultCode.CANCELLED)
        self.ticket.abandon()  # also while who runs is held up by a medium

    def close(self) -> None:
        """What is sealed is kept, all else abandoned."""
        if not self._sealed:
            self.abandon()

    # -- begin

    def _claim(self) -> None:
        batch = self._order.batch
        present = self._tiers.on_file(batch.keys, absent=self._order.absent)
        if present.any():
            self._untold[present] = False
            self.ticket.settle_present(batch.positions(np.flatnonzero(present)))
        ids = np.flatnonzero(~present)
        self._late = self._mine.claim(batch.keys[ids], batch.parents(ids), ids=ids)
        self._keep(*self._mine.take_full())
        if not (self._mine.ids.size or self._late.size):
            self._leave()

    # -- one thread at a time

    def _start(self) -> bool:
        """Whether nobody is busy with it yet; somebody is from now on."""
        start, self._busy = not self._busy, True
        return start

    @property
    def _gathering(self) -> _Piece:
        return _Piece(Priority.GATHER, self._gather_all)

    def _queue(self, piece: _Piece) -> None:
        self._desk.queue(piece.priority, partial(self._run, piece), otherwise=self._give_up)

    def _run(self, piece: _Piece) -> None:
        """Do a piece of work, unless all was given up while it was queued, and queue what follows."""
        with self._lock:
            self._running = not self._over
        if not self._running:
            return
        following = piece.work()
        with self._lock:
            self._running = False
            if self._over:
                return
            if following is None and (self._waiting or self._sealed):
                following = self._gathering  # it came just now
            self._busy = following is not None
            self._over = self.ticket.cancelled
        if self._over:
            self._give_up(ResultCode.CANCELLED)
        elif following is not None:
            self._queue(following)

    def _gather_all(self) -> _Piece | None:
        """Gather what was submitted, in order, until nothing is left or an event is not reached."""
        while (submission := self._next()) is not None:
            wanted = self._wanted(submission)
            if wanted.size and not (submission.ready is None or submission.ready.wait(SLICE_S)):
                if time.monotonic() < submission.deadline:
                    return _Piece(Priority.WAIT, self._gather_all)
                metrics.ERRORS.labels(where="compute_event").inc()
                wanted = wanted[:0]
            for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1):
                self._gather(submission, run)
            with self._lock:
                self._waiting.popleft()
        with self._lock:
            ends = self._sealed and not (self._waiting or self.ticket.cancelled)
        return self._end() if ends else None

    def _next(self) -> _Submission | None:
        with self._lock:
            return self._waiting[0] if self._waiting and not self.ticket.cancelled else None

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
            first, addresses = self._order.batch.first[mine], self._mine.addresses
            with self.ticket.copying() as wanted:
                if not wanted:
                    return
                codes = copy_each(gather, first, address=addresses, who="a source")
            if np.count_nonzero(codes):
                self._fail(self._mine.abort(codes != ResultCode.OK), ResultCode.INVALID)
        with self._lock:
            self._gathered[begin:end] |= self._newest[begin:end] == submission.number

    # -- the end

    def _end(self) -> _Piece | None:
        """Publish what has all; what is late follows."""
        if not self._gathered.all():
            self._give_up(ResultCode.CANCELLED)
            return None
        self._publish()
        if not self._late.size:
            self._leave()
            return None
        deadline = time.monotonic() + self._tiers.limits.save_wait_s
        return _Piece(Priority.WAIT, partial(self._await_others, deadline))

    def _leave(self) -> None:
        self._over = True
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
        if ids.size:
            self._untold[ids] = False
            self._writer.saved_in_ring.inc(ids.size)
            self._order.batch.settle(self.ticket, ids, codes=ResultCode.OK)
            self._writer.write(WriteOrder(self._order.batch, self.ticket, ids), payloads)

    def _await_others(self, deadline: float) -> _Piece:
        """Wait a little for who fills the same keys; then save what is late as a whole."""
        with HeldSlots(self._tiers.ring) as held:
            held.pin(self._order.batch.keys[self._late])
            loading = held.places(Outcome.LOADING)
            held.wait(loading, SLICE_S)
        if loading.size and time.monotonic() < deadline:
            return _Piece(Priority.WAIT, partial(self._await_others, deadline))
        return _Piece(Priority.WRITE, self._save_late)

    def _save_late(self) -> None:
        order = self._order
        save = Save(self._tiers, self._writer, order.batch, order.ticket, source=order.source)
        save.run(on_io_thread=True, ids=self._late)
        self._untold[self._late] = False
        self._leave()

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
        """Count and settle what has no code."""
        if ids.size:
            untold = self._order.batch.positions(ids[self._untold[ids]])
            self._untold[ids] = False
            count_failures("save", np.full(untold.size, code, dtype=np.uint8))
            self._order.batch.settle(self.ticket, ids, codes=code)
