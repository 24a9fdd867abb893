"""The slots of one claim while somebody works on them: whatever happens, none is lost, none half-filled."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ucm_core.flow.copy import Strides
from ucm_core.spec.keys import Keys
from ucm_core.store.absent_tiers import NoRing, without_slots
from ucm_core.store.arrays import Int64s
from ucm_core.store.payloads import SlotPayloads
from ucm_core.store.ring import Outcome, Ring


class HeldSlots:
    """One claim as a context: at its end what is not full is aborted, all else released, once each.

    Places are indices into the claim.
    """

    def __init__(self, ring: Ring | NoRing) -> None:
        self._ring, self._hold = ring, ring.hold()
        self._claims = without_slots(0, Outcome.ABSENT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hold.let_go()

    def claim(self, keys: Keys, parents: Keys | None = None, *, demand: bool = False) -> None:
        """`Ring.claim`."""
        self._claims = self._ring.claim(keys, parents, demand=demand, hold=self._hold)

    def pin(self, keys: Keys) -> None:
        """`Ring.pin`."""
        self._claims = self._ring.pin(keys, hold=self._hold)

    def gather(
        self, keys: Keys, strides: Strides, *, parents: Keys | None = None, units: tuple[int, int]
    ) -> None:
        """`Ring.gather`."""
        self._claims = self._ring.gather(keys, strides, parents=parents, units=units, hold=self._hold)

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
        self._hold.publish(places)

    def abort(self, places: Int64s) -> None:
        """Give slots up unfilled, with their references; whoever waits for them is told."""
        if places.size:
            self._hold.abort(places)

    def wait(self, places: Int64s, timeout_s: float) -> npt.NDArray[np.uint8]:
        """Outcomes of waiting for whoever fills these slots."""
        return self._ring.wait(self._claims.slots[places], self._claims.version[places], timeout_s=timeout_s)

    def hand_over(self, places: Int64s) -> SlotPayloads:
        """Payloads that hold these slots from now on."""
        return SlotPayloads(self._ring, self._claims.slots[places], self._hold.part(places))
