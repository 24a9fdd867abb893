"""The two halves of a save: filling ring slots from a source, and writing full slots to files."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.flow.copy import BlockSource
from ucm_core.flow.ticket import Codes, Level, ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.store.held import HeldSlots
from ucm_core.store.pool import Priority
from ucm_core.store.ring import Outcome
from ucm_core.store.tiers import Int64s, KeyBatch, Room, Slots, Tiers, copy_each, count_failures

Waiter = tuple[Ticket, Int64s]
"""A ticket and the positions in it that wait for one key."""


class Writer:
    """Writes full slots to files, each key by one piece of work at a time, and tells all who wait for it.

    A slot stays referenced from `write` until its file is down or has failed. ``room`` is told of every
    write, and asked for more when one is refused; None = refused is refused.
    """

    def __init__(self, tiers: Tiers, room: Room | None = None) -> None:
        self._tiers = tiers
        self._room = room
        self._changed = threading.Condition()
        self._waiters: dict[bytes, list[Waiter]] = {}
        self._finished = 0

    @property
    def pending(self) -> int:
        """Keys whose file is not down yet."""
        with self._changed:
            return len(self._waiters)

    def names(self) -> frozenset[bytes]:
        """The keys whose file is not down yet."""
        with self._changed:
            return frozenset(self._waiters)

    def write(self, names: list[bytes], slots: Slots, *, waiters: list[Waiter], inline: bool = False) -> None:
        """Take over one reference to each slot, and write it under its name, here or on the pool."""
        mine = self._register(names, waiters)
        places = np.flatnonzero(mine)
        size = self._tiers.chunk_objects
        for begin in range(0, places.size, size):
            chunk = places[begin : begin + size]
            work = _WriteWork(self, [names[i] for i in chunk], slots[chunk])
            if inline or not self._tiers.pool.submit(Priority.WRITE, work.run):
                work.run()
        self._tiers.ring.release(slots[~mine])

    def wait_for_progress(self, seen: int, deadline: float) -> bool:
        """Wait until more than ``seen`` pieces of work ended; False: none is pending, or it took too long."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._finished != seen or not self._waiters, max(0.0, deadline - time.monotonic())
            )
            return self._finished != seen and time.monotonic() < deadline

    @property
    def finished(self) -> int:
        """Pieces of work that ended so far."""
        with self._changed:
            return self._finished

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Wait until nothing is pending."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiters, timeout_s)

    def write_now(self, names: list[bytes], slots: Slots) -> Codes:
        """Write, making room as long as that helps when the bound refuses; counted."""
        keys = np.frombuffer(b"".join(names), dtype=np.uint8).reshape(-1, 32)
        addresses = self._tiers.ring.addresses(slots)
        codes = self._tiers.files.write(keys, addresses, sync=self._tiers.limits.sync)
        while self._has_room_for(refused := np.flatnonzero(codes == ResultCode.NO_SPACE)):
            again = self._tiers.files.write(keys[refused], addresses[refused], sync=self._tiers.limits.sync)
            codes[refused] = again
            if (again == ResultCode.NO_SPACE).all():
                break
        count_failures("write", codes)
        metrics.OBJECTS_SAVED.labels(row=self._tiers.row, tier="file").inc(int((codes == 0).sum()))
        if self._room is not None:
            self._room.note_written()
        return codes

    def _has_room_for(self, refused: Int64s) -> bool:
        return bool(refused.size) and self._room is not None and self._room.make_room()

    def finish(self, names: list[bytes], slots: Slots, *, codes: Codes) -> None:
        """Release the slots, then tell the tickets (whoever wakes finds room)."""
        try:
            self._tiers.ring.release(slots)
        finally:
            with self._changed:
                told = [self._waiters.pop(name) for name in names]
                self._finished += 1
                self._changed.notify_all()
            level = Level.SYNCED if self._tiers.limits.sync else Level.ON_MEDIUM
            for waiters, code in zip(told, codes, strict=True):
                for ticket, positions in waiters:
                    ticket.settle_durable(positions, int(code), level=level)

    def _register(self, names: list[bytes], waiters: list[Waiter]) -> npt.NDArray[np.bool_]:
        """True where nobody writes the key yet and the caller's slot will be used."""
        mine = np.zeros(len(names), dtype=np.bool_)
        with self._changed:
            for place, (name, waiter) in enumerate(zip(names, waiters, strict=True)):
                mine[place] = name not in self._waiters
                self._waiters.setdefault(name, []).append(waiter)
        return mine


