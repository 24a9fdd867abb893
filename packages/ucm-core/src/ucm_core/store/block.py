"""The block store: a shared-memory ring over files, for one row and one segment.

::

    save(keys, source)                                   load(keys, target)
      present? ---------- OK, nothing gathered             in the ring? ------- scatter
      claim slot, gather, publish   (before it returns)    claim slot, read file, verify, publish, scatter
      write file, rename            (I/O threads)          no slot: private memory, verify, scatter

A wrong byte is never delivered: a slot is published only when full, a file only when whole and checksummed. A
miss is a value. Nothing here raises into the caller's loop for what storage does; failures are codes in the
ticket and counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from ucm_core.errors import StoreError
from ucm_core.flow.copy import BlockSource, BlockTarget
from ucm_core.flow.handles import UnitLoad, UnitSave
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.spec.keys import NAME_BYTES, Keys
from ucm_core.store.arrays import Int64s, Mask
from ucm_core.store.close_report import CloseReport
from ucm_core.store.donation import Donation
from ucm_core.store.geometry import Geometry
from ucm_core.store.held import HeldSlots
from ucm_core.store.ledger import NO_RESIDENTS, PinBook, Pins, RecentTouches, Residents, Work, WorkGate
from ucm_core.store.loading import (
    LoadOrder,
    LoadWork,
    deliver_resident,
    load_chunk,
    load_hits,
    prefetch_chunk,
)
from ucm_core.store.pool import Priority
from ucm_core.store.ring import Outcome, RingStatistics, Touch
from ucm_core.store.saving import Save
from ucm_core.store.tiers import (
    COPY_CHUNKS,
    KeyBatch,
    Room,
    Tiers,
    check_batch,
    check_keys,
    check_source,
    check_target,
    count_failures,
    log,
)
from ucm_core.store.unit_load import ShardLoad
from ucm_core.store.unit_save import SaveOrder, ShardSave
from ucm_core.store.unit_work import UnitDesk
from ucm_core.store.writing import Writer

PREFIX_STEP_BLOCKS = 64
_INTERRUPTED_WAIT_S = 30.0
INLINE_BYTES = 32 << 20
"""What a load copies on its caller's thread: one to three milliseconds. To share the work costs half of one,
and one thread is often as fast as the memory is."""


@dataclass(frozen=True, slots=True)
class BlockStoreStatistics:
    """A moment of one store."""

    working: int
    """Pieces of load, save and touch work that are queued or running."""
    pending_writes: int
    """Objects whose file is not down yet."""
    pins: int
    """Pins that were taken and not released."""
    ring: RingStatistics | None
    """None where there is no ring, or where it cannot be looked at now."""


class BlockStore:
    """Fixed-size objects of one row and segment under 256-bit keys.

    Keys are ``uint8[n, 32]`` (`ucm_core.object_keys`), anything else is a `ucm_core.LayoutError`; a batch may
    repeat a key. All methods are thread-safe. In a forked child the store is as one that was closed.
    After `close` every lookup is a miss and every ticket ends ``CANCELLED``. ``room`` keeps the files below
    the capacity bound; None = a write that the bound refuses stays refused.
    """

    def __init__(self, tiers: Tiers, *, room: Room | None = None) -> None:
        self._tiers = tiers
        self._writer = Writer(self._tiers, room)
        self._work = WorkGate()
        self._desk = UnitDesk(tiers, self._work)
        self._touches = RecentTouches(tiers.limits.touch_interval_s)
        self._pinned = PinBook()
        self._last_ring: RingStatistics | None = None
        self._revoked = False
        self._report = CloseReport(tiers.row)
        self._loaded = metrics.OBJECTS_LOADED.labels(row=tiers.row, tier="ring")
        self._looked_up = {
            tier: metrics.LOOKUPS.labels(row=tiers.row, tier=tier) for tier in ("ring", "file", "absent")
        }

    @property
    def geometry(self) -> Geometry:
        """Shards and bytes of every object of this store."""
        return self._tiers.files.geometry

    @property
    def slots(self) -> int:
        """Objects that its ring has room for."""
        return self._tiers.ring.slots

    def lookup(self, keys: Keys) -> Mask:
        """``bool[n]``: True where the ring holds the object, or a whole file is there."""
        check_keys(keys)
        with self._work.entered() as entered:
            if not entered or not len(keys):
                return np.zeros(len(keys), dtype=np.bool_)
            return self._lookup(keys)

    def lookup_prefix(self, keys: Keys) -> int:
        """How many leading keys are present; looks no further than one step behind the first hole."""
        check_keys(keys)
        for begin in range(0, len(keys), PREFIX_STEP_BLOCKS):
            found = self.lookup(keys[begin : begin + PREFIX_STEP_BLOCKS])
            if not found.all():
                return begin + int(found.argmin())
        return len(keys)

    def load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> Ticket:
        """Bring the payloads of ``keys`` to ``target``; object ``i`` of the batch is ``keys[i]``.

        ``parents``, here and below: for each key that of the block before it in its prefix, zeros where it
        has none, so that the ring keeps the head of a prefix longest (`ucm_core.store.ring.Ring.claim`).

        Returns at once. ``target.scatter`` runs on I/O threads until the ticket is done, and before this
        returns for a small batch that the ring holds whole; never for an object that failed. The target's
        memory must live until the ticket is done, and what failed must not be used.
        """
        check_batch(keys, parents)
        check_target(target)
        if (hits := self._load_hits(keys, target)) is not None:
            return hits
        order = self._order(keys, target, parents)
        times = 1
        if self._holds(order):
            if self._load_inline(order):
                return order.ticket
            times = COPY_CHUNKS
        return self._start(order, Priority.LOAD, load_chunk, times=times)

    def prefetch(self, keys: Keys, *, parents: Keys | None = None) -> Ticket:
        """Bring ``keys`` into the ring, so that a later load finds them there.

        Gives way to loads, and gives up where the ring has no room. ``cancel`` of the ticket ends it before
        its next piece. ``OK`` = in the ring, or on the way there by somebody else.
        """
        order = self._order(keys, None, parents)
        if self._holds(order):
            order.ticket.settle(np.arange(order.batch.count), ResultCode.OK)
            return order.ticket
        return self._start(order, Priority.PREFETCH, prefetch_chunk)

    def save(
        self,
        keys: Keys,
        source: BlockSource,
        *,
        gather_inline: bool = True,
        parents: Keys | None = None,
        absent: bool = False,
    ) -> Ticket:
        """Keep the payloads of ``source`` under ``keys``; what is present is ``OK`` at once and not gathered.

        With ``gather_inline`` every gather is over when this returns (the source's memory may be used again,
        files are written later); without it, gathering runs on an I/O thread until the ticket is done. Waits
        for room in the ring at most ``save_wait_s``; what finds none is ``NO_SPACE``. A file that cannot be
        written shows in the ticket's durable results, while the ring still serves the object.

        ``absent``: the caller has just looked and found none of the keys, so the medium is not asked again;
        an object that came there meanwhile is gathered for the ring, and not written a second time.
        """
        check_source(source)
        batch = KeyBatch(keys, parents)
        ticket = Ticket(batch.count, self.geometry.shards, durable=True)
        save = Save(self._tiers, self._writer, batch, ticket, source=source)
        everything = np.arange(batch.count)
        with self._or_nothing(ticket):
            if gather_inline:
                self._run(ticket, everything, lambda: save.run(on_io_thread=False, absent=absent))
            else:
                self._submit(
                    Priority.WRITE, ticket, everything, lambda: save.run(on_io_thread=True, absent=absent)
                )
        return ticket

    def begin_load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> UnitLoad:
        """`load`, of which only submitted shards are brought; see `ucm_core.flow.handles.UnitLoad`."""
        return ShardLoad.begin(self._order(keys, target, parents), self._desk)

    def begin_save(
        self, keys: Keys, source: BlockSource, *, parents: Keys | None = None, absent: bool = False
    ) -> UnitSave:
        """`save`, of which only submitted shards are gathered; see `ucm_core.flow.handles.UnitSave`."""
        batch = KeyBatch(keys, parents)
        ticket = Ticket(batch.count, self.geometry.shards, durable=True)
        return ShardSave.begin(SaveOrder(batch, ticket, source, absent), self._desk, writer=self._writer)

    def reserve(self, key: Keys) -> Donation | None:
        """A ring slot for ``key`` (``uint8[32]``), to be filled in place; None when the object is present.

        Raises `ucm_core.NoSpace` when the ring has no slot to give.
        """
        check_keys(np.asarray(key)[None])
        with self._work.entered() as entered:
            if not entered or self._lookup(key[None])[0]:
                return None
            return Donation.claim(self._tiers, self._writer, key=key)

    def pin(self, keys: Keys) -> Pins:
        """Keep what the ring holds of ``keys`` in the ring until the pins are released (`Pins`)."""
        check_keys(keys)
        with self._work.entered() as entered:
            if not entered:
                return Pins(keys[:0], self._pinned, lambda: None)
            with HeldSlots(self._tiers.ring) as held:
                held.pin(keys)
                ready = held.places(Outcome.READY)
                return Pins(keys[ready], self._pinned, held.hand_over(ready).release)

    def in_flight(self, keys: Keys) -> Mask:
        """``bool[n]``: True where somebody fills the ring's slot now, from an engine's memory or a file.

        An owner that died counts until somebody waits for its slot: ask a limited number of times.
        """
        check_keys(keys)
        with self._work.entered() as entered:
            if not entered or not len(keys):
                return np.zeros(len(keys), dtype=np.bool_)
            loading = np.zeros(len(keys), dtype=np.bool_)
            with HeldSlots(self._tiers.ring) as held:
                held.pin(keys)
                loading[held.places(Outcome.LOADING)] = True
            return loading

    def residents(self) -> Residents:
        """What the ring holds, and what of it any process of this node uses now."""
        with self._work.entered() as entered:
            if not entered:
                return NO_RESIDENTS
            keys, used = self._tiers.ring.residents()
            return Residents(keys[:, :NAME_BYTES], used)

    def touch(self, keys: Keys) -> None:
        """Mark as used: in the ring now, on the medium in the background, at most once a minute each."""
        check_keys(keys)
        with self._work.entered() as entered:
            if not entered or not len(keys):
                return
            found = self._tiers.ring.touch(keys, interval_s=self._tiers.limits.touch_interval_s)
            absent = self._touches.due(keys[found == Touch.ABSENT])
            due = np.concatenate((keys[found == Touch.DUE], absent))
            if len(due):
                self._background(lambda: self._tiers.files.touch(due))

    def drop(self, keys: Keys) -> None:
        """Remove from the ring (unless referenced) and the medium; a write that is under way still lands."""
        check_keys(keys)
        with self._work.entered() as entered:
            if entered:
                self._tiers.ring.drop(keys)
                self._tiers.files.drop(keys)

    def names(self) -> Iterator[Keys]:
        """Names (the first 16 bytes of each key, ``uint8[n, 16]``) of what lies on the medium, in slices."""
        slices = self._tiers.files.names()
        while not self._work.closed and (found := next(slices, None)) is not None:
            yield found

    def statistics(self) -> BlockStoreStatistics:
        """A moment of this store; the last one after `close`. All zero in a forked child."""
        if self._work.foreign:
            return BlockStoreStatistics(working=0, pending_writes=0, pins=0, ring=None)
        working = self._work.count
        ring = self._last_ring
        with self._work.entered() as entered, suppress(StoreError):  # a ring that cannot be looked at now
            ring = self._tiers.ring.statistics() if entered else ring
        return BlockStoreStatistics(working, self._writer.pending, self._pinned.count, ring)

    def check_integrity(self) -> None:
        """Raise `ucm_core.StoreError` when the ring's books do not balance; nothing after `close`."""
        with self._work.entered() as entered:
            if entered:
                self._tiers.ring.check_integrity()

    def revoke(self) -> None:
        """Let no load end ``OK`` any more, also of those under way: a computation is over. Saves go on."""
        self._revoked = True

    def close(self, timeout_s: float = 30.0) -> CloseReport:
        """Refuse new work, let what was begun end (at most ``timeout_s``), let go of the ring. Idempotent.

        Says what was kept of what was on its way to the medium; so does one log line when not all was.
        """
        if not self._work.close():
            return self._report
        deadline, before = time.monotonic() + timeout_s, self._writer.tally
        self._desk.close()
        drained = self._work.wait_idle(timeout_s)
        drained &= self._writer.wait_idle(max(0.0, deadline - time.monotonic()))
        self._report = self._reported(before)
        if drained:
            with suppress(StoreError):
                self._last_ring = self._tiers.ring.statistics()
            self._pinned.forget()
            self._writer.close()
            self._tiers.ring.close()  # else it stays mapped: a thread may still write into it
        return self._report

    # -- private

    def _reported(self, before: tuple[int, int]) -> CloseReport:
        (kept, lost), pending, working = self._writer.tally, self._writer.pending, self._work.count
        report = CloseReport(self._tiers.row, kept - before[0], lost - before[1] + pending, working + pending)
        if report.unfinished:
            metrics.ERRORS.labels(where="store_close").inc()
            count_failures("close", np.full(pending, ResultCode.TIMEOUT, dtype=np.uint8))
        if report.lost or report.unfinished:
            log.warning(
                "row %s is closed: %d objects reached the medium, %d did not, %d pieces of work still run",
                *(report.row, report.kept, report.lost, report.unfinished),
            )
        return report

    def _lookup(self, keys: Keys) -> Mask:
        found = self._tiers.ring.lookup(keys).view(np.bool_)
        in_ring = int(np.count_nonzero(found))
        self._looked_up["ring"].inc(in_ring)
        if in_ring < len(keys):
            elsewhere = np.flatnonzero(~found)
            found[elsewhere] = in_files = self._tiers.files.exist(keys[elsewhere])
            self._looked_up["file"].inc(int(np.count_nonzero(in_files)))
            self._looked_up["absent"].inc(int(np.count_nonzero(~in_files)))
        return found

    def _holds(self, order: LoadOrder) -> bool:
        """Whether the ring holds a whole batch at this moment; what fails here, the load itself will tell."""
        with self._work.entered() as entered, suppress(Exception):
            return entered and bool(self._tiers.ring.lookup(order.batch.keys).all())
        return False

    def _order(self, keys: Keys, target: BlockTarget | None, parents: Keys | None) -> LoadOrder:
        batch = KeyBatch(keys, parents)
        ticket = Ticket(batch.count, self.geometry.shards, durable=False)
        return LoadOrder(batch, ticket, target, lambda: self._revoked)

    def _start(self, order: LoadOrder, priority: Priority, work: LoadWork, *, times: int = 1) -> Ticket:
        with self._or_nothing(order.ticket):
            for ids in self._tiers.chunks(len(order.batch), times=times):
                piece = partial(work, self._tiers, order, ids=ids)
                self._submit(priority, order.ticket, order.batch.positions(ids), piece)
        return order.ticket

    def _load_hits(self, keys: Keys, target: BlockTarget) -> Ticket | None:
        """Copy a small batch that the ring holds whole, the shortest way; None: nothing was done."""
        if len(keys) * self.geometry.payload_bytes > INLINE_BYTES or self._revoked:
            return None
        with self._work.entered() as entered:
            if not entered or not load_hits(self._tiers, keys, target=target):
                return None
        code = ResultCode.CANCELLED if self._revoked else ResultCode.OK
        if code == ResultCode.OK:
            self._loaded.inc(len(keys))
        return Ticket.of_load(len(keys), self.geometry.shards, code=code)

    def _load_inline(self, order: LoadOrder) -> bool:
        """Copy a small batch that the ring holds whole on this thread; False: nothing is settled."""
        if len(order.batch) * self.geometry.payload_bytes > INLINE_BYTES:
            return False
        whole = True

        def work() -> None:
            nonlocal whole
            whole = deliver_resident(self._tiers, order, ids=np.arange(len(order.batch)))

        self._run(order.ticket, np.arange(order.batch.count), work)
        return whole

    def _submit(
        self, priority: Priority, ticket: Ticket, positions: Int64s, work: Callable[[], None]
    ) -> None:
        """Queue work that settles ``positions``; they are settled whatever becomes of it."""
        begun = Work(ticket)
        if self._work.begin(begun):
            guarded = partial(self._guard, begun, ticket, positions, work=work)
            if self._tiers.pool.submit(priority, guarded):
                return
            self._work.end(begun)
        ticket.settle(positions, ResultCode.CANCELLED)

    def _run(self, ticket: Ticket, positions: Int64s, work: Callable[[], None]) -> None:
        """`_submit` on this thread."""
        begun = Work(ticket)
        try:
            if self._work.begin(begun):
                self._guard(begun, ticket, positions, work=work)
            else:
                ticket.settle(positions, ResultCode.CANCELLED)
        finally:
            self._work.end(begun)

    @contextmanager
    def _or_nothing(self, ticket: Ticket) -> Iterator[None]:
        """When a signal's handler ends the call that begins work for ``ticket``, that work is over as well.

        The caller gets no ticket, and may use the memory for something else.
        """
        try:
            yield
        except BaseException:
            ticket.cancel()
            if not self._work.give_up(ticket, _INTERRUPTED_WAIT_S):
                log.error("row %s: a call was ended by an exception, its work still runs", self._tiers.row)
            raise

    def _background(self, work: Callable[[], None]) -> None:
        """Queue work that nobody waits for."""
        nobody = Ticket(0, durable=False)
        self._submit(Priority.WRITE, nobody, np.zeros(0, dtype=np.int64), work)

    def _guard(self, begun: Work, ticket: Ticket, positions: Int64s, *, work: Callable[[], None]) -> None:
        """Run ``work``; after an exception what it left unsettled is ``UNAVAILABLE``: no ticket is lost."""
        try:
            if self._work.start(begun):
                work()
        except BaseException as error:
            # The border of the store: storage never raises into the engine's loop.
            metrics.ERRORS.labels(where="block_store").inc()
            log.exception("row %s: unexpected failure", self._tiers.row)
            ticket.settle(positions, ResultCode.UNAVAILABLE)
            ticket.settle_durable(positions, ResultCode.UNAVAILABLE)
            if not isinstance(error, Exception):  # somebody wants to end the program, or this task
                raise
        finally:
            self._work.end(begun)
