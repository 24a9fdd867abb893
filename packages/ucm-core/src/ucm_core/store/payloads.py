"""Payloads in memory, of ring slots or beside the ring: whoever has them lets go of them, once."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import numpy as np

from ucm_core.store.absent_tiers import NoRing
from ucm_core.store.arrays import Int64s, Slots
from ucm_core.store.hold import Hold, NoHold
from ucm_core.store.ring import Ring


class Payloads(Protocol):
    """Some full payloads, to be released once each."""

    in_ring: ClassVar[bool]
    """Whether they are slots of a ring."""

    @property
    def addresses(self) -> Int64s:
        """``int64[n]``, 4096-aligned, valid until `release`."""

    def part(self, places: Int64s) -> Self:
        """Those at ``places``, to be released instead of them."""

    def publish(self) -> bool:
        """They are full: let everybody read them; False where nobody else can. May raise ClosedError."""

    def abort(self) -> None:
        """Instead of `publish` and `release`: they were not filled."""

    def release(self) -> None:
        """Let go of the memory: it may be another payload's at once."""


@dataclass(frozen=True, slots=True)
class SlotPayloads:
    """Slots of a ring, each with one reference, which `hold` has where it is given."""

    in_ring: ClassVar[bool] = True
    ring: Ring | NoRing
    slots: Slots
    hold: Hold | NoHold | None = None

    @property
    def addresses(self) -> Int64s:
        """Of the slots."""
        return self.ring.addresses(self.slots)

    def part(self, places: Int64s) -> Self:
        """Some of the slots."""
        hold = None if self.hold is None else self.hold.part(places)
        return replace(self, slots=self.slots[places], hold=hold)

    def publish(self) -> bool:
        """To every process of the node."""
        if self.hold is not None:
            self.hold.publish(np.arange(self.slots.size))
        else:
            self.ring.publish(self.slots)
        return True

    def abort(self) -> None:
        """Give owned slots up."""
        if self.hold is not None:
            self.hold.let_go()
        else:
            self.ring.abort(self.slots)

    def release(self) -> None:
        """Give the references back."""
        if self.hold is not None:
            self.hold.let_go()
        else:
            self.ring.release(self.slots)


class PrivateMemory:
    """Page-aligned memory for ``count`` payloads outside the ring."""

    def __init__(self, count: int, payload_bytes: int) -> None:
        self._memory = mmap.mmap(-1, count * payload_bytes)
        base = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self.addresses: Int64s = base + payload_bytes * np.arange(count, dtype=np.int64)
        """``int64[count]``, valid while this object lives."""


@dataclass(frozen=True, slots=True)
class PrivatePayloads:
    """Places in private memory."""

    in_ring: ClassVar[bool] = False
    memory: PrivateMemory
    places: Int64s
    give_back: Callable[[int], None]
    """Told how many were released."""

    @property
    def addresses(self) -> Int64s:
        """Of the places."""
        return self.memory.addresses[self.places]

    def part(self, places: Int64s) -> Self:
        """Some of the places."""
        return replace(self, places=self.places[places])

    def publish(self) -> bool:
        """Nobody else can read here."""
        return False

    def abort(self) -> None:
        """As `release`."""
        self.release()

    def release(self) -> None:
        """Give the room back; the memory goes with the last of its places."""
        if self.places.size:
            self.give_back(self.places.size)
