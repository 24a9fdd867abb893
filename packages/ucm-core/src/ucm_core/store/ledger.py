"""The books of a block store: what is pinned, what is under way, what was touched lately."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np

from ucm_core.flow.own import OwnCondition
from ucm_core.spec.keys import NAME_BYTES, Keys
from ucm_core.store.arrays import Mask, Names

TOUCH_INTERVAL_S = 60
TOUCH_MEMORY_KEYS = 1 << 16
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Residents:
    """What a ring holds, at one moment."""

    names: Names
    """``uint8[n, 16]``, the first bytes of the keys, as in the files' names."""
    used: Mask
    """``bool[n]``: whether anybody, of any process, holds a reference."""

    @classmethod
    def together(cls, parts: Iterable[Residents]) -> Self:
        """The residents of several rings."""
        columns = [(part.names, part.used) for part in (NO_RESIDENTS, *parts)]
        names, used = zip(*columns, strict=True)
        return cls(np.concatenate(names), np.concatenate(used))

    def in_use(self) -> frozenset[bytes]:
        """Names of those that are used."""
        return frozenset(map(bytes, self.names[self.used]))

    def hold(self, name: bytes) -> bool:
        """Whether the object ``name`` is there."""
        return bool((self.names == np.frombuffer(name, dtype=np.uint8)).all(axis=1).any())


NO_RESIDENTS = Residents(np.zeros((0, NAME_BYTES), np.uint8), np.zeros(0, np.bool_))


class Pins:
    """Objects kept in the ring; `release` ends it, once. A further release is a no-op.

    Pins hold room that nobody else can use: keep them short, and never across a wait for other pins. They end
    with the last who has them.
    """

    def __init__(self, keys: Keys, book: PinBook, let_go: Callable[[], None]) -> None:
        self.keys = keys
        """``uint8[n, 32]``: the keys that are kept, a part of those asked for."""
        self._book, self._let_go = book, let_go
        book.add(self)

    def release(self) -> None:
        """Let the ring have the slots again."""
        if self._book.remove(self):
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class PinBook:
    """The ledger of pins: an entry is removed exactly once."""

    def __init__(self) -> None:
        self._lock = OwnCondition()
        self._entries: set[weakref.ref[Pins]] = set()

    @property
    def count(self) -> int:
        """Objects that are pinned now."""
        with self._lock:
            found = [entry() for entry in list(self._entries)]
        return sum(len(pins.keys) for pins in found if pins is not None)

    def add(self, pins: Pins) -> None:
        """Enter one set of pins. In a forked child it is of nothing, and not entered."""
        if not self._lock.foreign:
            with self._lock:
                self._entries.add(weakref.ref(pins, self._entries.discard))

    def remove(self, pins: Pins) -> bool:
        """Strike it out; False when it was struck before, or in a forked child, which holds nothing."""
        if self._lock.foreign:
            return False
        with self._lock:
            entered = weakref.ref(pins) in self._entries
            self._entries.discard(weakref.ref(pins))
            return entered

    def forget(self) -> None:
        """Strike everything out: the ring is gone."""
        with self._lock:
            self._entries.clear()


class Work:
    """One piece of work, counted by a `WorkGate` from `WorkGate.begin` to `WorkGate.end`.

    It is made before it is begun, so that a signal's handler that raises in between leaves nothing counted::

        work = Work(ticket)
        try:
            if gate.begin(work): ...
        finally:
            gate.end(work)

    One that nobody has any more does not count either.
    """

    __slots__ = ("__weakref__", "started", "whom")

    def __init__(self, whom: object = None) -> None:
        self.whom = whom
        """For whom it is done."""
        self.started = False
        """Whether it is not only queued."""


class WorkGate:
    """Counts the work that is queued or running; closed, it lets nothing begin.

    In a forked child it is closed: the threads that would do the work are the parent's.
    """

    def __init__(self) -> None:
        self._changed = OwnCondition()
        self._closed = False
        self._open: set[weakref.ref[Work]] = set()

    @property
    def count(self) -> int:
        """Pieces of work that have begun and not ended."""
        return len(self._open)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed or self.foreign

    def begin(self, work: Work) -> bool:
        """Count it in; False after `close`."""
        if self.foreign:  # before the lock, which another thread may have held when it forked
            return False
        with self._changed:
            if not self._closed:
                self._open.add(weakref.ref(work, self._open.discard))
            return not self._closed

    def start(self, work: Work) -> bool:
        """Say that it is not only queued any more; False: it was given up meanwhile."""
        with self._changed:
            work.started = weakref.ref(work) in self._open
            return work.started

    def end(self, work: Work) -> None:
        """Count it out, if it is counted."""
        self._open.discard(weakref.ref(work))
        if not self.foreign:
            with self._changed:
                self._changed.notify_all()

    def give_up(self, whom: object, timeout_s: float) -> bool:
        """Count out what is queued for ``whom``, and wait for what has started."""
        with self._changed:
            for work in self._works(whom):
                if not work.started:
                    self._open.discard(weakref.ref(work))
        return self._wait_for(lambda: not self._works(whom), timeout_s)

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Count the body in, so that a closer waits for it; False: closed, and nothing may be touched."""
        work = Work()
        try:
            yield self.begin(work)
        finally:
            self.end(work)

    def close(self) -> bool:
        """True for the first caller."""
        if self.foreign:
            return False
        with self._changed:
            first, self._closed = not self._closed, True
            return first

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child, which has none of the threads that would do the work."""
        return self._changed.foreign

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no work is counted."""
        return self._wait_for(lambda: not self._open, timeout_s)

    def _works(self, whom: object) -> list[Work]:
        found = [entry() for entry in list(self._open)]
        return [work for work in found if work is not None and work.whom is whom]

    def _wait_for(self, over: Callable[[], bool], timeout_s: float) -> bool:
        """Nobody says when nobody has a piece of work any more: look again now and then."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not over() and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait_for(over, min(left_s, _LOOK_S))
            return over()


class RecentTouches:
    """When files that the ring does not hold were touched last; of what it holds, the ring knows it."""

    def __init__(self, interval_s: float = TOUCH_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lock = OwnCondition()
        self._last: dict[bytes, float] = {}  # the longest untouched first

    def due(self, keys: Keys) -> Keys:
        """The keys not touched within the interval; from now on they are."""
        names = np.ascontiguousarray(keys).view("V32").ravel().tolist()
        now = time.monotonic()
        with self._lock:
            last = self._last
            horizon = now - self._interval_s  # a verdict asks for every block it promises: no call per key
            due = [place for place, name in enumerate(names) if last.get(name, horizon) <= horizon]
            for place in due:
                last.pop(names[place], None)
                last[names[place]] = now
            for name in list(itertools.islice(last, max(0, len(last) - TOUCH_MEMORY_KEYS))):
                del last[name]
        return keys[due]
