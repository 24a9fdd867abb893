"""The store that keeps nothing: every lookup is a miss, every save is counted as not kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from ucm_core.flow.copy import BlockSource, BlockTarget
from ucm_core.flow.handles import ComputeEvent, UnitLoad, UnitSave
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.spec.keys import Keys
from ucm_core.store.arrays import Mask
from ucm_core.store.block import BlockStoreStatistics
from ucm_core.store.close_report import CloseReport
from ucm_core.store.donation import Donation
from ucm_core.store.geometry import Geometry
from ucm_core.store.ledger import NO_RESIDENTS, PinBook, Pins, Residents
from ucm_core.store.tiers import KeyBatch, count_failures
from ucm_core.store.unit_work import shard_range


class ObjectStore(Protocol):
    """What `ucm_core.store.block.BlockStore`, which has the terms, and `AbsentStore` have in common."""

    @property
    def geometry(self) -> Geometry:
        """Shards and bytes of every object."""

    @property
    def slots(self) -> int:
        """Objects that the ring has room for."""

    def lookup(self, keys: Keys) -> Mask:
        """Which of the keys are there."""

    def lookup_prefix(self, keys: Keys) -> int:
        """How many leading keys are there."""

    def load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> Ticket:
        """Bring objects to ``target``."""

    def prefetch(self, keys: Keys, *, parents: Keys | None = None) -> Ticket:
        """Bring objects into the ring."""

    def save(
        self,
        keys: Keys,
        source: BlockSource,
        *,
        gather_inline: bool = True,
        parents: Keys | None = None,
        absent: bool = False,
    ) -> Ticket:
        """Keep objects of ``source``."""

    def begin_load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> UnitLoad:
        """Bring objects to ``target``, shard by shard."""

    def begin_save(
        self, keys: Keys, source: BlockSource, *, parents: Keys | None = None, absent: bool = False
    ) -> UnitSave:
        """Keep objects of ``source``, shard by shard."""

    def reserve(self, key: Keys) -> Donation | None:
        """Memory for one object, to be written in place."""

    def pin(self, keys: Keys) -> Pins:
        """Keep objects in the ring."""

    def in_flight(self, keys: Keys) -> Mask:
        """Which of the keys are on their way into the ring."""

    def residents(self) -> Residents:
        """See `ucm_core.store.block.BlockStore.residents`."""

    def touch(self, keys: Keys) -> None:
        """Mark objects as used."""

    def drop(self, keys: Keys) -> None:
        """Remove objects."""

    def names(self) -> Iterator[Keys]:
        """Names of what lies on the medium, in slices."""

    def statistics(self) -> BlockStoreStatistics:
        """A moment of this store."""

    def check_integrity(self) -> None:
        """Raise when the books do not balance."""

    def revoke(self) -> None:
        """Let no load end well any more."""

    def close(self, timeout_s: float = 30.0) -> CloseReport:
        """Let go of everything, and say what was kept of what was under way."""


class AbsentStore:
    """Stands where nothing may be kept or found: the model is unknown, or the root cannot be used."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        """Shards and bytes of the objects that are not kept."""
        self.slots = 0
        """No room."""

    def lookup(self, keys: Keys) -> Mask:
        """All absent."""
        return np.zeros(len(keys), dtype=np.bool_)

    def lookup_prefix(self, keys: Keys) -> int:  # noqa: ARG002 - the interface has it
        """None."""
        return 0

    def load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> Ticket:  # noqa: ARG002 - as above
        """All ``MISS``."""
        return self._settled("load", keys, ResultCode.MISS)

    def prefetch(self, keys: Keys, *, parents: Keys | None = None) -> Ticket:  # noqa: ARG002 - as above
        """All ``MISS``."""
        return self._settled("prefetch", keys, ResultCode.MISS)

    def save(
        self,
        keys: Keys,
        source: BlockSource,  # noqa: ARG002 - as above
        *,
        gather_inline: bool = True,  # noqa: ARG002 - as above
        parents: Keys | None = None,  # noqa: ARG002 - as above
        absent: bool = False,  # noqa: ARG002 - as above
    ) -> Ticket:
        """All ``UNAVAILABLE``; nothing is gathered."""
        return self._settled("save", keys, ResultCode.UNAVAILABLE)

    def begin_load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> UnitLoad:  # noqa: ARG002
        """All ``MISS`` before a shard is submitted."""
        return SettledLoad(self.geometry, self._settled("load", keys, ResultCode.MISS))

    def begin_save(
        self,
        keys: Keys,
        source: BlockSource,  # noqa: ARG002 - as above
        *,
        parents: Keys | None = None,  # noqa: ARG002 - as above
        absent: bool = False,  # noqa: ARG002 - as above
    ) -> UnitSave:
        """All ``UNAVAILABLE`` before a shard is submitted."""
        return SettledSave(self.geometry, self._settled("save", keys, ResultCode.UNAVAILABLE))

    def reserve(self, key: Keys) -> Donation | None:  # noqa: ARG002 - as above
        """Nothing to write into."""
        return None

    def pin(self, keys: Keys) -> Pins:
        """Nothing is kept."""
        return Pins(keys[:0], PinBook(), lambda: None)

    def in_flight(self, keys: Keys) -> Mask:
        """None."""
        return np.zeros(len(keys), dtype=np.bool_)

    def residents(self) -> Residents:
        """None."""
        return NO_RESIDENTS

    def touch(self, keys: Keys) -> None:
        """Nothing to touch."""

    def drop(self, keys: Keys) -> None:
        """Nothing to drop."""

    def names(self) -> Iterator[Keys]:
        """None."""
        return iter(())

    def statistics(self) -> BlockStoreStatistics:
        """All zero."""
        return BlockStoreStatistics(working=0, pending_writes=0, pins=0, ring=None)

    def check_integrity(self) -> None:
        """Nothing can be wrong."""

    def revoke(self) -> None:
        """No load ever ends well."""

    def close(self, timeout_s: float = 30.0) -> CloseReport:  # noqa: ARG002 - as above
        """Nothing to let go of."""
        return CloseReport("absent")

    def _settled(self, operation: str, keys: Keys, code: ResultCode) -> Ticket:
        ticket = Ticket(KeyBatch(keys).count, self.geometry.shards, durable=True)
        ticket.settle_rest(code)
        count_failures(operation, ticket.object_results)
        return ticket


class SettledLoad:
    """A load by units of which nothing is left to do."""

    together, small = 1, False
    """Nothing is submitted."""

    def __init__(self, geometry: Geometry, ticket: Ticket) -> None:
        self._geometry = geometry
        self.ticket = ticket
        """All codes are known."""

    def submit(self, shards: slice, *, urgency: int = 0, here: bool = False) -> None:  # noqa: ARG002 - the interface
        """Nothing comes."""
        shard_range(shards, self._geometry)

    def cancel(self) -> None:
        """Nothing to cancel."""


class SettledSave:
    """A save by units of which nothing is left to do."""

    def __init__(self, geometry: Geometry, ticket: Ticket) -> None:
        self._geometry = geometry
        self.ticket = ticket
        """All codes are known."""

    def submit(self, shards: slice, *, ready: ComputeEvent | None = None) -> None:  # noqa: ARG002 - as above
        """Nothing is gathered."""
        shard_range(shards, self._geometry)

    def seal(self) -> None:
        """Nothing to publish."""

    def abandon(self) -> None:
        """Nothing to give up."""
