"""A double of a block store: a dict in this process, slow and obvious, the oracle of those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ucm_core.flow.copy import BlockSource, BlockTarget
from ucm_core.flow.handles import UnitLoad, UnitSave
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.spec.keys import Keys
from ucm_core.store.arrays import Int64s, Mask
from ucm_core.store.block import BlockStoreStatistics
from ucm_core.store.close_report import CloseReport
from ucm_core.store.donation import Donation
from ucm_core.store.geometry import Geometry
from ucm_core.store.ledger import NO_RESIDENTS, PinBook, Pins, Residents
from ucm_core.store.tiers import KeyBatch, check_keys
from ucm_core.testing.memory_units import MemoryLoad, MemorySave

Bytes = npt.NDArray[np.uint8]


class MemoryStore:
    """Stands for a store of one row: has the terms of `ucm_core.store.block.BlockStore`, and no medium.

    Everything is done when a call returns. It keeps all that it is given until it is closed; a durable result
    is ``NO_SPACE``, because nothing here survives the process. For one thread, and for tests.
    """

    def __init__(self, geometry: Geometry, *, slots: int = 1 << 20) -> None:
        self.geometry = geometry
        """Shards and bytes of every object."""
        self.slots = slots
        """What is said of the ring that there is not."""
        self.objects: dict[bytes, Bytes] = {}
        """Payloads by key, ``uint8[payload_bytes]``, shard ``i`` at ``i`` times the stride."""
        self._filling: set[bytes] = set()
        self._pinned = PinBook()
        self._closed = self._revoked = False

    def lookup(self, keys: Keys) -> Mask:
        """``bool[n]``: which of the keys are there."""
        return np.array([name in self.objects for name in _names(keys)], dtype=np.bool_)

    def lookup_prefix(self, keys: Keys) -> int:
        """How many leading keys are there."""
        return [*self.lookup(keys).tolist(), False].index(False)

    def load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> Ticket:  # noqa: ARG002
        """Copy one object after the other to ``target``."""
        ticket = self._ticket(keys, durable=False)
        for place, name in enumerate(() if ticket.done else _names(keys)):
            payload = self.objects.get(name)
            code = ResultCode.MISS if payload is None else _try(target.scatter, place, payload)
            ticket.settle([place], code)
        return ticket

    def begin_load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> UnitLoad:  # noqa: ARG002
        """A load that copies each shard when it is submitted."""
        ticket = self._ticket(keys, durable=False)
        found = [self.objects.get(name) for name in _names(keys)]
        load = MemoryLoad(self.geometry, found, target, ticket=ticket)
        load.over = lambda: self._closed or self._revoked
        return load

    def begin_save(
        self,
        keys: Keys,
        source: BlockSource,
        *,
        parents: Keys | None = None,  # noqa: ARG002
        absent: bool = False,  # noqa: ARG002
    ) -> UnitSave:
        """A save that copies each shard when it is submitted."""
        ticket, names = self._ticket(keys, durable=True), _names(keys)
        first = {name: place for place, name in reversed(list(enumerate(names)))}
        todo = [place for name, place in first.items() if name not in self.objects]
        ticket.settle([place for place, name in enumerate(names) if name in self.objects], ResultCode.OK)
        save = MemorySave(self.geometry, todo, source, ticket=ticket)
        save.keep = partial(self._keep, names, ticket)
        return save

    def _keep(self, names: list[bytes], ticket: Ticket, whole: dict[int, Bytes]) -> None:
        kept = {names[place]: payload for place, payload in whole.items()}
        if not self._closed:
            self.objects.update(kept)
            ticket.settle([place for place, name in enumerate(names) if name in kept], ResultCode.OK)

    def prefetch(self, keys: Keys, *, parents: Keys | None = None) -> Ticket:  # noqa: ARG002
        """Say which of the keys are there."""
        ticket = self._ticket(keys, durable=False)
        ticket.settle(np.arange(len(keys)), np.where(self.lookup(keys), ResultCode.OK, ResultCode.MISS))
        return ticket

    def save(
        self,
        keys: Keys,
        source: BlockSource,
        *,
        gather_inline: bool = True,  # noqa: ARG002
        parents: Keys | None = None,  # noqa: ARG002
        absent: bool = False,  # noqa: ARG002
    ) -> Ticket:
        """Copy one object after the other out of ``source``; a present one is not gathered."""
        ticket, codes = self._ticket(keys, durable=True), dict[bytes, int]()
        for place, name in enumerate(_names(keys)):
            if self._closed:
                break
            if name not in codes:
                codes[name] = ResultCode.OK if name in self.objects else self._gather(name, source, place)
            ticket.settle([place], codes[name])
        ticket.settle_durable(np.arange(len(keys)), ResultCode.NO_SPACE)
        return ticket

    def reserve(self, key: Keys) -> Donation | None:
        """Memory for one object; None when it is there, or being filled."""
        name = _names(np.asarray(key)[None])[0]
        if self._closed or name in self.objects or name in self._filling:
            return None
        self._filling.add(name)
        return Donation(self.geometry, _Payload(self, name), _end_of_save)

    def pin(self, keys: Keys) -> Pins:
        """Note what is there of the keys; everything stays anyway."""
        return Pins(keys[self.lookup(keys)], self._pinned, lambda: None)

    def in_flight(self, keys: Keys) -> Mask:
        """``bool[n]``: which of the keys are reserved."""
        return np.array([name in self._filling for name in _names(keys)], dtype=np.bool_)

    def residents(self) -> Residents:
        """None: there is no ring."""
        return NO_RESIDENTS

    def touch(self, keys: Keys) -> None:
        """Nothing is ever removed, so nothing is marked as used."""
        KeyBatch(keys)

    def drop(self, keys: Keys) -> None:
        """Remove objects."""
        for name in _names(keys):
            self.objects.pop(name, None)

    def names(self) -> Iterator[Keys]:
        """None: there is no medium."""
        return iter(())

    def statistics(self) -> BlockStoreStatistics:
        """Its pins; there is nothing else to count."""
        return BlockStoreStatistics(working=0, pending_writes=0, pins=self._pinned.count, ring=None)

    def check_integrity(self) -> None:
        """Nothing can be wrong."""

    def revoke(self) -> None:
        """End every later load as ``CANCELLED``."""
        self._revoked = True

    def close(self, timeout_s: float = 30.0) -> CloseReport:  # noqa: ARG002 - nothing is under way
        """Forget everything."""
        self._closed = True
        self.objects.clear()
        self._pinned.forget()
        return CloseReport("memory")

    # -- private

    def _ticket(self, keys: Keys, *, durable: bool) -> Ticket:
        ticket = Ticket(KeyBatch(keys).count, self.geometry.shards, durable=durable)
        if self._closed or (self._revoked and not durable):
            ticket.settle_rest(ResultCode.CANCELLED)
        return ticket

    def _gather(self, name: bytes, source: BlockSource, place: int) -> ResultCode:
        payload = np.zeros(self.geometry.payload_bytes, dtype=np.uint8)
        code = _try(source.gather, place, payload)
        if code == ResultCode.OK:
            self.objects[name] = payload
        return code


class _Payload:
    """Memory of one object that is being donated."""

    in_ring: ClassVar[bool] = True

    def __init__(self, store: MemoryStore, name: bytes) -> None:
        self._store, self._name = store, name
        self._bytes = np.zeros(store.geometry.payload_bytes, dtype=np.uint8)
        self.addresses: Int64s = np.array([self._bytes.ctypes.data])

    def part(self, places: Int64s) -> _Payload:  # noqa: ARG002 - it has no parts
        return self

    def publish(self) -> bool:
        self._store._filling.discard(self._name)
        self._store.objects[self._name] = self._bytes.copy()
        return True

    def abort(self) -> None:
        self._store._filling.discard(self._name)

    release = abort


def _end_of_save(ticket: Ticket) -> None:
    ticket.settle_durable([0], ResultCode.NO_SPACE)


def _try(copy: Callable[[Int64s, Int64s], None], place: int, payload: Bytes) -> ResultCode:
    try:
        copy(np.array([place]), np.array([payload.ctypes.data]))
    except Exception:  # noqa: BLE001 - the caller's code: its failure is the object's
        return ResultCode.INVALID
    return ResultCode.OK


def _names(keys: Keys) -> list[bytes]:
    check_keys(keys)
    return [key.tobytes() for key in keys]
