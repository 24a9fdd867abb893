"""Tickets: what became of every shard of every object of one load or save.

A ticket has two questions, each answered once per object and never taken back:

* *results*: are the bytes where the call promised? (load: in the target; save: readable by every process of
  the node, from the ring or from the medium)
* *durable results*: are the bytes on the medium? (a load or a prefetch asks nothing of the medium, so its
  durable results follow its results)

No failure can be lost: an object that failed the first question fails the second with the same code, a code
that was given cannot be overwritten, and a waiter that sees ``True`` from `wait_durable` has every byte on
the medium.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from ucm_core.flow.own import OwnCondition
from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger

Codes = npt.NDArray[np.uint8]
Indices = npt.ArrayLike

_log = quiet_logger(__name__)


class ResultCode(IntEnum):
    """The outcome of one shard. Every code but ``OK`` means: these bytes are not there, do not use them."""

    OK = 0
    """The bytes are where the call promised."""
    MISS = 1
    """Nothing is stored under this key."""
    CORRUPT = 2
    """Something was stored that is not this object (short, flipped, swapped, foreign); it was dropped."""
    NO_SPACE = 3
    """No ring slot in bounded time, a full file system, or the capacity bound."""
    UNAVAILABLE = 4
    """The medium answered with an error that may pass (EIO, ESTALE, EACCES, a read-only root)."""
    TIMEOUT = 5
    """Another reader of the same object did not finish in bounded time."""
    INVALID = 6
    """The caller's source or target raised."""
    CANCELLED = 7
    """Cancelled, or closed, before the work began."""
    PENDING = 255
    """Not known yet; never seen in a ticket that is done."""


# As numpy takes them without asking an enumeration: a ticket is settled once per piece of work.
_WHOLE = slice(None)
_OK, _PENDING = np.uint8(ResultCode.OK), np.uint8(ResultCode.PENDING)


class Level(IntEnum):
    """How far the bytes of a save have come."""

    SUBMITTED = 0
    """Accepted, nothing promised."""
    IN_RING = 1
    """Readable by every process of this node while the ring lives."""
    ON_MEDIUM = 2
    """Renamed into place: survives kill -9 of every process."""
    SYNCED = 3
    """Flushed to the device: survives loss of power."""


_IN_RING = np.uint8(Level.IN_RING)


