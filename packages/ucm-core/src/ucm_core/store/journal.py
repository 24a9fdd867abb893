"""What became of the objects on the medium, for those who want to follow it: stored, removed, or "resync".

A journal is of one process: it tells what this process wrote and removed, and what it asked for and found
gone. What others write shows only in an enumeration. The ring is not in it, because a slot is evicted by
whichever process needs room, without a word: whoever wants to know asks `lookup`.

Nobody listening costs one look at an empty tuple. Threads may tell what they did in another order than they
did it, so each of them looks again after it has told: the last word about an object is true.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ucm_core.spec.keys import NAME_BYTES
from ucm_core.store.arrays import Mask, Names

MAX_EVENT_NAMES = 65_536
"""Objects that a listener keeps until they are taken, by default."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where objects are: all of one segment of one row."""

    namespace: str
    """Name of the namespace's directory."""
    row: str
    """Name of the row's directory (`ucm_core.store.names.slug` of the row's name)."""
    segment: str
    medium: str = "file"


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Objects of one place that came or went."""

    place: Place
    names: Names
    """``uint8[n, 16]``, the first 16 bytes of their keys, as in their files' names."""
    stored: bool
    """True: whole on the medium. False: not there any more."""


class Listener:
    """A bounded buffer of changes, from `Journal.listen` to `close`. Thread-safe.

    It also knows what it told and was not told to be gone, about 100 bytes for each object on the medium, so
    that somebody's looking for something that was never there is no event.
    """

    def __init__(self, journal: Journal, capacity: int) -> None:
        self._journal, self._capacity = journal, capacity
        self._lock = threading.Lock()
        self._believed: dict[Place, set[bytes]] = {}
        self._changes: list[Change] = []
        self._count = 0
        self._lost = True

    def take(self) -> list[Change] | None:
        """The changes since the last call, oldest first; None = some were lost: enumerate, then go on.

        The first call answers None. What is told during an enumeration comes with the next call: apply it
        over what was enumerated, and the result is right.
        """
        with self._lock:
            changes, lost = self._changes, self._lost
            if lost:
                self._believed = {}
            self._changes, self._count, self._lost = [], 0, False
            return None if lost else changes

    def enumerated(self, place: Place, names: Names) -> None:
        """Note what the listener learnt by an enumeration, so that it hears when that is gone."""
        with self._lock:
            self._believed.setdefault(place, set()).update(map(np.ndarray.tobytes, names))

    def believes(self, place: Place, names: Names) -> Mask:
        """Which of ``names`` are stored as far as the listener was told, ``bool[n]``."""
        with self._lock:
            believed = self._believed.get(place, set())
            return np.array([name.tobytes() in believed for name in names], dtype=np.bool_)

    def add(self, change: Change) -> None:
        """Keep a change; too many are dropped together, and said to be lost."""
        with self._lock:
            believed = self._believed.setdefault(change.place, set())
            update = believed.update if change.stored else believed.difference_update
            update(map(np.ndarray.tobytes, change.names))
            self._count += len(change.names)
            if self._count > self._capacity:
                self._drop()
            else:
                self._changes.append(change)

    def lose(self) -> None:
        """Everything may have changed."""
        with self._lock:
            self._drop()

    def close(self) -> None:
        """Hear nothing more."""
        self._journal.forget(self)

    def _drop(self) -> None:
        self._changes, self._count, self._lost = [], 0, True


class Journal:
    """Passes on what happens to the objects below a root. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()

    @property
    def listening(self) -> bool:
        """Whether anybody wants to know."""
        return bool(self._listeners)

    def listen(self, capacity: int = MAX_EVENT_NAMES) -> Listener:
        """A new listener, which keeps ``capacity`` names at most between two calls of `Listener.take`."""
        listener = Listener(self, capacity)
        with self._lock:
            self._listeners = (*self._listeners, listener)
        return listener

    def forget(self, listener: Listener) -> None:
        """Tell ``listener`` nothing more."""
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

    def tell(self, place: Place, names: Names, *, stored: bool, exist: Callable[[Names], Mask]) -> None:
        """Tell that the objects ``names`` (``uint8[n, 16 or more]``) came or went, until that is true.

        ``exist`` looks at the medium: what is not as it was told is told again, as it is.
        """
        names = np.ascontiguousarray(names[:, :NAME_BYTES])
        while self._listeners and len(names):
            for listener in self._listeners:
                listener.add(Change(place, names, stored))
            names, stored = names[exist(names) != stored], not stored

    def tell_absent(self, place: Place, names: Names, *, exist: Callable[[Names], Mask]) -> None:
        """Somebody asked for ``names`` and they are not there; told if a listener may believe otherwise."""
        names = names[:, :NAME_BYTES]
        believed = np.zeros(len(names), dtype=np.bool_)
        for listener in self._listeners:
            believed |= listener.believes(place, names)
        if believed.any():
            self.tell(place, names[believed], stored=False, exist=exist)

    def lose(self) -> None:
        """Everything may have changed: every listener has to enumerate."""
        for listener in self._listeners:
            listener.lose()
