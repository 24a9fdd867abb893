"""A store's batched lookup, made fit for verdicts: it never raises, and what failed to load is absent.

A failed load changes the next verdict: its keys are *suspects*, absent in every answer until they are saved
again or until a time limit has passed (the medium may have healed by itself). An answer that was on its way
when a key became suspect is filtered too, because suspects are applied after the store has spoken. Nothing
absent is ever remembered, so a late "absent" cannot hide a later save; and a load that fails late says
nothing about what was saved since it was promised.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator.presence import Mask
from ucm_core.errors import SpecError, UcmError
from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger
from ucm_core.spec.keys import NAME_BYTES, Keys

__all__ = ["STORE_FAILURES", "Clock", "Lookup", "LookupStatistics", "RowLookup", "Suspects", "names_of"]

Lookup = Callable[[Keys], npt.ArrayLike]
"""What a store offers: one truth value per key, ``[n]``, for one whole batch."""
Clock = Callable[[], float]
"""Seconds that never go back."""

STORE_FAILURES = (UcmError, OSError, RuntimeError, ValueError)
"""What a store may raise; anything else is a defect of ours."""

_log = quiet_logger(__name__)


def names_of(keys: Keys) -> list[bytes]:
    """Return the objects' names, the first 16 bytes of each key; names themselves (``uint8[n, 16]``) pass."""
    packed = np.ascontiguousarray(keys[:, :NAME_BYTES]).tobytes()
    return [packed[begin : begin + NAME_BYTES] for begin in range(0, len(packed), NAME_BYTES)]


class Suspects:
    """Keys whose load failed, for a limited time and in bounded number. Thread-safe."""

    def __init__(self, *, limit_s: float, capacity: int, clock: Clock) -> None:
        """Distrust a key for ``limit_s`` seconds of ``clock``; at most ``capacity`` keys, oldest dropped."""
        if limit_s <= 0 or capacity < 1:
            raise SpecError(f"limit_s {limit_s} must be above 0 and capacity {capacity} at least 1")
        self._limit_s = limit_s
        self._capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        # Name -> time of expiry. A renewed suspect moves to the end, so expiries ascend.
        self._until: OrderedDict[bytes, float] = OrderedDict()
        # Name -> moment of its last save, the oldest first: the generation of what is known of a key.
        self._saved: OrderedDict[bytes, int] = OrderedDict()

    def add(self, keys: Keys, *, moment: float = math.inf) -> None:
        """Distrust ``keys`` from now on, but for those that were saved after ``moment``."""
        with self._lock:
            until = self._clock() + self._limit_s
            for name in names_of(keys):
                if self._saved.get(name, 0) > moment:
                    continue
                self._until[name] = until
                self._until.move_to_end(name)
            while len(self._until) > self._capacity:
                self._until.popitem(last=False)

    def clear(self, keys: Keys, *, moment: int) -> None:
        """Trust ``keys`` again: they were saved anew, at ``moment``."""
        with self._lock:
            for name in names_of(keys):
                self._until.pop(name, None)
                self._saved[name] = moment
                self._saved.move_to_end(name)
            while len(self._saved) > self._capacity:
                self._saved.popitem(last=False)

    def among(self, keys: Keys) -> Mask:
        """Return which of ``keys`` are suspects now, ``bool[n]``."""
        with self._lock:
            self._expire()
            if not self._until:
                return np.zeros(len(keys), dtype=np.bool_)
            return np.fromiter((name in self._until for name in names_of(keys)), np.bool_, len(keys))

    def __bool__(self) -> bool:
        """Whether there may be suspects: without the lock, and also for one that has expired."""
        return bool(self._until)

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._until)

    def check_integrity(self) -> None:
        """Raise SpecError when the bound or the order of expiries does not hold."""
        with self._lock:
            expiries, saves = list(self._until.values()), len(self._saved)
        if max(len(expiries), saves) > self._capacity or expiries != sorted(expiries):
            raise SpecError(
                f"{len(expiries)} suspects out of order or above the capacity of {self._capacity}"
            )

    def _expire(self) -> None:
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)


@dataclass(frozen=True, slots=True)
class LookupStatistics:
    """What was asked of one store; every number only grows."""

    calls: int = 0
    """Batches asked."""
    keys: int = 0
    """Keys in them."""
    failures: int = 0
    """Batches that raised or answered with another length: all their keys counted as absent."""


class RowLookup:
    """The lookup of one row: batched, absent where it fails, absent where a key is suspect. Thread-safe."""

    def __init__(self, row_name: str, lookup: Lookup, suspects: Suspects) -> None:
        """Ask ``lookup`` about keys of the row ``row_name``."""
        self._row_name = row_name
        self._lookup = lookup
        self._suspects = suspects
        self._lock = threading.Lock()
        self._calls = self._keys = self._failures = 0

    def __call__(self, keys: Keys) -> Mask:
        """Return which of ``keys`` the store holds and nobody distrusts, ``bool[n]``; never raises."""
        if not len(keys):
            return np.zeros(0, dtype=np.bool_)
        present = self._ask(keys)
        self._count(keys, failed=present is None)
        if present is None:
            return np.zeros(len(keys), dtype=np.bool_)
        # After the store has answered, so that a failure reported in the meantime is not overlooked.
        return present & ~self._suspects.among(keys) if self._suspects else present

    def statistics(self) -> LookupStatistics:
        """Return a moment of the counts."""
        with self._lock:
            return LookupStatistics(self._calls, self._keys, self._failures)

    def _ask(self, keys: Keys) -> Mask | None:
        try:
            present = np.asarray(self._lookup(keys), dtype=np.bool_)
            if present.shape != (len(keys),):
                raise ValueError(f"answers {list(present.shape)} to {len(keys)} keys")
        except STORE_FAILURES as error:
            _log.warning("lookup of row %s failed: %s; its objects count as absent", self._row_name, error)
            metrics.ERRORS.labels(where="lookup").inc()
            return None
        return present

    def _count(self, keys: Keys, *, failed: bool) -> None:
        with self._lock:
            self._calls += 1
            self._keys += len(keys)
            self._failures += failed
