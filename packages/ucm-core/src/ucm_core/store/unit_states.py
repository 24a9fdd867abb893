"""What has become of each shard of each object of a load by units. Not thread-safe: its load has the lock.

::

    AWAY ------- read, or published by another reader ------> HERE
    AWAY, HERE - asked for, and taken by a thread ----------> MOVING
    AWAY, HERE - failed, cancelled -------------------------> OVER
    MOVING ----- copied, or could not be -------------------> OVER

A slot is let go of when all its shards are over and no thread reads a file into it, or waits on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ucm_core.store.arrays import Int64s, Mask, Slots, Versions
from ucm_core.store.ring import Claims, Outcome

AWAY, HERE, MOVING, OVER = (np.uint8(number) for number in range(4))
_NO_SLOT = np.int32(-1)
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Taken:
    """Shards ``[begin, end)`` of the objects ``ids``, for one thread to copy."""

    ids: Int64s
    begin: int
    end: int

    @property
    def shards(self) -> tuple[int, int]:
        """Both ends."""
        return self.begin, self.end

    def part(self, which: Mask) -> Taken:
        """Some of the objects."""
        return replace(self, ids=self.ids[which])


class UnitStates:
    """Shards and slots of one load; ids number its distinct keys."""

    def __init__(self, objects: int, shards: int) -> None:
        self.shard: npt.NDArray[np.uint8] = np.full((objects, shards), AWAY)
        """``uint8[objects, shards]``: where each shard is."""
        self.role: npt.NDArray[np.uint8] = np.full(objects, Outcome.ABSENT, dtype=np.uint8)
        """``uint8[objects]`` of `Outcome`: what we are to the slot, if there is one."""
        self.slots: Slots = np.full(objects, _NO_SLOT)
        """``int32[objects]``: the slot that we reference."""
        self.versions: Versions = np.zeros(objects, dtype=np.uint32)
        """``uint32[objects]``: of which stay."""
        self.failed: Mask = np.zeros(objects, dtype=np.bool_)
        """``bool[objects]``: whether any shard failed."""
        self._others = self._past = False  # whether any role is LOADING, or NO_SPACE
        self._left = np.full(objects, shards)  # shards that are not over
        self._busy = np.zeros(objects, dtype=np.int64)  # threads in its slot that copy nothing out of it

    def claim(self, claims: Claims) -> None:
        """Take over what a claim or pin gave."""
        self.role, self.slots, self.versions = claims.outcome.copy(), claims.slots.copy(), claims.version
        self.shard[self.role == Outcome.READY] = HERE
        self._others = bool((self.role == Outcome.LOADING).any())
        self._past = bool(self.without_slot.any())

    @property
    def over(self) -> bool:
        """Whether nothing is left to do or to let go of."""
        return not (self._left.any() or self._busy.any() or (self.slots != _NO_SLOT).any())

    def enter(self, ids: Int64s) -> Int64s:
        """Those of ``ids`` that are not over; their slots stay until `leave`."""
        wanted = ids[self._left[ids] > 0]
        self._busy[wanted] += 1
        return wanted

    def leave(self, ids: Int64s) -> None:
        """The end of `enter`."""
        self._busy[ids] -= 1

    def arrive(self, ids: Int64s, shards: tuple[int, int]) -> None:
        """These shards can be read."""
        window = self.shard[ids, slice(*shards)]
        self.shard[ids, slice(*shards)] = np.where(window == AWAY, HERE, window)

    def take(self, shards: tuple[int, int], limit: int, *, here: bool) -> Taken | None:
        """Up to ``limit`` objects and as many of the shards as all of them have: from now on MOVING.

        ``here``: what lies in slots; else what has none, and is to be read.
        """
        begin, end = shards
        window = self.shard[:, begin:end] == (HERE if here else AWAY)
        if not here:
            window &= self.without_slot[:, None]
        first = 0 if end - begin == 1 else int(window.any(axis=0).argmax())
        ids = np.flatnonzero(window[:, first])[:limit]
        if not ids.size:
            return None
        last = end - begin
        if last - first > 1 and (lacking := ~window[ids, first:].all(axis=0)).any():
            last = first + int(lacking.argmax())
        self.shard[ids, begin + first : begin + last] = MOVING
        return Taken(ids, begin + first, begin + last)

    def end(self, taken: Taken) -> Int64s:
        """They were copied, or could not be: the ids that are over now."""
        ids = taken.ids
        self.shard[ids, taken.begin : taken.end] = OVER
        self._left[ids] -= taken.end - taken.begin
        over = self._left[ids] == 0
        return ids[over] if np.count_nonzero(over) else _NONE

    def note_failed(self, ids: Int64s) -> Mask:
        """Shards of these could not be copied: for which of them it is the first failure."""
        first = ~self.failed[ids]
        self.failed[ids] = True
        return first

    def put_back(self, taken: Taken) -> None:
        """They were not copied: as before `take` without a slot."""
        self.shard[taken.ids, slice(*taken.shards)] = AWAY

    def give_up(self, ids: Int64s) -> Mask:
        """Everything of ``ids`` that no thread copies is over, ``bool[n, shards]``."""
        waiting = self.shard[ids] < MOVING
        self.shard[ids] = np.where(waiting, OVER, self.shard[ids])
        lost = np.count_nonzero(waiting, axis=1)
        self._left[ids] -= lost
        self.failed[ids] |= lost > 0
        return waiting

    def pass_ring(self, ids: Int64s) -> None:
        """Do without what others were to fill; what they did fill is copied from there."""
        self.role[ids] = Outcome.NO_SPACE
        self._past |= ids.size > 0

    def free(self) -> Int64s:
        """Those that are over, and whose slots are not needed any more; each once."""
        ids = np.flatnonzero((self._left == 0) & (self._busy == 0) & (self.slots >= 0))
        self.slots[ids] = _NO_SLOT
        return ids

    @property
    def without_slot(self) -> Mask:
        """``bool[objects]``."""
        lacking: Mask = self.role == Outcome.NO_SPACE
        return lacking

    def ready(self, shards: tuple[int, int]) -> tuple[int, bool]:
        """How many of the shards lie in slots, and whether any object without slot lacks one."""
        window = self.shard[:, shards[0] : shards[1]]
        here = int(np.count_nonzero(window == HERE))
        return here, self._past and bool(((window == AWAY).any(axis=1) & self.without_slot).any())

    def awaited(self, shards: tuple[int, int]) -> Int64s:
        """Objects that somebody else fills and that lack any of the shards."""
        if not self._others:
            return _NONE
        lacking = (self.shard[:, slice(*shards)] == AWAY).any(axis=1)
        return np.flatnonzero(lacking & (self.role == Outcome.LOADING))
