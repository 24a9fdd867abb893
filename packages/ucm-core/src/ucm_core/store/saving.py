"""The first half of a save: payloads are gathered into the ring, or past it, and handed to the writer."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.flow.copy import BlockSource, strides_of
from ucm_core.flow.ticket import Codes, ResultCode, Ticket
from ucm_core.store.arrays import Int64s
from ucm_core.store.held import HeldSlots
from ucm_core.store.payloads import Payloads
from ucm_core.store.ring import Outcome
from ucm_core.store.tiers import KeyBatch, Tiers, copy_each, count_failures
from ucm_core.store.writing import WriteOrder, Writer


@dataclass(frozen=True, slots=True)
class _Left:
    """What a wave could not save."""

    no_slot: Int64s
    """Ids for which the ring has no room."""
    others: Int64s
    """Ids that somebody else saves, and has not saved so far."""
    again: bool
    """Whether to try again without waiting: somebody else gave up."""

    @property
    def ids(self) -> Int64s:
        return np.concatenate([self.others, self.no_slot])

    @property
    def code(self) -> ResultCode:
        """What they would fail with."""
        return ResultCode.NO_SPACE if self.no_slot.size else ResultCode.TIMEOUT


_NONE = np.zeros(0, dtype=np.int64)
_NOTHING_LEFT = _Left(no_slot=_NONE, others=_NONE, again=False)


class Save:
    """One save: fills slots in waves and hands them to the writer.

    Whoever finds no slot waits for those that are just being written to files. When there are none (the ring
    is full of what is in use, or smaller than the batch) the objects go through private memory, and are
    readable when their files are down.
    """

    def __init__(
        self, tiers: Tiers, writer: Writer, batch: KeyBatch, ticket: Ticket, *, source: BlockSource
    ) -> None:
        self._tiers, self._writer = tiers, writer
        self._batch, self._ticket, self._source = batch, ticket, source
        self._on_io_thread, self._deadline = False, 0.0

    def run(self, *, on_io_thread: bool, ids: Int64s | None = None, absent: bool = False) -> None:
        """Settle every key, or ``ids``; present ones at once, without gathering, unless all are ``absent``.

        An I/O thread writes its own slots.
        """
        self._on_io_thread = on_io_thread
        self._deadline = time.monotonic() + self._tiers.limits.save_wait_s
        todo = self._skip_files(np.arange(len(self._batch)) if ids is None else ids, absent=absent)
        while todo.size:
            if self._ticket.cancelled:
                self._fail(todo, ResultCode.CANCELLED)
                return
            seen = self._writer.finished
            size = self._tiers.wave_objects
            left = self._wave(todo[:size])
            again: Int64s | None = left.ids
            if left.ids.size == todo[:size].size and not left.again:
                again = self._unstick(left, seen)
            if again is None:
                self._tiers.ring.note_refused(self._batch.keys[todo], self._batch.parents(todo))
                self._fail(todo, left.code)
                return
            todo = np.concatenate([again, todo[size:]])

    def _unstick(self, left: _Left, seen: int) -> Int64s | None:
        """What to try again after a wave of which nothing was saved; None: it took too long."""
        may_fit = left.no_slot.size <= self._tiers.ring.slots
        if may_fit and self._writer.wait_for_slots(seen, self._deadline):
            return left.ids
        rest = self._past_ring(left.no_slot)
        if rest.size < left.no_slot.size:
            return np.concatenate([left.others, rest])
        return left.ids if self._writer.wait_for_progress(seen, self._deadline) else None

    def _skip_files(self, ids: Int64s, *, absent: bool) -> Int64s:
        on_file = self._tiers.on_file(self._batch.keys[ids], absent=absent)
        if not on_file.any():
            return ids
        self._ticket.settle_present(self._batch.positions(ids[on_file]))
        return ids[~on_file]

    def _wave(self, ids: Int64s) -> _Left:
        """Save what gets a slot, or what somebody else saves meanwhile."""
        with HeldSlots(self._tiers.ring) as held:
            filled = self._claim(held, ids)
            owned = held.places(Outcome.OWNER)
            good = owned if filled else self._fill(ids, held, owned)
            if good.size == ids.size:
                self._keep(ids, held.hand_over(good))
                return _NOTHING_LEFT
            loading = held.places(Outcome.LOADING)
            outcome = held.wait(loading, self._left_s)
            brought = loading[outcome == Outcome.READY]
            full = np.concatenate([held.places(Outcome.READY), good, brought])
            self._keep(ids[full], held.hand_over(full))
        return _Left(
            no_slot=ids[held.places(Outcome.NO_SPACE)],
            others=ids[loading[outcome != Outcome.READY]],
            again=bool((outcome == Outcome.FAILED).any()) and self._left_s > 0,
        )

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _fill(self, ids: Int64s, held: HeldSlots, places: Int64s) -> Int64s:
        """Gather into owned slots; returns the places that are full now."""
        codes = self._gather(ids[places], held.addresses(places))
        good: Int64s = places[codes == ResultCode.OK]
        held.publish(good)
        if good.size < places.size:
            bad = codes != ResultCode.OK
            held.abort(places[bad])
            self._fail(ids[places[bad]], codes[bad])  # their slots are free by now
        return good

    def _past_ring(self, ids: Int64s) -> Int64s:
        """Gather into private memory and write from there; returns the ids for which there was none."""
        payloads = self._writer.borrow(min(ids.size, self._tiers.chunk_objects))
        if payloads is None:
            return ids
        mine = ids[: payloads.places.size]
        try:
            codes = self._gather(mine, payloads.addresses)
        except BaseException:  # somebody wants to end this thread
            payloads.release()
            raise
        payloads.part(np.flatnonzero(codes != ResultCode.OK)).release()
        self._fail(mine[codes != ResultCode.OK], codes[codes != ResultCode.OK])
        good = np.flatnonzero(codes == ResultCode.OK)
        self._write(mine[good], payloads.part(good))
        return ids[mine.size :]

    def _claim(self, held: HeldSlots, ids: Int64s) -> bool:
        """Claim; True: what is ours is filled already, by the same native call.

        Not on an I/O thread: who gives the save up meanwhile may write to the source, and that call
        would have published what it read.
        """
        keys, parents, geometry = self._batch.keys[ids], self._batch.parents(ids), self._tiers.files.geometry
        with suppress(Exception):  # what is wrong with the source is found out object by object
            first, inline = self._batch.first[ids], not self._on_io_thread
            strides = strides_of(self._source, first, written=False) if inline else None
            if strides is not None:
                held.gather(keys, strides, parents=parents, units=(geometry.shards, geometry.shard_bytes))
                return True
        held.claim(keys, parents)
        return False

    def _gather(self, ids: Int64s, address: Int64s) -> Codes:
        """Gather whole payloads; INVALID where the source could not give one.

        CANCELLED meanwhile: whoever did that may have written to the source before the last byte was read.
        """
        if not ids.size:
            return np.zeros(0, dtype=np.uint8)
        codes = np.full(ids.size, ResultCode.CANCELLED, dtype=np.uint8)
        with self._ticket.copying() as wanted:
            if wanted:
                first = self._batch.first[ids]
                codes = copy_each(self._source.gather, first, address=address, who="a source")
            if self._ticket.cancelled:
                codes[:] = ResultCode.CANCELLED
        geometry = self._tiers.files.geometry
        if geometry.shard_bytes != geometry.stride:
            _native.zero_padding(address, geometry.shards, geometry.shard_bytes, geometry.stride)
        return codes

    def _keep(self, ids: Int64s, payloads: Payloads) -> None:
        """Settle what the ring holds, and hand its slots to the writer."""
        if ids.size:
            self._writer.saved_in_ring.inc(ids.size)
            self._batch.settle(self._ticket, ids, codes=ResultCode.OK)
            self._write(ids, payloads)

    def _write(self, ids: Int64s, payloads: Payloads) -> None:
        order = WriteOrder(self._batch, self._ticket, ids)
        self._writer.write(order, payloads, inline=self._on_io_thread)

    def _fail(self, ids: Int64s, codes: npt.ArrayLike) -> None:
        """Count, then settle, with a code for all or for each."""
        if ids.size:
            count_failures("save", np.broadcast_to(np.asarray(codes, dtype=np.uint8), ids.shape))
            self._batch.settle(self._ticket, ids, codes=codes)
