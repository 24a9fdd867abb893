"""Writing full payloads to files: from ring slots, or from private memory where the ring has no room."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.flow.own import OwnCondition
from ucm_core.flow.ticket import Codes, Level, ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.store.arrays import Int64s
from ucm_core.store.payloads import Payloads, PrivateMemory, PrivatePayloads
from ucm_core.store.pool import Priority
from ucm_core.store.tiers import Room, Tiers, count_failures

Waiter = tuple[Ticket, Int64s]
"""A ticket and the positions in it that wait for one key."""


class Writer:
    """Writes payloads to files, each key by one piece of work at a time, and tells all who wait for it.

    Payloads are held from `write` until their file is down or has failed. ``room`` is told of every write,
    and asked for more when one is refused; None = refused is refused.
    """

    def __init__(self, tiers: Tiers, room: Room | None = None) -> None:
        self._tiers = tiers
        self._room = room
        self._changed = OwnCondition()
        self._waiters: dict[bytes, list[Waiter]] = {}
        self._borrowed = self._in_slots = 0
        self._finished = 0
        self._kept = self._lost = self._telling = 0
        self._closed = False

    @property
    def pending(self) -> int:
        """Keys whose file is not down yet."""
        with self._changed:
            return len(self._waiters)

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
        return PrivatePayloads(PrivateMemory(granted, size_bytes), np.arange(granted), self._give_back)

    def write(
        self, names: list[bytes], payloads: Payloads, *, waiters: list[Waiter], inline: bool = False
    ) -> None:
        """Take over the payloads, and write each under its name, here or on the pool."""
        if self._closed:
            self._refuse(payloads, waiters)
            return
        mine = self._register(names, waiters, in_ring=payloads.in_ring)
        places = np.flatnonzero(mine)
        size = self._tiers.chunk_objects
        inline |= not self._tiers.files.keeps
        for begin in range(0, places.size, size):
            chunk = places[begin : begin + size]
            work = _WriteWork(self, [names[i] for i in chunk], payloads.part(chunk))
            if inline or not self._tiers.pool.submit(Priority.WRITE, work.run):
                work.run()
        payloads.part(np.flatnonzero(~mine)).release()

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
                lambda: self._finished != seen or not (self._waiters or self._borrowed),
                max(0.0, deadline - time.monotonic()),
            )
            return self._finished != seen and time.monotonic() < deadline

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Wait until nothing is pending and every ticket knows it."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiters or self._telling), timeout_s)

    def close(self) -> None:
        """Cancel what is handed over from now on: a donation may outlive its store."""
        self._closed = True

    def write_now(self, names: list[bytes], addresses: Int64s) -> Codes:
        """Write, making room as long as that helps when the bound refuses; counted."""
        keys = np.frombuffer(b"".join(names), dtype=np.uint8).reshape(-1, 32)
        files, sync = self._tiers.files, self._tiers.limits.sync
        codes = files.write(keys, addresses, sync=sync)
        if not files.keeps:
            return codes  # as the user wants it: no failure to count
        while self._has_room_for(refused := np.flatnonzero(codes == ResultCode.NO_SPACE)):
            codes[refused] = again = files.write(keys[refused], addresses[refused], sync=sync)
            if (again == ResultCode.NO_SPACE).all():
                break
        count_failures("write", codes)
        metrics.OBJECTS_SAVED.labels(row=self._tiers.row, tier="file").inc(int((codes == 0).sum()))
        if self._room is not None:
            self._room.note_written()
        return codes

    def _has_room_for(self, refused: Int64s) -> bool:
        return bool(refused.size) and self._room is not None and self._room.make_room()

    def finish(self, names: list[bytes], payloads: Payloads, *, codes: Codes) -> None:
        """Let go of the payloads, then tell the tickets (whoever wakes finds room)."""
        try:
            payloads.release()
        finally:
            with self._changed:
                told = [self._waiters.pop(name) for name in names]
                self._telling += 1
                self._in_slots -= len(names) * payloads.in_ring
            try:
                _tell(told, codes, Level.SYNCED if self._tiers.limits.sync else Level.ON_MEDIUM)
            finally:
                self._end(len(names), lost=int(np.count_nonzero(codes)) if self._tiers.files.keeps else 0)

    def _end(self, objects: int, *, lost: int) -> None:
        with self._changed:
            self._kept += objects - lost
            self._lost += lost
            self._telling -= 1
            self._finished += 1
            self._changed.notify_all()

    def _refuse(self, payloads: Payloads, waiters: list[Waiter]) -> None:
        payloads.release()
        for ticket, _ in waiters:
            ticket.settle_rest(ResultCode.CANCELLED)

    def _register(self, names: list[bytes], waiters: list[Waiter], *, in_ring: bool) -> npt.NDArray[np.bool_]:
        """True where nobody writes the key yet and the caller's payload will be used."""
        mine = np.zeros(len(names), dtype=np.bool_)
        with self._changed:
            for place, (name, waiter) in enumerate(zip(names, waiters, strict=True)):
                mine[place] = name not in self._waiters
                self._waiters.setdefault(name, []).append(waiter)
            self._in_slots += int(np.count_nonzero(mine)) * in_ring
        return mine

    def _give_back(self, count: int) -> None:
        with self._changed:
            self._borrowed -= count
            self._finished += 1
            self._changed.notify_all()


def _tell(told: list[list[Waiter]], codes: Codes, level: Level) -> None:
    """Settle every ticket, each once, with what became of the keys that it waits for."""
    news: dict[Ticket, list[tuple[Int64s, int]]] = {}
    for waiters, code in zip(told, codes.tolist(), strict=True):
        for ticket, positions in waiters:
            news.setdefault(ticket, []).append((positions, code))
    for ticket, parts in news.items():
        positions = np.concatenate([part for part, _ in parts])
        each = np.repeat([code for _, code in parts], [part.size for part, _ in parts])
        ticket.settle(positions, each)  # of what the ring holds it was known before
        ticket.settle_durable(positions, each, level=level)


@dataclass(frozen=True, slots=True)
class _WriteWork:
    """One piece of writing; ends with a code for every key, whatever happens."""

    writer: Writer
    names: list[bytes]
    payloads: Payloads

    def run(self) -> None:
        codes = np.full(len(self.names), ResultCode.UNAVAILABLE, dtype=np.uint8)
        try:
            codes = self.writer.write_now(self.names, self.payloads.addresses)
        finally:
            self.writer.finish(self.names, self.payloads, codes=codes)
