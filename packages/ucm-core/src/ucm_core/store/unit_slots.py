"""Slots of a ring that one save fills, over many pieces of work."""

from __future__ import annotations

import numpy as np

from ucm_core.store.absent_tiers import NoRing
from ucm_core.store.arrays import Int64s, Mask, Slots, Versions
from ucm_core.store.payloads import SlotPayloads
from ucm_core.store.ring import Ring


class OwnedSlots:
    """Slots that are ours to fill, by id. For one thread at a time."""

    def __init__(self, ring: Ring | NoRing) -> None:
        self._ring = ring
        self.ids: Int64s = np.zeros(0, dtype=np.int64)
        """Which objects they are for."""
        self._slots: Slots = np.zeros(0, dtype=np.int32)
        self._versions: Versions = np.zeros(0, dtype=np.uint32)

    def take(self, ids: Int64s, slots: Slots, *, versions: Versions) -> None:
        """Take over what a claim gave."""
        self.ids, self._slots, self._versions = ids, slots, versions

    @property
    def addresses(self) -> Int64s:
        """Of their payloads."""
        return self._ring.addresses(self._slots)

    def publish(self) -> tuple[Int64s, SlotPayloads]:
        """All are full: let everybody read what is still ours, and hand it over."""
        done = self._ring.publish(self._slots, self._versions)
        ids, slots = self.ids[done], self._slots[done]
        self._keep(~done)
        return ids, SlotPayloads(self._ring, slots)

    def abort(self, which: Mask | None = None) -> Int64s:
        """Give some or all up unfilled; their ids."""
        which = np.ones(self.ids.size, dtype=np.bool_) if which is None else which
        ids, slots, versions = self.ids[which], self._slots[which], self._versions[which]
        self._keep(~which)
        if ids.size:
            give_up(self._ring, slots, versions=versions)
        return ids

    def _keep(self, which: Mask) -> None:
        self.take(self.ids[which], self._slots[which], versions=self._versions[which])


def give_up(ring: Ring | NoRing, slots: Slots, *, versions: Versions) -> None:
    """Give slots up with their references, unfilled where they are still ours to fill."""
    aborted = ring.abort(slots, versions)
    if not aborted.all():
        ring.release(slots[~aborted])