class Ticket:
    """The live record of one batch, written by the store and read by the caller, on any thread.

    ``results`` has the shape ``[objects, shards]``. A ticket for zero objects is done at once. In a forked
    child a ticket of its parent raises ClosedError: nobody would settle it there.

    >>> ticket = Ticket(2, shards=3, durable=False)
    >>> ticket.settle([0], ResultCode.OK)
    >>> ticket.wait(timeout_s=0)
    False
    >>> ticket.settle([1], ResultCode.MISS)
    >>> ticket.wait(timeout_s=0), ticket.ok
    (True, False)
    >>> ticket.object_results.tolist()
    [0, 1]
    """

    def __init__(self, objects: int, shards: int = 1, *, durable: bool) -> None:
        self._changed = OwnCondition()
        self._results: Codes = np.full((objects, shards), _PENDING)
        self._durable: Codes = np.full(objects, _PENDING)
        self._levels: Codes = np.zeros(objects, dtype=np.uint8)  # of Level.SUBMITTED
        self._present: npt.NDArray[np.bool_] = np.zeros(objects, dtype=np.bool_)
        self._asks_medium = durable
        self._cancelled = self._abandoned = False
        self._copying = 0
        self._shard_waiters = 0
        self._callbacks: list[Callable[[Ticket], None]] = []
        self._shard_callbacks: list[tuple[int, Callable[[Ticket], None]]] = []

    @classmethod
    def of_load(cls, objects: int, shards: int, *, code: ResultCode) -> Self:
        """A ticket of a load that is over: this code for everything."""
        ticket = cls(objects, shards, durable=False)
        ticket._results.fill(code)
        ticket._durable.fill(code)
        ticket._levels.fill(Level.IN_RING if code == ResultCode.OK else Level.SUBMITTED)
        return ticket

    # -- what the caller reads

    @property
    def results(self) -> Codes:
        """A copy of the codes so far, ``uint8[objects, shards]`` of `ResultCode`."""
        with self._changed:
            return self._results.copy()

    @property
    def object_results(self) -> Codes:
        """One code per object, ``uint8[objects]``: ``OK`` when all shards are, else the highest code."""
        with self._changed:
            return _worst(self._results)

    @property
    def durable_results(self) -> Codes:
        """One code per object for the medium, ``uint8[objects]``."""
        with self._changed:
            return self._durable.copy()

    @property
    def stored(self) -> npt.NDArray[np.bool_]:
        """Where this save brought the bytes, ``bool[objects]``; False where it found them on the medium.

        What was there before may be what failed to load; what was stored is new, in the ring at least.
        """
        with self._changed:
            stored: npt.NDArray[np.bool_] = (_worst(self._results) == ResultCode.OK) & ~self._present
            return stored

    @property
    def levels(self) -> Codes:
        """How far each object has come, ``uint8[objects]`` of `Level`; a failed object stays where it was."""
        with self._changed:
            return self._levels.copy()

    @property
    def level(self) -> Level:
        """The level that *every* object has reached (`Level.SYNCED` for a batch of none)."""
        levels = self.levels
        return Level(int(levels.min())) if levels.size else Level.SYNCED

    @property
    def done(self) -> bool:
        """True when every shard has its code."""
        with self._changed:
            return self._is_done()

    @property
    def ok(self) -> bool:
        """True when every shard of every object is ``OK`` (False while any is pending)."""
        with self._changed:
            return not self._results.any()

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called; work that has begun still ends with its own code."""
        return self._cancelled

    def wait(self, timeout_s: float | None = None, *, shard: int | None = None) -> bool:
        """Wait until every object has its code (of one ``shard``, or of all); False: not in ``timeout_s``.

        True says that the codes are known, not that they are good: read `ok` or `results`.
        """
        with self._changed:
            self._shard_waiters += shard is not None
            try:
                return self._changed.wait_for(lambda: self._is_done(shard), timeout_s)
            finally:
                self._shard_waiters -= shard is not None

    def wait_durable(self, timeout_s: float | None = None) -> bool:
        """Wait for the medium. True only when every object is on it; `durable_results` says what is not."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._durable == _PENDING).any(), timeout_s)
            return not self._durable.any()

    def cancel(self) -> None:
        """Ask that work which has not begun is not begun. Wait for the ticket before memory is reused."""
        self._cancelled = True

    def abandon(self) -> None:
        """`cancel`, and do not wait for a medium: what nobody copies now is ``CANCELLED`` at once.

        Nothing is copied from or to the caller's memory any more once the ticket is done.
        """
        with self._changed:
            self._cancelled = self._abandoned = True
            copying = self._copying > 0
        if not copying:
            self._cancel_rest()

    def add_done_callback(self, callback: Callable[[Ticket], None]) -> None:
        """Call ``callback(ticket)`` once when every shard has its code; at once when that is so already.

        It runs on the thread that settles the last shard and must be short. What it raises is logged and
        counted (``ucm_errors_total{where="ticket_callback"}``), and does not disturb the store.
        """
        with self._changed:
            if not self._is_done():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def add_shard_callback(self, shard: int, callback: Callable[[Ticket], None]) -> None:
        """As `add_done_callback`, once every object has its code of one ``shard``."""
        with self._changed:
            if not self._is_done(shard):
                self._shard_callbacks.append((shard, callback))
                return
        self._call(callback)

    # -- what the store writes

    @contextmanager
    def copying(self) -> Iterator[bool]:
        """Around every copy from or to the caller's memory; False: `abandon` was called, do not copy."""
        with self._changed:
            begins = not self._abandoned
            self._copying += begins
        try:
            yield begins
        finally:
            with self._changed:
                self._copying -= begins
                ends = begins and self._abandoned and not self._copying
            if ends:
                self._cancel_rest()

    def settle(self, objects: Indices, codes: npt.ArrayLike, *, shards: slice = _WHOLE) -> None:
        """Give ``objects`` (indices) their code: one for all, for each, or for each shard of each.

        A shard that has one keeps it.
        """
        index = np.atleast_1d(np.asarray(objects, dtype=np.int64))
        given = np.asarray(codes, dtype=np.uint8)
        values = given[:, None] if given.ndim == 1 else given
        with self._changed:
            window = self._results[index, shards]
            pending = window == _PENDING
            all_pending = np.count_nonzero(pending) == pending.size
            self._results[index, shards] = values if all_pending else np.where(pending, values, window)
            self._follow(index, all_ok=all_pending and shards == _WHOLE and not np.count_nonzero(given))
            done = self._is_done()
            if done or self._shard_waiters:  # who waits for all is not woken for a part
                self._changed.notify_all()
            callbacks = self._take_callbacks() if done else []
            if self._shard_callbacks:
                callbacks += self._take_shard_callbacks()
        for callback in callbacks:
            self._call(callback)

    def settle_durable(
        self, objects: Indices, codes: npt.ArrayLike, *, level: Level = Level.ON_MEDIUM
    ) -> None:
        """Say what the medium did with ``objects``; an object that has a durable code keeps it."""
        index, values = _pairs(objects, codes)
        with self._changed:
            pending = self._durable[index] == _PENDING
            self._durable[index] = np.where(pending, values, self._durable[index])
            reached = index[pending & (values == _OK)]
            self._levels[reached] = np.maximum(self._levels[reached], level)
            if not (self._durable == _PENDING).any():
                self._changed.notify_all()

    def settle_present(self, objects: Indices) -> None:
        """Say that ``objects`` are on the medium already: ``OK`` at once, and not `stored`."""
        with self._changed:
            self._present[np.asarray(objects, dtype=np.int64)] = True
        self.settle(objects, ResultCode.OK)
        self.settle_durable(objects, ResultCode.OK)

    def settle_rest(self, code: ResultCode) -> None:
        """Give everything that is still pending, on either level, this code (the border of a worker)."""
        everything = np.arange(self._durable.size)
        self.settle(everything, code)
        self.settle_durable(everything, code)

    # -- private

    def _cancel_rest(self) -> None:
        self.settle(np.arange(self._durable.size), ResultCode.CANCELLED)

    def _is_done(self, shard: int | None = None) -> bool:
        window = self._results if shard is None else self._results[:, shard]
        return not np.count_nonzero(window == _PENDING)

    def _follow(self, index: npt.NDArray[np.int64], *, all_ok: bool) -> None:
        """Carry settled results to the durable side: failures always, successes when no medium is asked."""
        codes = np.zeros(index.size, dtype=np.uint8) if all_ok else _worst(self._results[index])
        good = index if all_ok or not np.count_nonzero(codes) else index[codes == _OK]
        self._levels[good] = np.maximum(self._levels[good], _IN_RING)
        if self._asks_medium and good is index:
            return
        final = (codes != _PENDING) & (self._durable[index] == _PENDING)
        if self._asks_medium:
            final &= codes != _OK
        self._durable[index[final]] = codes[final]

    def _take_callbacks(self) -> list[Callable[[Ticket], None]]:
        taken, self._callbacks = self._callbacks, []
        return taken

    def _take_shard_callbacks(self) -> list[Callable[[Ticket], None]]:
        waiting = self._shard_callbacks
        self._shard_callbacks = [pair for pair in waiting if not self._is_done(pair[0])]
        return [pair[1] for pair in waiting if self._is_done(pair[0])]

    def _call(self, callback: Callable[[Ticket], None]) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001 - the caller's code on the store's thread: its failure is not the store's
            metrics.ERRORS.labels(where="ticket_callback").inc()
            _log.exception("a ticket's done callback raised")


