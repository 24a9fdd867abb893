"""The few threads that do file work for all stores of one cache."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from collections.abc import Callable
from enum import IntEnum

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
    """Threads on one priority queue; they block while it is empty and start on first use.

    The queue needs no bound of its own: a queued write holds a ring slot and a queued load its caller's
    ticket.
    """

    def __init__(self, threads: int) -> None:
        self._limit = threads
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    @property
    def threads(self) -> int:
        """The most threads that work at the same time."""
        return self._limit

    def submit(self, priority: Priority, work: Callable[[], None]) -> bool:
        """Queue ``work``; what it raises is logged and counted.

        False after `close`, in a forked child, and while the system gives no thread at all: it will not run.
        """
        if os.getpid() != self._pid:
            return False
        with self._changed:
            if self._closed:
                return False
            if self._idle <= len(self._queue) and len(self._threads) < self._limit:
                self._start()
            if not self._threads:
                return False
            heapq.heappush(self._queue, (priority, next(self._order), work))
            self._changed.notify()
        return True

    def close(self, timeout_s: float | None = None) -> None:
        """Refuse new work, finish what is queued, and wait at most ``timeout_s`` for each thread to end."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

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
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException:  # noqa: BLE001 - the border of a thread, which must outlive any piece of work
                metrics.ERRORS.labels(where="io_thread").inc()
                _log.exception("work on an I/O thread failed")

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._idle -= 1
            return heapq.heappop(self._queue)[2] if self._queue else None