@dataclass(frozen=True, slots=True)
class _WriteWork:
    """One piece of writing; ends with a code for every key, whatever happens."""

    writer: Writer
    names: list[bytes]
    slots: Slots

    def run(self) -> None:
        codes = np.full(len(self.names), ResultCode.UNAVAILABLE, dtype=np.uint8)
        try:
            codes = self.writer.write_now(self.names, self.slots)
        finally:
            self.writer.finish(self.names, self.slots, codes=codes)


@dataclass(frozen=True, slots=True)
class _Left:
    """What a wave could not save: the code it would fail with, and whether to try again without waiting."""

    ids: Int64s
    code: ResultCode
    again: bool


class Save:
    """One save: fills slots in waves and hands them to the writer."""

    def __init__(
        self, tiers: Tiers, writer: Writer, batch: KeyBatch, ticket: Ticket, *, source: BlockSource
    ) -> None:
        self._tiers, self._writer = tiers, writer
        self._batch, self._ticket, self._source = batch, ticket, source

    def run(self, *, on_io_thread: bool) -> None:
        """Settle every key; present ones at once, without gathering. An I/O thread writes its own slots."""
        todo = self._skip_files(np.arange(len(self._batch)))
        deadline = time.monotonic() + self._tiers.limits.save_wait_s
        while todo.size:
            if self._ticket.cancelled:
                self._fail(todo, ResultCode.CANCELLED)
                return
            seen = self._writer.finished
            size = max(1, min(self._tiers.chunk_objects, self._tiers.ring.slots // 2))
            left = self._wave(todo[:size], deadline, on_io_thread=on_io_thread)
            stuck = left.ids.size == todo[:size].size and not left.again
            todo = np.concatenate([left.ids, todo[size:]])
            if stuck and not self._writer.wait_for_progress(seen, deadline):
                self._fail(todo, left.code)
                return

    def _skip_files(self, ids: Int64s) -> Int64s:
        on_file = self._tiers.files.exist(self._batch.keys)
        present = ids[on_file]
        self._batch.settle(self._ticket, present, codes=ResultCode.OK)
        self._ticket.settle_durable(self._batch.positions(present), ResultCode.OK)
        return ids[~on_file]

    def _wave(self, ids: Int64s, deadline: float, *, on_io_thread: bool) -> _Left:
        """Save what gets a slot, or what somebody else saves meanwhile."""
        with HeldSlots(self._tiers.ring, self._tiers.ring.claim(self._batch.keys[ids])) as held:
            owned = held.places(Outcome.OWNER)
            good = self._fill(ids, held, owned)
            loading = held.places(Outcome.LOADING)
            outcome = held.wait(loading, max(0.0, deadline - time.monotonic()))
            brought = loading[outcome == Outcome.READY]
            full = np.concatenate([held.places(Outcome.READY), good, brought])
            self._keep(ids[full], held.hand_over(full), on_io_thread=on_io_thread)
        no_slot = held.places(Outcome.NO_SPACE)
        return _Left(
            ids=np.concatenate([ids[loading[outcome != Outcome.READY]], ids[no_slot]]),
            code=ResultCode.NO_SPACE if no_slot.size else ResultCode.TIMEOUT,
            again=bool((outcome == Outcome.FAILED).any()) and time.monotonic() < deadline,
        )

    def _fill(self, ids: Int64s, held: HeldSlots, places: Int64s) -> Int64s:
        """Gather into owned slots; returns the places that are full now."""
        if not places.size:
            return places
        address = held.addresses(places)
        codes = copy_each(
            self._source.gather, self._batch.first[ids[places]], address=address, who="a source"
        )
        geometry = self._tiers.files.geometry
        if geometry.shard_bytes != geometry.stride:
            _native.zero_padding(address, geometry.shards, geometry.shard_bytes, geometry.stride)
        good: Int64s = places[codes == ResultCode.OK]
        bad: Int64s = places[codes != ResultCode.OK]
        held.publish(good)
        held.abort(bad)
        self._fail(ids[bad], ResultCode.INVALID)
        return good

    def _keep(self, ids: Int64s, slots: Slots, *, on_io_thread: bool) -> None:
        """Settle what the ring holds, and hand its slots to the writer."""
        if not ids.size:
            return
        waiters = [(self._ticket, self._batch.positions(ids[i : i + 1])) for i in range(ids.size)]
        self._batch.settle(self._ticket, ids, codes=ResultCode.OK)
        metrics.OBJECTS_SAVED.labels(row=self._tiers.row, tier="ring").inc(ids.size)
        self._writer.write([self._batch.names[i] for i in ids], slots, waiters=waiters, inline=on_io_thread)

    def _fail(self, ids: Int64s, code: ResultCode) -> None:
        if ids.size:
            self._batch.settle(self._ticket, ids, codes=code)
            count_failures("save", np.full(ids.size, code, dtype=np.uint8))
