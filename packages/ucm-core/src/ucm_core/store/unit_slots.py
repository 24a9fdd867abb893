"""Slots of a ring that one save fills, over many pieces of work."""

from __future__ import annotations

import numpy as np

from ucm_core.spec.keys import Keys
from ucm_core.store.absent_tiers import NoRing, without_slots
from ucm_core.store.arrays import Int64s, Mask
from ucm_core.store.payloads import SlotPayloads
from ucm_core.store.ring import Outcome, Ring

_NONE = np.zeros(0, dtype=np.int64)


class OwnedSlots:
    """Slots that are ours to fill, by id, of one claim; held from the claim on. For one thread at a time."""

    def __init__(self, ring: Ring | NoRing) -> None:
        self._ring, self._hold = ring, ring.hold()
        self._claims = without_slots(0, Outcome.ABSENT)
        self._claimed = self._places = _NONE  # ids of the claim; which of its places are ours to fill

    def claim(self, keys: Keys, parents: Keys | None, *, ids: Int64s) -> Int64s:
        """Claim the keys of ``ids`` without waiting. The ids that are neither ours nor full: for later."""
        self._claims = self._ring.claim(keys, parents, hold=self._hold)
        self._claimed, outcome = ids, self._claims.outcome
        self._places = np.flatnonzero(outcome == Outcome.OWNER)
        self._hold.abort(np.flatnonzero(outcome == Outcome.LOADING))  # looked for again when all is gathered
        late: Int64s = ids[(outcome != Outcome.OWNER) & (outcome != Outcome.READY)]
        return late

    def take_full(self) -> tuple[Int64s, SlotPayloads]:
        """What the claim found full."""
        return self._hand_over(np.flatnonzero(self._claims.outcome == Outcome.READY))

    @property
    def ids(self) -> Int64s:
        """Which objects they are for."""
        return self._claimed[self._places]

    @property
    def addresses(self) -> Int64s:
        """Of their payloads."""
        return self._ring.addresses(self._claims.slots[self._places])

    def publish(self) -> tuple[Int64s, SlotPayloads]:
        """All are full: let everybody read what is still ours, and hand it over."""
        claims, places = self._claims, self._places
        done = self._ring.publish(claims.slots[places], claims.version[places])
        self._places = places[~done]
        return self._hand_over(places[done])

    def abort(self, which: Mask | None = None) -> Int64s:
        """Give some up unfilled, or all that is held; the ids of those that were ours to fill."""
        gone = self._places if which is None else self._places[which]
        ids: Int64s = self._claimed[gone]
        if which is None:
            self._places = _NONE
            self._hold.let_go()
        else:
            self._places = self._places[~which]
            self._hold.abort(gone)
        return ids

    def _hand_over(self, places: Int64s) -> tuple[Int64s, SlotPayloads]:
        slots = self._claims.slots[places]
        return self._claimed[places], SlotPayloads(self._ring, slots, self._hold.part(places))
