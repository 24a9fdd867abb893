"""Objects whose file is there and cannot be used: what a lookup or a save must not take for whole."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from ucm_core.spec.keys import NAME_BYTES, Keys
from ucm_core.store.arrays import Mask


class Doubts:
    """Names (the first 16 bytes of keys) in bounded number, the oldest forgotten first. Thread-safe."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether there are any; without the lock."""
        return bool(self._names)

    def add(self, keys: Keys) -> None:
        """Doubt ``keys``, ``uint8[n, 32]``."""
        with self._lock:
            for name in _names(keys):
                self._names[name] = None
                self._names.move_to_end(name)
            while len(self._names) > self._capacity:
                self._names.popitem(last=False)

    def clear(self, keys: Keys) -> None:
        """Doubt ``keys`` no longer."""
        if not self._names:
            return
        with self._lock:
            for name in _names(keys):
                self._names.pop(name, None)

    def among(self, keys: Keys) -> Mask:
        """Return which of ``keys`` are doubted, ``bool[n]``."""
        if not self._names:
            return np.zeros(len(keys), dtype=np.bool_)
        with self._lock:
            return np.fromiter((name in self._names for name in _names(keys)), np.bool_, len(keys))


def _names(keys: Keys) -> list[bytes]:
    packed = np.ascontiguousarray(keys[:, :NAME_BYTES]).tobytes()
    return [packed[begin : begin + NAME_BYTES] for begin in range(0, len(packed), NAME_BYTES)]
