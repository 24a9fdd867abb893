"""Families: all segments of a row, as the scheduler of several ranks sees them.

An object is there when every segment of it is: no segment can stand for another, whoever holds it. Replicas
of one segment need no question of their own, because they write the same file and use the same ring.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NoReturn

import numpy as np

from ucm_core.errors import StoreError
from ucm_core.flow.copy import BlockSource, BlockTarget
from ucm_core.flow.handles import UnitLoad, UnitSave
from ucm_core.flow.ticket import Ticket
from ucm_core.spec.keys import Keys
from ucm_core.store.absent import ObjectStore
from ucm_core.store.arrays import Mask
from ucm_core.store.block import BlockStoreStatistics
from ucm_core.store.close_report import CloseReport
from ucm_core.store.donation import Donation
from ucm_core.store.geometry import Geometry
from ucm_core.store.ledger import PinBook, Pins, Residents

__all__ = ["FamilyStore", "family"]


def family(stores: Sequence[ObjectStore]) -> ObjectStore:
    """One store for the segments ``stores`` of a row; itself where there is only one."""
    return stores[0] if len(stores) == 1 else FamilyStore(stores)


class FamilyStore:
    """Answers for all segments of a row; it moves no bytes, a rank loads and saves its own segment."""

    def __init__(self, segments: Sequence[ObjectStore]) -> None:
        """``segments``: at least one store; they are closed with this one."""
        self._segments = tuple(segments)
        self._pinned = PinBook()

    @property
    def geometry(self) -> Geometry:
        """That of the first segment: pipeline stages may have more or fewer shards than it."""
        return self._segments[0].geometry

    @property
    def slots(self) -> int:
        """Objects that every ring has room for."""
        return min(store.slots for store in self._segments)

    def lookup(self, keys: Keys) -> Mask:
        """Which of the keys have every segment."""
        there = np.ones(len(keys), dtype=np.bool_)
        for store in self._segments:
            there[there] = store.lookup(keys[there])
        return there

    def lookup_prefix(self, keys: Keys) -> int:
        """How many leading keys have every segment."""
        count = len(keys)
        for store in self._segments:
            count = store.lookup_prefix(keys[:count])
        return count

    def in_flight(self, keys: Keys) -> Mask:
        """Which of the keys are not there but will be: what a segment lacks is on its way into its ring."""
        soon = np.ones(len(keys), dtype=np.bool_)
        there = soon.copy()
        for store in self._segments:
            now = store.lookup(keys)
            there &= now
            soon &= now | store.in_flight(keys)
        return soon & ~there

    def prefetch(self, keys: Keys, *, parents: Keys | None = None) -> Ticket:
        """Bring every segment into its ring; the ticket has a shard per segment."""
        return _Reads(len(keys), [store.prefetch(keys, parents=parents) for store in self._segments])

    def pin(self, keys: Keys) -> Pins:
        """Keep what the rings hold of the keys; counted is what all of them hold."""
        pins: list[Pins] = []
        for store in self._segments:
            pins.append(store.pin(keys))
            keys = pins[-1].keys

        def let_go() -> None:
            for each in pins:
                each.release()

        return Pins(keys, self._pinned, let_go)

    def load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> Ticket:
        """Refused: a rank loads its own segment."""
        del keys, target, parents
        self._refuse()

    def save(
        self,
        keys: Keys,
        source: BlockSource,
        *,
        gather_inline: bool = True,
        parents: Keys | None = None,
        absent: bool = False,
    ) -> Ticket:
        """Refused: a rank saves its own segment."""
        del keys, source, gather_inline, parents, absent
        self._refuse()

    def begin_load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> UnitLoad:
        """Refused, as `load` is."""
        del keys, target, parents
        self._refuse()

    def begin_save(
        self, keys: Keys, source: BlockSource, *, parents: Keys | None = None, absent: bool = False
    ) -> UnitSave:
        """Refused, as `save` is."""
        del keys, source, parents, absent
        self._refuse()

    def reserve(self, key: Keys) -> Donation | None:
        """Refused, as `save` is."""
        del key
        self._refuse()

    def residents(self) -> Residents:
        """Those of all rings."""
        return Residents.together(store.residents() for store in self._segments)

    def touch(self, keys: Keys) -> None:
        """Mark every segment as used."""
        for store in self._segments:
            store.touch(keys)

    def drop(self, keys: Keys) -> None:
        """Remove every segment."""
        for store in self._segments:
            store.drop(keys)

    def names(self) -> Iterator[Keys]:
        """Names of what has the first segment: a superset, to be confirmed by `lookup`."""
        return self._segments[0].names()

    def statistics(self) -> BlockStoreStatistics:
        """The work of all segments, and the first one's ring."""
        each = [store.statistics() for store in self._segments]
        return BlockStoreStatistics(
            working=sum(one.working for one in each),
            pending_writes=sum(one.pending_writes for one in each),
            pins=sum(one.pins for one in each),
            ring=each[0].ring,
        )

    def check_integrity(self) -> None:
        """Raise when the books of a segment do not balance."""
        for store in self._segments:
            store.check_integrity()

    def revoke(self) -> None:
        """Let no load end well any more."""
        for store in self._segments:
            store.revoke()

    def close(self, timeout_s: float = 30.0) -> CloseReport:
        """Close all segments, within ``timeout_s`` together; what they kept, in objects of one segment."""
        deadline = time.monotonic() + timeout_s
        each = [store.close(max(0.0, deadline - time.monotonic())) for store in self._segments]
        kept, lost, unfinished = (
            sum(getattr(one, count) for one in each) for count in ("kept", "lost", "unfinished")
        )
        return CloseReport(each[0].row, kept, lost, unfinished)

    def _refuse(self) -> NoReturn:
        raise StoreError(
            f"this cache asks for all {len(self._segments)} segments of a row and holds the bytes of none;"
            f" open one with Share(parallel, rank) to load and save those of a rank"
        )


class _Reads(Ticket):
    """One ticket for the reads of all segments: shard i is segment i."""

    def __init__(self, objects: int, reads: Sequence[Ticket]) -> None:
        super().__init__(objects, len(reads), durable=False)
        self._reads = reads
        for place, read in enumerate(reads):
            read.add_done_callback(partial(self._end, place))

    def cancel(self) -> None:
        """Cancel every read."""
        super().cancel()
        for read in self._reads:
            read.cancel()

    def _end(self, place: int, read: Ticket) -> None:
        codes = read.object_results
        self.settle(np.arange(len(codes)), codes, shards=slice(place, place + 1))
