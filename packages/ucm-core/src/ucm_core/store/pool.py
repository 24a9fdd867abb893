"""The few threads that do file work for all stores of one cache."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush

from ucm_core.flow.own import OwnCondition
from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger

_log = quiet_logger(__name__)


class Priority(IntEnum):
    """What goes first: somebody waits for a load, nobody waits for a pass of the collector."""

    COPY = 0
    """Units that the ring holds: work that waits for nobody, not even for a medium."""
    LOAD = 1
    READ = 2
    """Files of loads by units: work that waits for nobody."""
    GATHER = 3
    """Units out of an engine, which keeps its memory until then."""
    WAIT = 4
    """A short wait for what others do, to be queued again: never in the way of what can be done."""
    PREFETCH = 5
    WRITE = 6
    BACKGROUND = 7


_IN_ORDER = tuple(Priority)

Work = Callable[[], None]
_Queue = list[tuple[int, int, Work]]  # a heap of (rank, number, work)


class IoPool:
    """Threads on queues by priority, and by rank in each; they sleep while there is nothing to do.

    At most ``write_threads`` of them write at a time, however many writes are queued, so that a load finds
    one that is free; None = all but one, where there are several. Reads and copies for loads by units have a
    thread each beside these, which works when all of these are kept, perhaps for ever by a medium that hangs.
    The queues need no bound of their own: a queued write holds bounded memory, and a queued load its caller's
    ticket.
    """

    def __init__(self, threads: int, *, write_threads: int | None = None) -> None:
        self._limit = threads
        self._changed = OwnCondition()
        self._queues: dict[Priority, _Queue] = {priority: [] for priority in Priority}
        self._numbers = itertools.count()
        self._most = dict.fromkeys(Priority, threads)
        self._most[Priority.WRITE] = min(threads, write_threads or max(1, threads - 1))
        self._most[Priority.READ] = threads + 1  # and what a spare thread reads, perhaps for ever
        self._most[Priority.COPY] = max(1, min(threads, (os.cpu_count() or 1) // 2))
        self._busy = dict.fromkeys(Priority, 0)
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._spare: dict[Priority, IoPool] = {}
        self._closed = False

    @property
    def threads(self) -> int:
        """The most threads that work at the same time."""
        return self._limit

    @property
    def copy_threads(self) -> int:
        """The most threads that copy memory at the same time: those of half of the processors.

        Two processors are seldom faster than the memory of one, and wait for it at twice the cost.
        """
        return self._most[Priority.COPY]

    @property
    def write_threads(self) -> int:
        """The most threads that write at the same time."""
        return self._most[Priority.WRITE]

    def submit(self, priority: Priority, work: Work, *, rank: int = 0) -> bool:
        """Queue ``work``, the smallest ``rank`` of a priority first; what it raises is logged and counted.

        False after `close`, in a forked child, and while the system gives no thread at all: it will not run.
        """
        if self._changed.foreign:
            return False
        with self._changed:
            if self._closed:
                return False
            if self._idle <= sum(map(len, self._queues.values())) and len(self._threads) < self._limit:
                self._start()
            if not self._threads:
                return False
            if self._busy[priority] + len(self._queues[priority]) < self._most[priority]:
                self._changed.notify()  # else enough of them were told, and who ends such work takes this
            heappush(self._queues[priority], (rank, next(self._numbers), work))
            spare = self._find_spare(priority)
        if spare is not None:
            spare.submit(Priority.LOAD, lambda: self._run_here(priority))
        return True

    def give_way(self) -> None:
        """Run the loads that are queued on this thread, between two parts of a long piece of work."""
        self._run_here(Priority.COPY)
        self._run_here(Priority.LOAD)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuse new work, finish what is queued, and wait at most ``timeout_s`` for the threads to end.

        False: some have not, or this is a forked child, which has none of them.
        """
        if self._changed.foreign:
            return False
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            spare = list(self._spare.values())
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_left_s(deadline))
        ended = not any(thread.is_alive() for thread in self._threads)
        for pool in spare:
            ended &= pool.close(_left_s(deadline))
        return ended

    def _find_spare(self, priority: Priority) -> IoPool | None:
        """The thread that only does this, where others may keep all of ours."""
        busy = sum(self._busy.values())
        if priority is Priority.COPY:
            kept = busy >= len(self._threads) and not self._busy[priority]  # who copies copies this as well
        else:
            queued = sum(map(len, self._queues.values()))
            kept = priority is Priority.READ and busy + queued > len(self._threads)
        if kept and priority not in self._spare:
            self._spare[priority] = IoPool(1)
        return self._spare[priority] if kept else None

    def _run_here(self, priority: Priority) -> None:
        """Run what is queued of this priority on this thread."""
        while (work := self._take_queued(priority)) is not None:
            self._finish(priority, work)
            with self._changed:
                self._wake_next()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"ucm-io-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except BaseException as error:
            if not thread.is_alive():
                self._threads.remove(thread)
            if not isinstance(error, RuntimeError):  # a signal's handler ended this call
                raise
            metrics.ERRORS.labels(where="io_thread").inc()
            _log.warning("no further I/O thread: %s", error)  # those that we have do the work

    def _run(self) -> None:
        with self._changed:  # not before whoever starts this thread has noted it, or has taken that back
            if threading.current_thread() not in self._threads:
                return
        while self._run_next():
            pass  # nothing of a piece of work outlives it: an idle thread keeps nobody's memory alive

    def _run_next(self) -> bool:
        """Wait for a piece of work and run it; False: this thread ends, others finish what is left."""
        taken = self._take()
        if taken is None:
            return False
        self._finish(*taken)
        return True

    def _finish(self, priority: Priority, work: Work) -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the border of a thread, which must outlive any piece of work
            metrics.ERRORS.labels(where="io_thread").inc()
            _log.exception("work on an I/O thread failed")
        with self._changed:
            self._busy[priority] -= 1

    def _take_queued(self, priority: Priority) -> Work | None:
        with self._changed:
            return self._pop(priority) if self._queues[priority] else None

    def _take(self) -> tuple[Priority, Work] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._next() is not None or self._closed)
            self._idle -= 1
            priority = self._next()
            if priority is None:
                return None
            work = self._pop(priority)
            self._wake_next()
            return priority, work

    def _wake_next(self) -> None:
        """Wake one more thread where there is more to do: it may have waited for its turn."""
        if self._next() is not None:
            self._changed.notify()

    def _pop(self, priority: Priority) -> Work:
        self._busy[priority] += 1
        return heappop(self._queues[priority])[2]

    def _next(self) -> Priority | None:
        """The first kind of work that is queued and may have one more thread."""
        return next((p for p in _IN_ORDER if self._queues[p] and self._busy[p] < self._most[p]), None)


def _left_s(deadline: float | None) -> float | None:
    """Seconds until then, as many as a thread can wait; None = without end."""
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
