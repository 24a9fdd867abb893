"""Writing full payloads to files: from ring slots, or from private memory where the ring has no room."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ucm_core.flow.own import OwnCondition
from ucm_core.flow.ticket import Codes, Level, ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.spec.keys import Keys
from ucm_core.store.arrays import Int64s
from ucm_core.store.payloads import Payloads, PrivateMemory, PrivatePayloads
from ucm_core.store.pool import Priority
from ucm_core.store.tiers import KeyBatch, Room, Tiers, count_failures


@dataclass(frozen=True, slots=True, eq=False)
class WriteOrder:
    """Distinct keys of a batch, and the ticket that waits for their files."""

    batch: KeyBatch
    ticket: Ticket
    ids: Int64s

    @property
    def names(self) -> list[bytes]:
        """The keys as bytes."""
        return [self.batch.names[i] for i in self.ids.tolist()]

    def part(self, places: Int64s) -> WriteOrder:
        """Those at ``places``."""
        return replace(self, ids=self.ids[places])

    def tell(self, codes: Codes, level: Level) -> None:
        """Settle what became of each file; of what the ring holds the first answer was known before."""
        positions, which = self.batch.expand(self.ids)
        self.ticket.settle(positions, codes[which])
        self.ticket.settle_durable(positions, codes[which], level=level)


class Writer:
    """Writes payloads to files, each key by one piece of work at a time, and tells all who wait for it.

    Payloads are held from `write` until their file is down or has failed. ``room`` is told of every write,
    and asked for more when one is refused; None = refused is refused.
    """

    def __init__(self, tiers: Tiers, room: Room | None = None) -> None:
        self._tiers = tiers
        self._room = room
        self._piece_objects = tiers.chunk_objects
        self.saved_in_ring = metrics.OBJECTS_SAVED.labels(row=tiers.row, tier="ring")
        """Counts what a save brought into the ring."""
        self._saved_in_file = metrics.OBJECTS_SAVED.labels(row=tiers.row, tier="file")
        self._changed = OwnCondition()
        self._under_way: set[bytes] = set()
        self._others: dict[bytes, list[tuple[WriteOrder, int]]] = {}  # who waits for what another writes
        self._borrowed = self._in_slots = 0
        self._finished = 0
        self._kept = self._lost = self._telling = 0
        self._closed = False

    @property
    def pending(self) -> int:
        """Keys whose file is not down yet."""
        with self._changed:
            return len(self._under_way)

    @property
    def tally(self) -> tuple[int, int]:
        """Objects that reached the medium and objects that did not, so far."""
        with self._changed:
            return self._kept, self._lost

    @property
    def finished(self) -> int:
        """Pieces of work that ended so far, and of private memory that were given back."""
        with self._changed:
            return self._finished

    def borrow(self, count: int) -> PrivatePayloads | None:
        """Private memory for the first of ``count`` objects; None while all of it is lent.

        All that is lent at a time is within `StoreLimits.private_bytes`, or one object; nothing where no file
        could take it.
        """
        size_bytes = self._tiers.files.geometry.payload_bytes
        most = self._tiers.limits.private_bytes if self._tiers.files.keeps else 0
        with self._changed:
            granted = min(count, max(most // size_bytes, int(most > 0)) - self._borrowed)
            if granted <= 0:
                return None
            self._borrowed += granted
        try:
            return PrivatePayloads(PrivateMemory(granted, size_bytes), np.arange(granted), self._give_back)
        except BaseException:
            self._give_back(granted)
            raise

    def write(self, order: WriteOrder, payloads: Payloads, *, inline: bool = False) -> None:
        """Take over the payloads, and write each under its key, here or on the pool."""
        if self._closed:
            payloads.release()
            order.ticket.settle_rest(ResultCode.CANCELLED)
            return
        mine = np.zeros(order.ids.size, dtype=np.bool_)
        works: list[_WriteWork] = []
        try:
            self._register(order, mine, in_ring=payloads.in_ring)
            self._divide(order, payloads, np.flatnonzero(mine), works=works)
            if not mine.all():
                payloads.part(np.flatnonzero(~mine)).release()
            for work in works:
                if inline or not self._tiers.pool.submit(Priority.WRITE, work.run):
                    work.run()
        except BaseException:  # a signal's handler ended this call: somebody else may wait for these keys
            for work in works:
                work.give_up()
            begun = sum(work.order.ids.size for work in works)
            left = np.flatnonzero(mine)[begun:]
            if left.size:
                _WriteWork(self, order.part(left), payloads.part(left)).give_up()
            raise

    def _divide(
        self, order: WriteOrder, payloads: Payloads, places: Int64s, *, works: list[_WriteWork]
    ) -> None:
        size = self._piece_objects
        if 0 < places.size == order.ids.size <= size:  # most often: nothing to cut
            works.append(_WriteWork(self, order, payloads))
            return
        for begin in range(0, places.size, size):
            chunk = places[begin : begin + size]
            works.append(_WriteWork(self, order.part(chunk), payloads.part(chunk)))

    def wait_for_slots(self, seen: int, deadline: float) -> bool:
        """As `wait_for_progress`, while any of the pieces holds slots of the ring."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._finished != seen or not self._in_slots,
                max(0.0, deadline - time.monotonic()),
            )
            return self._finished != seen and time.monotonic() < deadline

    def wait_for_progress(self, seen: int, deadline: float) -> bool:
        """Wait until more than ``seen`` pieces ended; False: none is under way, or it took too long."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._finished != seen or not (self._under_way or self._borrowed),
                max(0.0, deadline - time.monotonic()),
            )
            return self._finished != seen and time.monotonic() < deadline

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Wait until nothing is pending and every ticket knows it."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._under_way or self._telling), timeout_s)

    def close(self) -> None:
        """Cancel what is handed over from now on: a donation may outlive its store."""
        self._closed = True

    def write_now(self, keys: Keys, addresses: Int64s) -> Codes:
        """Write, making room as long as that helps when the bound refuses; counted."""
        files, sync = self._tiers.files, self._tiers.limits.sync
        codes = files.write(keys, addresses, sync=sync)
        if not files.keeps:
            return codes  # as the user wants it: no failure to count
        while self._has_room_for(refused := np.flatnonzero(codes == ResultCode.NO_SPACE)):
            codes[refused] = again = files.write(keys[refused], addresses[refused], sync=sync)
            if (again == ResultCode.NO_SPACE).all():
                break
        count_failures("write", codes)
        self._saved_in_file.inc(int((codes == 0).sum()))
        if self._room is not None:
            self._room.note_written()
        return codes

    def _has_room_for(self, refused: Int64s) -> bool:
        return bool(refused.size) and self._room is not None and self._room.make_room()

    def finish(self, order: WriteOrder, payloads: Payloads, *, codes: Codes) -> None:
        """Let go of the payloads, then tell the tickets (whoever wakes finds room)."""
        try:
            payloads.release()
        finally:
            with self._changed:
                others = self._unregister(order, codes)
                self._telling += 1
                self._in_slots -= order.ids.size * payloads.in_ring
            level = Level.SYNCED if self._tiers.limits.sync else Level.ON_MEDIUM
            try:
                order.tell(codes, level)
                for other, news in others.items():
                    places, each = np.array(news).T
                    other.part(places).tell(each.astype(np.uint8), level)
            finally:
                self._end(order.ids.size, lost=int(np.count_nonzero(codes)) if self._tiers.files.keeps else 0)

    def _end(self, objects: int, *, lost: int) -> None:
        with self._changed:
            self._kept += objects - lost
            self._lost += lost
            self._telling -= 1
            self._finished += 1
            self._changed.notify_all()

    def _register(self, order: WriteOrder, mine: npt.NDArray[np.bool_], *, in_ring: bool) -> None:
        """Set ``mine`` where nobody writes the key yet and the caller's payload will be used."""
        names = order.names
        with self._changed:
            mine[:] = True
            if not self._under_way.isdisjoint(names):
                for place in [place for place, name in enumerate(names) if name in self._under_way]:
                    mine[place] = False
                    self._others.setdefault(names[place], []).append((order, place))
            self._under_way.update(names)
            self._in_slots += int(np.count_nonzero(mine)) * in_ring

    def _unregister(self, order: WriteOrder, codes: Codes) -> dict[WriteOrder, list[tuple[int, int]]]:
        """Who else waits for these keys: places in its order, and the codes there."""
        names, news = order.names, dict[WriteOrder, list[tuple[int, int]]]()
        self._under_way.difference_update(names)
        if self._others:
            for name, code in zip(names, codes.tolist(), strict=True):
                for other, place in self._others.pop(name, ()):
                    news.setdefault(other, []).append((place, code))
        return news

    def _give_back(self, count: int) -> None:
        with self._changed:
            self._borrowed -= count
            self._finished += 1
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _WriteWork:
    """One piece of writing; ends with a code for every key, whatever happens, and once."""

    writer: Writer
    order: WriteOrder
    payloads: Payloads
    turn: list[None] = field(default_factory=lambda: [None])
    """Empty once somebody has begun."""

    def run(self) -> None:
        order = self.order
        if not self._begins():
            return
        codes = np.full(order.ids.size, ResultCode.UNAVAILABLE, dtype=np.uint8)
        try:
            codes = self.writer.write_now(order.batch.keys[order.ids], self.payloads.addresses)
        finally:
            self.writer.finish(order, self.payloads, codes=codes)

    def give_up(self) -> None:
        """End it unless it has begun."""
        if self._begins():
            codes = np.full(self.order.ids.size, ResultCode.UNAVAILABLE, dtype=np.uint8)
            self.writer.finish(self.order, self.payloads, codes=codes)

    def _begins(self) -> bool:
        with suppress(IndexError):
            self.turn.pop()
            return True
        return False
