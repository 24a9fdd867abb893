"""Where prefixes left a ring: blocks that found no room there, and the last before them that did."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from ucm_core.spec.keys import Keys

CAPACITY = 1 << 16
"""Blocks remembered; the oldest is forgotten first."""


class Anchors:
    """Remembers where prefixes left the ring, so that no later part of one takes the place of its head.

    Thread-safe, of one process. Forgetting costs nothing but room in the ring.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._anchor: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._anchor)

    def of(self, parents: Keys) -> Keys:
        """Return ``parents`` (``uint8[n, 32]``), those that found no room replaced by their anchor."""
        if not self._anchor:
            return parents
        with self._lock:
            names = [parent.tobytes() for parent in parents]
            return _rows([self._anchor.get(name, name) for name in names])

    def note(self, keys: Keys, parents: Keys, *, refused: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Remember which ``keys``, in the order of a prefix, were refused; ``parents`` as they were named."""
        if not self._anchor and not refused.any():
            return
        with self._lock:
            for key, parent, no_room in zip(keys, parents, refused.tolist(), strict=True):
                anchor = self._anchor.get(parent.tobytes(), parent.tobytes())
                if not no_room:
                    self._anchor.pop(key.tobytes(), None)
                elif any(anchor):
                    self._anchor[key.tobytes()] = anchor
            while len(self._anchor) > self._capacity:
                self._anchor.popitem(last=False)


def _rows(names: list[bytes]) -> Keys:
    return np.frombuffer(b"".join(names), dtype=np.uint8).reshape(-1, 32)
