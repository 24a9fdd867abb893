"""The directory of checkpoints: a cache of which states the store holds, never the truth about it.

A key it does not know is asked of the store, in one batch, so it works across processes, engines and restarts
without any protocol. Only presence is remembered. Nothing is announced on eviction: what it says may be
stale, so the coordinator confirms the state that it is about to promise, and a failed load makes it forget.
An answer that was on its way when something newer was told changes nothing here, whichever it says.

It holds object names (16 bytes): a digest commits to its position and a key to its row, so neither is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ucm_core.coordinator.lookups import names_of
from ucm_core.coordinator.presence import Mask
from ucm_core.errors import SpecError
from ucm_core.spec.keys import Keys

__all__ = ["CheckpointStatistics", "Checkpoints"]


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """What the directory of one row holds and did."""

    states: int
    """States known to exist."""
    capacity: int
    """The most that are remembered; the least recently used is forgotten first."""
    answered: int
    """Keys answered from memory."""
    asked: int
    """Keys asked of the store."""


class Checkpoints:
    """The directory of one snapshot row. Thread-safe; the store is asked without holding the lock."""

    def __init__(self, lookup: Callable[[Keys], Mask], *, capacity: int) -> None:
        """Remember what ``lookup`` (which never raises) says, at most ``capacity`` keys."""
        if capacity < 1:
            raise SpecError(f"capacity is {capacity}, must be at least 1")
        self._lookup = lookup
        self._capacity = capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        # An answer "present" is remembered only if nothing was removed while it was on its way, and one
        # "absent" removes only if nothing was registered.
        self._removals = self._registrations = 0
        self._answered = 0
        self._asked = 0

    def held(self, keys: Keys) -> Mask:
        """Return which states exist, ``bool[n]``: from memory, the rest asked of the store in one batch."""
        known = self._recall(keys)
        unknown = np.flatnonzero(~known)
        known[unknown] = self._ask(keys[unknown], forget_absent=False)
        return known

    def confirm(self, keys: Keys) -> Mask:
        """Return which states the store holds now, ``bool[n]``; corrects the memory both ways."""
        return self._ask(keys, forget_absent=True)

    def register(self, keys: Keys) -> None:
        """Note that the states under ``keys`` were stored."""
        with self._lock:
            self._registrations += 1
            self._remember(names_of(keys))

    def remove(self, keys: Keys) -> None:
        """Forget ``keys``: their load failed or the store no longer holds them."""
        if not len(keys):
            return
        with self._lock:
            self._forget(names_of(keys))

    def rebuild(self, slices: Iterable[Keys]) -> int:
        """Replace the memory by an enumeration of the store; return how many states are known now.

        ``slices`` are ``uint8[n, 16 or 32]`` each. It ends early when the memory is full, and when a state is
        removed meanwhile: what was listed before that is old. What is not known is asked as before.
        """
        with self._lock:
            self._known.clear()
            removals = self._removals
        for names in slices:
            with self._lock:
                room = self._capacity - len(self._known)
                if not room or removals != self._removals:
                    break
                self._remember(names_of(names[:room]))
        return self.statistics().states

    def statistics(self) -> CheckpointStatistics:
        """Return a moment of the counts."""
        with self._lock:
            return CheckpointStatistics(len(self._known), self._capacity, self._answered, self._asked)

    def check_integrity(self) -> None:
        """Raise SpecError when the bound does not hold."""
        states = self.statistics().states
        if states > self._capacity:
            raise SpecError(f"the directory holds {states} states, above its capacity of {self._capacity}")

    def _recall(self, keys: Keys) -> Mask:
        names = names_of(keys)
        with self._lock:
            known = np.fromiter((name in self._known for name in names), np.bool_, len(names))
            for index in np.flatnonzero(known):
                self._known.move_to_end(names[index])
            self._answered += int(known.sum())
        return known

    def _ask(self, keys: Keys, *, forget_absent: bool) -> Mask:
        if not len(keys):
            return np.zeros(0, dtype=np.bool_)
        with self._lock:
            removals, registrations = self._removals, self._registrations
            self._asked += len(keys)
        held = self._lookup(keys)
        with self._lock:
            if removals == self._removals:
                self._remember(names_of(keys[held]))
            if forget_absent and registrations == self._registrations:
                self._forget(names_of(keys[~held]))
        return held

    def _forget(self, names: list[bytes]) -> None:
        self._removals += bool(names)
        for name in names:
            self._known.pop(name, None)

    def _remember(self, names: list[bytes]) -> None:
        for name in names:
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
