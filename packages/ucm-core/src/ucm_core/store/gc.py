"""The collector: keeps all files under a root below the capacity bound, oldest use first.

A pass lists every object under the root, of all namespaces and rows, corrects the usage counter by what it
found, and removes whole families (all segments of one key) until usage is down to 85 % of the bound:

1. what nobody used for ``ttl_s``, all of it;
2. states whose covering block is gone, because nothing can resume there any more (`ucm_core.store.reach`);
3. what was not used for longest, by the latest modification of any of a family's files.

Nothing else is touched: no temporaries, no foreign files, links or directories, nothing that a process of
this node uses in a ring that this process has open, nothing that was used since it was listed. An open file
survives its removal. A pass begins when usage passes 95 % of the bound, when a write was refused, and every
few minutes while something is written and ``ttl_s`` is set.

A pass goes in slices, so that it keeps no thread from a load for long. Between them it holds nothing but
``<root>/.collector``, the lock that makes it the only one of all processes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger
from ucm_core.store.census import Census
from ucm_core.store.locks import KeptLock
from ucm_core.store.pool import IoPool, Priority
from ucm_core.store.reach import NOTHING, View
from ucm_core.store.removal import Removal
from ucm_core.store.root import CacheRoot

START_FRACTION = 0.95
END_FRACTION = 0.85
SLICE_S = 0.01
"""How long a pass goes on before it lets others have the thread."""
EXPIRY_INTERVAL_S = 300.0
"""Time between passes that nothing but ``ttl_s`` asks for."""
OTHERS_WAIT_S = 2.0
"""How long a refused write waits for what another process removes."""

_LOCK, _UNKNOWN = ".collector", 0
_log = quiet_logger("ucm_core.store.gc")


@dataclass(frozen=True, slots=True)
class Collection:
    """What was removed."""

    objects: int = 0
    """Files."""
    freed_bytes: int = 0

    def __add__(self, other: Collection) -> Collection:
        return Collection(self.objects + other.objects, self.freed_bytes + other.freed_bytes)

    def __sub__(self, other: Collection) -> Collection:
        return Collection(self.objects - other.objects, self.freed_bytes - other.freed_bytes)


class Collector:
    """Removes the objects that were not used for longest, for all processes of one root.

    ``view`` knows what must stay. Passes that nobody waits for run on ``pool``. Thread-safe: whoever needs a
    pass takes part in the one that goes on, a slice at a time.
    """

    def __init__(
        self, root: CacheRoot, pool: IoPool, *, view: View = NOTHING, ttl_s: float | None = None
    ) -> None:
        self._root, self._pool, self._view, self._ttl_s = root, pool, view, ttl_s
        self._turn = threading.Lock()
        self._pass: Generator[None] | None = None
        self._asked = False
        self._done = Collection()
        self._queued = threading.Lock()
        self._next_expiry = 0.0

    def make_room(self) -> bool:
        """Make a pass because a write was refused. True when it is worth a second try.

        Queued loads are run between its slices. While another process makes a pass, waits for it to help, at
        most `OTHERS_WAIT_S`. False when nothing may be removed.
        """
        before, used_bytes = self._done, _UNKNOWN
        try:
            self._run(_never, asked=True)  # one that goes on already may be enough
            if self._done == before and self._excess_bytes() > 0:
                used_bytes = self._root.usage.used_bytes
                self._run(_always, asked=True)
                self._await_others(used_bytes)
            return (
                self._done != before or self._excess_bytes() <= 0 or self._root.usage.used_bytes < used_bytes
            )
        except OSError as error:
            metrics.ERRORS.labels(where="collector").inc()
            _log.warning("cannot make room in %s: %s", self._root.path, error)
            return False

    def note_written(self) -> None:
        """Queue a pass when one is due and none is queued. Never raises."""
        try:
            due = self._is_due()
        except OSError:
            return  # the root is going away; the writes themselves will say so
        if due:
            self._queue(self._is_due)

    def take_stock(self) -> None:
        """Queue a pass that counts, whether one is due or not: others may have died with bytes reserved."""
        if self._root.available:  # what is wrong with the root was said when it was opened
            self._queue(_always)

    def collect(self) -> Collection:
        """Make a pass if one is due; does nothing while another process makes one."""
        before = self._done
        self._run(self._is_due)
        return self._done - before

    # -- private

    def _is_full(self) -> bool:
        return self._root.usage.used_bytes > START_FRACTION * self._root.usage.capacity_bytes

    def _is_due(self) -> bool:
        return self._is_full() or self._is_expiry_due()

    def _is_expiry_due(self) -> bool:
        """Whether neither we nor, by the lock file's time, anybody else looked for what is too old lately."""
        if self._ttl_s is None or time.monotonic() < self._next_expiry:
            return False
        try:
            last = (self._root.path / _LOCK).stat().st_mtime
        except FileNotFoundError:
            return True
        return abs(time.time() - last) >= EXPIRY_INTERVAL_S

    def _excess_bytes(self) -> int:
        return self._root.usage.used_bytes - int(END_FRACTION * self._root.usage.capacity_bytes)

    def _await_others(self, used_bytes: int) -> None:
        """Wait while another process makes a pass that has not removed anything so far."""
        deadline = time.monotonic() + OTHERS_WAIT_S
        while time.monotonic() < deadline and self._root.usage.used_bytes >= used_bytes:
            lock = KeptLock.take(self._root.path / _LOCK)
            if lock is not None:
                lock.release()
                return
            self._pool.give_way()
            time.sleep(SLICE_S)

    def _run(self, begin: Callable[[], bool], *, asked: bool = False) -> None:
        """All slices of a pass, of the one that goes on or of a new one if ``begin`` says so."""
        while self._step(begin, asked=asked):
            begin = _never
            self._pool.give_way()

    def _queue(self, begin: Callable[[], bool]) -> None:
        if self._queued.acquire(blocking=False):
            self._submit(begin)

    def _submit(self, begin: Callable[[], bool]) -> None:
        """Queue the next slice; the pool is closed: this was the last one."""
        if not self._pool.submit(Priority.BACKGROUND, lambda: self._run_queued(begin)):
            self._stop()
            self._queued.release()

    def _run_queued(self, begin: Callable[[], bool]) -> None:
        going = False
        try:
            going = self._step(begin)
        finally:
            if going:
                self._submit(_never)
            else:
                self._queued.release()

    def _step(self, begin: Callable[[], bool], *, asked: bool = False) -> bool:
        """One slice; False: there is no pass, or it is over."""
        with self._turn:
            self._asked |= asked
            going = False
            try:
                if self._pass is None and begin():
                    self._pass = self._begin()
                if self._pass is not None:
                    next(self._pass)
                    going = True
            except StopIteration:
                pass
            except OSError as error:
                metrics.ERRORS.labels(where="collector").inc()
                _log.warning("a pass over %s ended early: %s", self._root.path, error)
            finally:
                if not going:
                    self._pass, self._asked = None, False
            return going

    def _stop(self) -> None:
        with self._turn:
            if self._pass is not None:
                self._pass.close()

    def _begin(self) -> Generator[None] | None:
        """A new pass; None while another process makes one."""
        lock = KeptLock.take(self._root.path / _LOCK)
        return None if lock is None else self._slices(lock)

    def _slices(self, lock: KeptLock) -> Generator[None]:
        usage, removal = self._root.usage, None
        try:
            self._note_begin()
            begin, census = usage.begin_count(), Census(self._root.path, correct_times=True)
            while census.advance(SLICE_S):
                yield
            usage.end_count(begin, listed_bytes=census.total_bytes, complete=census.complete)
            removal = Removal(self._root, census, self._view, slice_s=SLICE_S)
            if self._ttl_s is not None:
                yield from removal.expired(census.began_ns - int(self._ttl_s * 1e9))
            if self._asked or self._is_full():
                yield from removal.eldest(self._excess_bytes)
        finally:
            lock.release()
            if removal is not None and removal.objects.total():
                done = Collection(removal.objects.total(), removal.freed_bytes)
                self._done += done
                _log.info("removed %d objects, %d bytes of the cache", done.objects, done.freed_bytes)

    def _note_begin(self) -> None:
        self._next_expiry = time.monotonic() + EXPIRY_INTERVAL_S
        os.utime(self._root.path / _LOCK, (time.time(), time.time()))


def _always() -> bool:
    return True


def _never() -> bool:
    return False
