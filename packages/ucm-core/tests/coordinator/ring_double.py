"""A double of one row's store: a ring of few slots over a medium, without threads, memory or files.

It stands for what a `BlockStore` does to a coordinator: objects under keys, eviction of what nobody holds,
saves that take a while, media that lose and damage things, lookups that fail. Its bytes are checked as a real
store's are: what is damaged is a failed load, never a wrong byte.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ucm_core.errors import StoreError
from ucm_core.spec.keys import Keys


class PinsDouble:
    """Stands for `Pins`: references on slots, given back once."""

    def __init__(self, ring: RingDouble, keys: Keys) -> None:
        self.keys = keys
        self._ring = ring
        self._held = [key.tobytes() for key in keys]
        ring.references.update(self._held)

    def release(self) -> None:
        self._ring.references.subtract(self._held)
        self._ring.references += Counter()  # drops what is zero
        self._held = []


class RingDouble:
    """One row's store of at most ``slots`` objects in the ring and any number on the medium."""

    def __init__(self, slots: int = 8) -> None:
        self.slots = slots
        self.ring: dict[bytes, bytes] = {}  # the longest unused first
        self.medium: dict[bytes, bytes] = {}
        self.damaged: set[bytes] = set()
        self.loading: dict[bytes, bytes] = {}
        self.references: Counter[bytes] = Counter()
        self.broken = False

    def lookup(self, keys: Keys) -> np.ndarray:
        self._check()
        return np.array([key.tobytes() in self.ring or key.tobytes() in self.medium for key in keys], bool)

    def in_flight(self, keys: Keys) -> np.ndarray:
        self._check()
        return np.array([key.tobytes() in self.loading for key in keys], dtype=bool)

    def pin(self, keys: Keys) -> PinsDouble:
        self._check()
        return PinsDouble(self, keys[[key.tobytes() in self.ring for key in keys]])

    def begin_save(self, key: Keys, data: bytes) -> None:
        self.loading[key.tobytes()] = data

    def end_save(self, name: bytes, *, to_medium: bool) -> None:
        data = self.loading.pop(name)
        self._admit(name, data)
        if to_medium:
            self.medium[name] = data
            self.damaged.discard(name)

    def put(self, keys: Keys, data: bytes = b"") -> None:
        """Into the ring only."""
        for key in keys:
            self._admit(key.tobytes(), data)

    def load(self, key: Keys) -> bytes | None:
        """The object's bytes, or None: not there (any more), or damaged and dropped."""
        name = key.tobytes()
        if name in self.ring:
            self.ring[name] = data = self.ring.pop(name)
            return data
        if name in self.damaged:
            self.damaged.discard(name)
            self.medium.pop(name, None)
        if self.broken or name not in self.medium:
            return None
        self._admit(name, self.medium[name])
        return self.medium[name]

    def press(self, count: int) -> None:
        """``count`` foreign objects pass through the ring."""
        for number in range(count):
            self._admit(b"foreign %d" % number, b"")
        for name in [name for name in self.ring if name.startswith(b"foreign")]:
            del self.ring[name]

    def die(self) -> None:
        """The process that held references is gone."""
        self.references.clear()
        self.loading.clear()

    def _admit(self, name: bytes, data: bytes) -> None:
        """Into the ring, unless everything in it is referenced."""
        idle = [held for held in self.ring if not self.references[held]]
        if name not in self.ring and len(self.ring) >= self.slots:
            if not idle:
                return
            del self.ring[idle[0]]
        self.ring[name] = data

    def _check(self) -> None:
        if self.broken:
            raise StoreError("broken on purpose")
