"""Tiers that are not there, with the verbs of those that are: a ring without slots, files that take nothing.

A store without a ring moves everything through private memory, one without files keeps only what its ring
holds; neither needs to know. They say what a tier says that is full, or that knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ucm_core.flow.copy import Strides
from ucm_core.flow.ticket import Codes, ResultCode
from ucm_core.spec.keys import Keys
from ucm_core.store.arrays import Int64s, Mask, Slots, Versions
from ucm_core.store.geometry import Geometry
from ucm_core.store.hold import NoHold
from ucm_core.store.ring import Claims, Outcome, Touch


class NoRing:
    """`ucm_core.store.ring.Ring` without a slot: a claim finds no room, everything else finds nothing."""

    slots = 0
    """No room."""

    def lookup(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """None is there."""
        return np.zeros(len(keys), dtype=np.uint8)

    def hold(self) -> NoHold:
        """For references of which there are none."""
        return NoHold()

    def claim(
        self,
        keys: Keys,
        parents: Keys | None = None,  # noqa: ARG002
        *,
        demand: bool = False,  # noqa: ARG002
        hold: object = None,  # noqa: ARG002
    ) -> Claims:
        """All ``NO_SPACE``."""
        return without_slots(len(keys), Outcome.NO_SPACE)

    def note_refused(self, keys: Keys, parents: Keys | None) -> None:
        """Nothing to keep the place of."""

    def pin(self, keys: Keys, *, hold: object = None) -> Claims:  # noqa: ARG002
        """All ``ABSENT``."""
        return without_slots(len(keys), Outcome.ABSENT)

    def scatter(self, keys: Keys, strides: Strides) -> bool:  # noqa: ARG002
        """There is nothing to copy."""
        return not len(keys)

    def gather(
        self,
        keys: Keys,
        strides: Strides,  # noqa: ARG002
        *,
        parents: Keys | None = None,  # noqa: ARG002
        units: tuple[int, int],  # noqa: ARG002
        hold: object = None,  # noqa: ARG002
    ) -> Claims:
        """As `claim`."""
        return without_slots(len(keys), Outcome.NO_SPACE)

    def wait(
        self,
        slots: Slots,
        versions: Versions,  # noqa: ARG002
        *,
        timeout_s: float,  # noqa: ARG002
        shard: int | None = None,  # noqa: ARG002
    ) -> npt.NDArray[np.uint8]:
        """Nobody fills anything."""
        return np.zeros(len(slots), dtype=np.uint8)

    def publish(self, slots: Slots, versions: Versions | None = None) -> Mask:  # noqa: ARG002
        """Nothing can be owned."""
        return np.zeros(len(slots), dtype=np.bool_)

    def publish_shards(self, slots: Slots, versions: Versions, *, begin: int, end: int) -> Mask:  # noqa: ARG002
        """Nothing can be owned."""
        return np.zeros(len(slots), dtype=np.bool_)

    def abort(self, slots: Slots, versions: Versions | None = None) -> Mask:  # noqa: ARG002
        """Nothing can be owned."""
        return np.zeros(len(slots), dtype=np.bool_)

    def release(self, slots: Slots) -> None:
        """Nothing can be referenced."""

    def touch(self, keys: Keys, *, interval_s: int = 60) -> npt.NDArray[np.uint8]:  # noqa: ARG002
        """All ``ABSENT``."""
        return np.full(len(keys), Touch.ABSENT, dtype=np.uint8)

    def drop(self, keys: Keys) -> Mask:
        """None was there."""
        return np.zeros(len(keys), dtype=np.bool_)

    def residents(self) -> tuple[Keys, Mask]:
        """None."""
        return np.zeros((0, 32), dtype=np.uint8), np.zeros(0, dtype=np.bool_)

    def addresses(self, slots: Slots) -> Int64s:
        """Of none."""
        return np.zeros(len(slots), dtype=np.int64)

    def statistics(self) -> None:
        """There is no ring to count in."""

    def check_integrity(self) -> None:
        """Nothing can be wrong."""

    def close(self) -> None:
        """Nothing to let go of."""


class NoFiles:
    """`ucm_core.store.files.FileTier` under a capacity bound of nothing: every write is refused."""

    keeps = False
    """Nothing is ever on a medium."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        """The shape of every object."""

    def exist(self, keys: Keys) -> Mask:
        """None does."""
        return np.zeros(len(keys), dtype=np.bool_)

    def stored(self, keys: Keys) -> Mask:
        """None is."""
        return np.zeros(len(keys), dtype=np.bool_)

    def read(
        self,
        keys: Keys,
        payload_addresses: Int64s,  # noqa: ARG002
        *,
        shards: tuple[int, int] | None = None,
    ) -> Codes:
        """All ``MISS``."""
        begin, end = shards or (0, self.geometry.shards)
        return np.full((len(keys), end - begin), ResultCode.MISS, dtype=np.uint8)

    def write(self, keys: Keys, payload_addresses: Int64s, *, sync: bool = False) -> Codes:  # noqa: ARG002
        """All ``NO_SPACE``."""
        return np.full(len(keys), ResultCode.NO_SPACE, dtype=np.uint8)

    def touch(self, keys: Keys) -> None:
        """Nothing to touch."""

    def drop(self, keys: Keys) -> Mask:
        """None was there."""
        return np.zeros(len(keys), dtype=np.bool_)

    def names(self) -> Iterator[Keys]:
        """None."""
        return iter(())


def without_slots(count: int, outcome: Outcome) -> Claims:
    """A claim that took nothing."""
    return Claims(
        slots=np.full(count, -1, dtype=np.int32),
        outcome=np.full(count, outcome, dtype=np.uint8),
        version=np.zeros(count, dtype=np.uint32),
    )