class TicketGroup:
    """The tickets of one call that covers several rows."""

    def __init__(self, tickets: Mapping[str, Ticket]) -> None:
        self.rows = dict(tickets)
        """The ticket of each row."""

    @property
    def ok(self) -> bool:
        """True when every object of every row is ``OK``."""
        return all(ticket.ok for ticket in self.rows.values())

    @property
    def level(self) -> Level:
        """The level that every object has reached."""
        return min((ticket.level for ticket in self.rows.values()), default=Level.SYNCED)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when every object of every row has its code; see `Ticket`'s."""
        lock, open_rows = threading.Lock(), set(self.rows)

        def end(row: str) -> None:
            with lock:
                open_rows.discard(row)
                last = not open_rows
            if last:
                callback()

        if not open_rows:
            callback()
        for row, ticket in self.rows.items():
            ticket.add_done_callback(lambda _, row=row: end(row))  # type: ignore[misc]

    def cancel(self) -> None:
        """Ask that work which has not begun is not begun; see `Ticket.cancel`."""
        for ticket in self.rows.values():
            ticket.cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every object has its code, at most ``timeout_s`` in all; see `Ticket.wait`."""
        return self._each(lambda ticket, left_s: ticket.wait(left_s), timeout_s)

    def wait_durable(self, timeout_s: float | None = None) -> bool:
        """Wait for the medium, at most ``timeout_s`` in all. True only when everything is on it."""
        return self._each(lambda ticket, left_s: ticket.wait_durable(left_s), timeout_s)

    def _each(self, ask: Callable[[Ticket, float | None], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        answers = [
            ask(ticket, None if deadline is None else max(0.0, deadline - time.monotonic()))
            for ticket in self.rows.values()
        ]
        return all(answers)


def _pairs(objects: Indices, codes: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], Codes]:
    index = np.atleast_1d(np.asarray(objects, dtype=np.int64))
    values = np.asarray(codes, dtype=np.uint8)
    return index, values if values.shape == index.shape else np.broadcast_to(values, index.shape)


def _worst(results: Codes) -> Codes:
    """Reduce shards to one code, the highest: ``PENDING`` above all (not known yet), damage above a miss."""
    if not np.count_nonzero(results):  # most often; and so where there are no shards
        return np.zeros(results.shape[0], dtype=np.uint8)
    highest: Codes = results.max(axis=1)
    return highest
