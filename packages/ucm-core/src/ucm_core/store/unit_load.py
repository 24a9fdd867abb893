"""Loads whose shards come one unit at a time (`ucm_core.flow.handles.UnitLoad`).

::

    begin          claim slots; queue the reads of what we own, shard 0 of all objects first
    a read         file -> slot, `Ring.publish_shards`, so that all processes share it
    submit         what is here is copied, by urgency; what others read is awaited in short slices; what has
                   no slot is read now, these shards only, into private memory

An object fails as a whole: what of it was copied before stays ``OK``, everything else is named.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from ucm_core.flow.copy import Int64s
from ucm_core.flow.own import OwnCondition
from ucm_core.flow.ticket import Codes, ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.store.arrays import Mask
from ucm_core.store.loading import LoadOrder
from ucm_core.store.payloads import PrivateMemory
from ucm_core.store.pool import Priority
from ucm_core.store.ring import Outcome
from ucm_core.store.tiers import CHUNK_BYTES, COPY_CHUNKS, copy_each, count_failures
from ucm_core.store.unit_states import Taken, UnitStates
from ucm_core.store.unit_work import SLICE_S, UnitDesk, bytes_of, shard_range

READ_BYTES = 256 << 10
"""What one read of a file moves at least: neighbouring shards go together."""
TOGETHER_BYTES = 128 << 20
"""What is copied for one call at most: ten milliseconds. Each call and its thread disturb the layers that
compute meanwhile for longer than its copy takes."""
_NOT_ASKED = np.iinfo(np.int64).max
_NONE = np.zeros(0, dtype=np.bool_)


class ShardLoad:
    """One load by units of a `ucm_core.store.block.BlockStore`."""

    def __init__(self, order: LoadOrder, desk: UnitDesk) -> None:
        self._order, self._desk, self._tiers = order, desk, desk.tiers
        self._geometry = desk.tiers.files.geometry
        self._lock = OwnCondition()
        self._hold = desk.tiers.ring.hold()  # places are ids
        self._states = UnitStates(len(order.batch), self._geometry.shards)
        self._everything = np.arange(len(order.batch))
        self._addresses: Int64s = np.zeros(len(order.batch), dtype=np.int64)
        self._urgency = np.full(self._geometry.shards, _NOT_ASKED)
        self._together, self._small = 1, False

    @classmethod
    def begin(cls, order: LoadOrder, desk: UnitDesk) -> ShardLoad:
        """Claim what is there, and begin to read what is not."""
        load = cls(order, desk)
        try:
            if not desk.enter(load):
                order.ticket.settle_rest(ResultCode.CANCELLED)
            else:
                desk.run(load._claim, otherwise=load._give_up)
        except BaseException:  # a signal's handler ended this call: nobody else will end the load
            load.cancel()
            raise
        return load

    @property
    def ticket(self) -> Ticket:
        """Codes of each shard of each object."""
        return self._order.ticket

    @property
    def together(self) -> int:
        """What the ring holds goes together, all of it where that is small; else each shard goes alone."""
        return self._together

    @property
    def small(self) -> bool:
        """Whether the ring holds all of it, and it is one piece."""
        return self._small

    def submit(self, shards: slice, *, urgency: int = 0, here: bool = False) -> None:
        """Bring these shards; see `ucm_core.flow.handles.UnitLoad.submit`."""
        wanted = shard_range(shards, self._geometry)
        with self._lock:
            asked = self._urgency[slice(*wanted)]
            new = bool((asked == _NOT_ASKED).any())
            np.minimum(asked, urgency, out=asked)
            awaited = self._states.awaited(wanted).size > 0
        if not new or self._is_over():
            return
        if here and self._small:
            self._desk.run(partial(self._copy_here, wanted), otherwise=self._give_up)
            return
        self._bring(wanted, rank=urgency)
        if awaited:
            deadline = time.monotonic() + self._tiers.limits.load_wait_s
            self._queue(Priority.WAIT, partial(self._await, wanted, deadline))

    def cancel(self) -> None:
        """What nobody copies now is ``CANCELLED``, also while a file is read for it.

        The target is free when the ticket is done.
        """
        self.ticket.cancel()
        self._give_up(ResultCode.CANCELLED)
        self.ticket.abandon()

    def close(self) -> None:
        """As `cancel`."""
        self.cancel()

    # -- begin

    def _claim(self) -> None:
        if self._is_over():
            return
        batch, ring = self._order.batch, self._tiers.ring
        if self._tiers.files.keeps:
            parents = batch.parents(self._everything)
            claims = ring.claim(batch.keys, parents, demand=True, hold=self._hold)
        else:
            claims = ring.pin(batch.keys, hold=self._hold)  # nothing could fill a slot
        with self._lock:
            self._states.claim(claims)
        if (claims.outcome == Outcome.READY).all():
            self._together, self._small = self._copied_together()
        held = claims.slots >= 0
        self._addresses[held] = ring.addresses(claims.slots[held])
        self._fail(np.flatnonzero(claims.outcome == Outcome.ABSENT), ResultCode.MISS)
        self._queue_reads(np.flatnonzero(claims.outcome == Outcome.OWNER))
        self._let_go()

    def _copied_together(self) -> tuple[int, bool]:
        """How many shards, of a load that is not small never all of several; and whether it is small."""
        shards, stride = self._geometry.shards, max(1, len(self._order.batch)) * self._geometry.stride
        if shards * stride <= CHUNK_BYTES:
            return shards, True
        return max(1, min(shards - 1, TOGETHER_BYTES // stride)), False

    def _queue_reads(self, ids: Int64s) -> None:
        """Shards before objects: the first of all objects come before the second of any."""
        stride, shards, threads = self._geometry.stride, self._geometry.shards, self._tiers.pool.threads
        together = max(1, READ_BYTES // stride)
        size = max(1, min(CHUNK_BYTES // (together * stride), -(-ids.size // threads)))
        for begin in range(0, shards if ids.size else 0, together):
            part = (begin, min(begin + together, shards))
            for place in range(0, ids.size, size):
                piece = partial(self._read, ids[place : place + size], part)
                self._queue(Priority.READ, piece, rank=begin)

    # -- pieces of work

    def _read(self, ids: Int64s, shards: tuple[int, int]) -> None:
        """Read what we own, and let everybody have it."""
        if self._is_over():
            return
        with self._lock:
            ids = self._states.enter(ids)
            slots, versions = self._states.slots[ids], self._states.versions[ids]
        if not ids.size:
            return
        good: Mask = np.zeros(ids.size, dtype=np.bool_)
        try:
            codes = self._tiers.files.read(self._order.batch.keys[ids], self._addresses[ids], shards=shards)
            whole = np.flatnonzero(~codes.any(axis=1))
            good[whole] = self._tiers.ring.publish_shards(
                slots[whole], versions[whole], begin=shards[0], end=shards[1]
            )
            codes[whole[~good[whole]]] = ResultCode.UNAVAILABLE  # the slot is not ours any more
        finally:
            with self._lock:
                self._states.arrive(ids[good], shards)
                self._states.leave(ids)
            self._let_go()
        self._fail(ids[~good], codes[~good], shards=shards)
        self._bring_asked(shards)

    def _copy_here(self, shards: tuple[int, int]) -> None:
        """Copy what lies in slots."""
        while not self._is_over() and (taken := self._take(shards, here=True)) is not None:
            self._deliver(taken, self._addresses[taken.ids])
            if taken.shards == shards and taken.ids.size == len(self._everything):
                break  # most often: there is no more

    def _copy_past_ring(self, shards: tuple[int, int]) -> None:
        """Read what has no slot into private memory, one piece per thread, and copy it from there."""
        while not self._is_over() and (taken := self._take(shards, here=False)) is not None:
            begin, end = bytes_of(taken.shards, self._geometry)
            codes = np.full((taken.ids.size, taken.end - taken.begin), ResultCode.UNAVAILABLE, dtype=np.uint8)
            keys = self._order.batch.keys[taken.ids]
            try:
                memory = PrivateMemory(taken.ids.size, end - begin)
                addresses = memory.addresses - begin
                codes = self._tiers.files.read(keys, addresses, shards=taken.shards)
            finally:
                bad: Mask = codes.max(axis=1) != ResultCode.OK
                with self._lock:
                    self._states.put_back(taken.part(bad))
                self._fail(taken.ids[bad], codes[bad], shards=taken.shards)
            self._deliver(taken.part(~bad), addresses[~bad])

    def _await(self, shards: tuple[int, int], deadline: float) -> None:
        """Wait a little for what others read; what they do not bring is read past the ring."""
        if self._is_over():
            return
        with self._lock:
            ids = self._states.enter(self._states.awaited(shards))
        lost = np.zeros(ids.size, dtype=np.bool_)
        try:
            for shard in range(*shards) if ids.size else ():
                lost |= self._look(ids, shard, timeout_s=SLICE_S if shard == shards[0] else 0.0)
        finally:
            with self._lock:
                self._states.leave(ids)
        with self._lock:
            late = self._states.awaited(shards)
            self._states.pass_ring(late if time.monotonic() >= deadline else np.intersect1d(late, ids[lost]))
            again = self._states.awaited(shards).size > 0
        self._let_go()
        self._bring_asked(shards)
        if again:
            self._queue(Priority.WAIT, partial(self._await, shards, deadline))

    def _look(self, ids: Int64s, shard: int, *, timeout_s: float) -> Mask:
        """Note for which of ``ids`` others have published this shard; where they gave up, ``bool[n]``."""
        slots, versions = self._states.slots[ids], self._states.versions[ids]
        outcome = self._tiers.ring.wait(slots, versions, timeout_s=timeout_s, shard=shard)
        with self._lock:
            self._states.arrive(ids[outcome == Outcome.READY], (shard, shard + 1))
        gave_up: Mask = outcome == Outcome.FAILED
        return gave_up

    # -- private

    def _is_over(self) -> bool:
        """Whether nobody wants it any more; then it is given up."""
        if self._order.cancelled:
            self._give_up(ResultCode.CANCELLED)
        return self._order.cancelled

    def _queue(self, priority: Priority, work: Callable[[], None], *, rank: int = 0) -> None:
        self._desk.queue(priority, work, otherwise=self._give_up, rank=rank)

    def _bring_asked(self, shards: tuple[int, int]) -> None:
        """Copy what has come of the shards that were asked for, neighbours of one urgency together."""
        with self._lock:
            asked = self._urgency[slice(*shards)].tolist()
        begin = shards[0]
        for urgency, group in itertools.groupby(asked):
            end = begin + len(list(group))
            if urgency != _NOT_ASKED:
                self._bring((begin, end), rank=urgency)
            begin = end

    def _bring(self, shards: tuple[int, int], *, rank: int) -> None:
        """Queue copies of what can be copied of these shards."""
        with self._lock:
            here, without_slot = self._states.ready(shards)
        size = here * self._geometry.stride
        for _ in range(min(self._tiers.pool.copy_threads, -(-size // CHUNK_BYTES))):
            self._queue(Priority.COPY, partial(self._copy_here, shards), rank=rank)
        if without_slot:
            self._queue(Priority.LOAD, partial(self._copy_past_ring, shards), rank=rank)

    def _take(self, shards: tuple[int, int], *, here: bool) -> Taken | None:
        limit = max(1, CHUNK_BYTES // ((shards[1] - shards[0]) * self._geometry.stride))
        if here:  # as `Tiers.chunks` cuts copies
            share = max(limit, -(-len(self._everything) // self._tiers.pool.copy_threads))
            limit = min(COPY_CHUNKS * limit, share)
        with self._lock:
            return self._states.take(shards, limit, here=here)

    def _deliver(self, taken: Taken, addresses: Int64s) -> None:
        """Copy verified shards to their positions, then settle them."""
        if not taken.ids.size:
            return
        positions, which = self._order.batch.expand(taken.ids)
        codes = np.full(positions.size, ResultCode.UNAVAILABLE, dtype=np.uint8)
        with self.ticket.copying() as wanted:
            try:
                if not wanted:
                    codes[:] = ResultCode.CANCELLED
                else:
                    codes = self._scatter(positions, addresses[which], shards=taken.shards)
            finally:
                self._end(taken, codes)

    def _end(self, taken: Taken, codes: Codes) -> None:
        """Note that they were copied, or could not be; count, then settle them."""
        positions, which = self._order.batch.expand(taken.ids)
        bad = codes != ResultCode.OK
        with self._lock:
            first = self._states.note_failed(taken.ids[which[bad]]) if np.count_nonzero(bad) else _NONE
            over = self._states.end(taken)
        try:
            if over.size:
                self._count(over)
                self._let_go()  # before the ticket says so: whoever wakes finds room
        finally:
            count_failures("load", codes[bad][first])
            self.ticket.settle(positions, codes, shards=slice(*taken.shards))

    def _scatter(self, positions: Int64s, addresses: Int64s, *, shards: tuple[int, int]) -> Codes:
        codes = np.zeros(positions.size, dtype=np.uint8)
        target, revoked = self._order.target, self._order.revoked
        if target is not None and not revoked():
            scatter = partial(target.scatter, span=bytes_of(shards, self._geometry))
            codes = copy_each(scatter, positions, address=addresses, who="a target")
        if revoked():
            codes[:] = ResultCode.CANCELLED
        return codes

    def _count(self, ids: Int64s) -> None:
        """Count those that came whole."""
        roles = self._states.role[ids[~self._states.failed[ids]]]
        file = int(np.count_nonzero((roles == Outcome.OWNER) | (roles == Outcome.NO_SPACE)))
        for tier, count in (("file", file), ("ring", roles.size - file)):
            metrics.OBJECTS_LOADED.labels(row=self._tiers.row, tier=tier).inc(count)

    def _give_up(self, code: ResultCode) -> None:
        """Everything that no thread copies ends with this code."""
        self._fail(self._everything, code)
        self._let_go()

    def _fail(self, ids: Int64s, codes: npt.ArrayLike, *, shards: tuple[int, int] | None = None) -> None:
        """Settle what is left of objects: a code for all, or the codes of ``shards`` of each.

        What is left of an object of which a shard is damaged is a miss, as the object was removed.
        """
        with self._lock:
            waiting = self._states.give_up(ids) if ids.size else _NONE
        if not waiting.any():
            return
        given = np.asarray(codes, dtype=np.uint8)
        each = np.full(waiting.shape, given if given.ndim == 0 else ResultCode.MISS, dtype=np.uint8)
        if shards is not None:
            worst = given.max(axis=1)
            each[:] = np.where(worst == ResultCode.CORRUPT, ResultCode.MISS, worst)[:, None]
            each[:, slice(*shards)] = given
        counted = each.max(axis=1)
        each[~waiting] = ResultCode.PENDING  # settled by whoever copies it
        positions, which = self._order.batch.expand(ids)
        if given.ndim or given != ResultCode.CANCELLED:
            count_failures("load", counted[waiting.any(axis=1)])
        self.ticket.settle(positions, each[which])
        self._let_go()

    def _let_go(self) -> None:
        """Give back the slots of what is over, and leave when all is."""
        try:
            with self._lock:
                self._hold.abort(self._states.free())
        finally:
            with self._lock:
                over = self._states.over
            if over:
                self._hold.let_go()  # of a claim that a signal's handler ended
                self._desk.leave(self)
