"""A budget for a row's states: which are worth their bytes when there is not room for all.

For rows that could keep a state every few tokens. A state is worth ``sightings x 2^(-age / half_life)``, its
age being the time since it was last seen: what many prompts pass and what was just made stays, the dense
tail of a conversation that nobody continues thins out.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np

from ucm_core.coordinator.lookups import Clock
from ucm_core.errors import SpecError
from ucm_core.spec.keys import Keys

__all__ = ["DensityBudget", "DensityStatistics", "state_value"]

MAX_STATES = 1 << 20
"""The most states that one budget keeps account of, whatever its bytes would allow."""


def state_value(sightings: int, *, age_s: float, half_life_s: float) -> float:
    """Return ``sightings x 2^(-age / half_life)``.

    >>> state_value(6, age_s=7200.0, half_life_s=3600.0)
    1.5
    """
    return float(sightings * 2.0 ** (-age_s / half_life_s))


@dataclass(frozen=True, slots=True)
class DensityStatistics:
    """What a budget holds and did."""

    states: int
    """States within the budget."""
    capacity: int
    """The most that fit."""
    sights: int
    """Sights counted; only grows."""
    fallen: int
    """States that were in and fell out, or never got in; only grows."""


class DensityBudget:
    """The most valuable states of one row that fit its budget, by what this process saw.

    Not thread-safe; one per row and scheduler process. It starts empty: what lies in the store from before is
    the collector's until it is seen again.
    """

    def __init__(self, budget_bytes: int, state_bytes: int, *, half_life_s: float, clock: Clock) -> None:
        """Keep as many states of ``state_bytes`` as fit; SpecError when not even one does."""
        self._capacity = min(budget_bytes // state_bytes, MAX_STATES)
        if self._capacity < 1 or half_life_s <= 0:
            raise SpecError(
                f"a budget of {budget_bytes} bytes holds no state of {state_bytes} bytes, or half_life_s ="
                f" {half_life_s} is not above 0; raise it"
            )
        self._half_life_s = half_life_s
        self._clock = clock
        self._seen: dict[bytes, tuple[int, float, int]] = {}
        """Key -> (sightings, order of values, number of its last sight)."""
        # All values halve together, so their order never changes by itself: it is that of
        # log2(sightings) + last sight / half_life. Entries of older sights lie here until they come up.
        self._least_first: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count(1)
        self._sights = self._fallen = 0

    def sight(self, keys: Keys) -> Keys:
        """Count that the states under ``keys`` (``uint8[n, 32]``) were offered or served now.

        Returns the keys that have no place any more, ``uint8[m, 32]``, those of ``keys`` that got none
        included: do not keep the latter, drop the former. Of equal values the one seen first falls.
        """
        now = self._clock()
        for key in map(bytes, keys):
            sightings = self._seen[key][0] + 1 if key in self._seen else 1
            order = math.log2(sightings) + now / self._half_life_s
            number = next(self._numbers)
            self._seen[key] = (sightings, order, number)
            heapq.heappush(self._least_first, (order, number, key))
        self._sights += len(keys)
        fallen = [self._fall() for _ in range(len(self._seen) - self._capacity)]
        self._sweep()
        return np.frombuffer(b"".join(fallen), dtype=np.uint8).reshape(-1, 32)

    def forget(self, keys: Keys) -> None:
        """Take ``keys`` out: the store no longer holds them."""
        for key in map(bytes, keys):
            self._seen.pop(key, None)

    def statistics(self) -> DensityStatistics:
        """Return a moment of the counts."""
        return DensityStatistics(len(self._seen), self._capacity, self._sights, self._fallen)

    def check_integrity(self) -> None:
        """Raise SpecError when a bound does not hold or a state could never fall out."""
        queued = {(number, key) for _, number, key in self._least_first}
        lost = [key for key, (_, _, number) in self._seen.items() if (number, key) not in queued]
        if len(self._seen) > self._capacity or len(self._least_first) > self._most_queued or lost:
            raise SpecError(
                f"{len(self._seen)} states of at most {self._capacity}, {len(self._least_first)} queued of at"
                f" most {self._most_queued}, {len(lost)} not queued"
            )

    @property
    def _most_queued(self) -> int:
        return 2 * self._capacity + 64

    def _fall(self) -> bytes:
        """Remove the least valuable state and return its key."""
        while True:
            _, number, key = heapq.heappop(self._least_first)
            if key in self._seen and self._seen[key][2] == number:
                del self._seen[key]
                self._fallen += 1
                return key

    def _sweep(self) -> None:
        """Drop what older sights left in the queue, once it is more than what counts."""
        if len(self._least_first) > self._most_queued:
            self._least_first = [(order, number, key) for key, (_, order, number) in self._seen.items()]
            heapq.heapify(self._least_first)
