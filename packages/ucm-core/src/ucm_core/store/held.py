"""The slots of one claim while somebody works on them: whatever happens, none is lost, none half-filled."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ucm_core.store.absent_tiers import NoRing
from ucm_core.store.arrays import Int64s, Mask, Slots
from ucm_core.store.ring import Claims, Outcome, Ring


class HeldSlots:
    """Claims as a context: at its end, slots that are not full are aborted, all others released, once each.

    Places are indices into the claim. ``full``: what we own is full and published already (`Ring.gather`).
    """

    def __init__(self, ring: Ring | NoRing, claims: Claims, *, full: bool = False) -> None:
        self._ring, self._claims = ring, claims
        self._held: Mask = claims.slots >= 0
        self._filling: Mask = (claims.outcome == Outcome.OWNER) & (not full)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.abort(self._filling.nonzero()[0])
        finally:
            self._ring.release(self.hand_over(self._held.nonzero()[0]))

    def places(self, outcome: Outcome) -> Int64s:
        """The places with this outcome."""
        found: Int64s = (self._claims.outcome == np.uint8(outcome)).nonzero()[0]
        return found

    @property
    def owned(self) -> bool:
        """Whether every slot is ours to fill, or was."""
        return not np.count_nonzero(self._claims.outcome)  # of Outcome.OWNER

    def addresses(self, places: Int64s) -> Int64s:
        """Payload addresses, valid while the slots are held."""
        return self._ring.addresses(self._claims.slots[places])

    def publish(self, places: Int64s) -> None:
        """Make full slots readable for everybody."""
        self._ring.publish(self._claims.slots[places])
        self._filling[places] = False

    def abort(self, places: Int64s) -> None:
        """Give slots up unfilled, with their references; whoever waits for them is told."""
        if not places.size:
            return
        self._filling[places] = self._held[places] = False
        self._ring.abort(self._claims.slots[places])

    def wait(self, places: Int64s, timeout_s: float) -> npt.NDArray[np.uint8]:
        """Outcomes of waiting for whoever fills these slots."""
        return self._ring.wait(self._claims.slots[places], self._claims.version[places], timeout_s=timeout_s)

    def hand_over(self, places: Int64s) -> Slots:
        """Slots whose reference is the caller's from now on."""
        self._held[places] = False
        return self._claims.slots[places]
