"""The few threads that do file work for all stores of one cache."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from ucm_core.flow.own import OwnCondition
from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger

_log = quiet_logger(__name__)


class Priority(IntEnum):
    """What goes first: somebody waits for a load, nobody waits for a pass of the collector."""

    LOAD = 0
    PREFETCH = 1
    WRITE = 2
    BACKGROUND = 3


class IoPool:
    """Threads on queues by priority; they sleep while there is nothing to do and start on first use.

    At most ``write_threads`` of them write at a time, however many writes are queued, so that a load finds
    one that is free; None = all but one, where there are several. The queues need no bound of their own: a
    queued write holds bounded memory, and a queued load its caller's ticket.
    """

    def __init__(self, threads: int, *, write_threads: int | None = None) -> None:
        self._limit = threads
        self._changed = OwnCondition()
        self._queues: dict[Priority, deque[Callable[[], None]]] = {priority: deque() for priority in Priority}
        self._most = dict.fromkeys(Priority, threads)
        self._most[Priority.WRITE] = min(threads, write_threads or max(1, threads - 1))
        self._busy = dict.fromkeys(Priority, 0)
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    @property
    def threads(self) -> int:
        """The most threads that work at the same time."""
        return self._limit

    @property
    def write_threads(self) -> int:
        """The most threads that write at the same time."""
        return self._most[Priority.WRITE]

    def submit(self, priority: Priority, work: Callable[[], None]) -> bool:
        """Queue ``work``; what it raises is logged and counted.

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
            self._queues[priority].append(work)
            self._changed.notify()
        return True

    def give_way(self) -> None:
        """Run the loads that are queued on this thread, between two parts of a long piece of work."""
        while (work := self._take_load()) is not None:
            self._finish(Priority.LOAD, work)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuse new work, finish what is queued, and wait at most ``timeout_s`` for the threads to end.

        False: some have not, or this is a forked child, which has none of them.
        """
        if self._changed.foreign:
            return False
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"ucm-io-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more; those that we have do the work
            metrics.ERRORS.labels(where="io_thread").inc()
            _log.warning("no further I/O thread: %s", error)
        else:
            self._threads.append(thread)

    def _run(self) -> None:
        while self._run_next():
            pass  # nothing of a piece of work outlives it: an idle thread keeps nobody's memory alive

    def _run_next(self) -> bool:
        """Wait for a piece of work and run it; False: this thread ends, others finish what is left."""
        taken = self._take()
        if taken is None:
            return False
        self._finish(*taken)
        return True

    def _finish(self, priority: Priority, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the border of a thread, which must outlive any piece of work
            metrics.ERRORS.labels(where="io_thread").inc()
            _log.exception("work on an I/O thread failed")
        with self._changed:
            self._busy[priority] -= 1
            if self._next() is not None:
                self._changed.notify()  # a write may have waited for its turn

    def _take_load(self) -> Callable[[], None] | None:
        with self._changed:
            if not self._queues[Priority.LOAD]:
                return None
            self._busy[Priority.LOAD] += 1
            return self._queues[Priority.LOAD].popleft()

    def _take(self) -> tuple[Priority, Callable[[], None]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._next() is not None or self._closed)
            self._idle -= 1
            priority = self._next()
            if priority is None:
                return None
            self._busy[priority] += 1
            return priority, self._queues[priority].popleft()

    def _next(self) -> Priority | None:
        """The first kind of work that is queued and may have one more thread."""
        return next((p for p in Priority if self._queues[p] and self._busy[p] < self._most[p]), None)
