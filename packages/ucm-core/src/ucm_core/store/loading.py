"""One piece of a load: ring hits are copied, the rest is read once per node and copied.

The order inside a piece matters. What this thread owns it reads and publishes *before* it waits for anybody
else, so no two readers can wait for each other, and every owner is running, never queued.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ucm_core.flow.copy import BlockTarget
from ucm_core.flow.ticket import Codes, ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.store.held import HeldSlots
from ucm_core.store.ring import Outcome
from ucm_core.store.tiers import Int64s, KeyBatch, PrivateMemory, Tiers, copy_each, count_failures

_READY = np.uint8(Outcome.READY)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What one load or prefetch asks for."""

    batch: KeyBatch
    ticket: Ticket
    target: BlockTarget | None
    """None = into the ring only (prefetch)."""

    @property
    def operation(self) -> str:
        """The name under which failures are counted."""
        return "prefetch" if self.target is None else "load"


def load_chunk(tiers: Tiers, order: LoadOrder, *, ids: Int64s) -> None:
    """Load the distinct keys ``ids`` and settle their positions; after an exception the caller does."""
    if order.ticket.cancelled:
        order.batch.settle(order.ticket, ids, codes=ResultCode.CANCELLED)
        return
    if deliver_resident(tiers, order, ids=ids):
        return
    with HeldSlots(tiers.ring, tiers.ring.claim(order.batch.keys[ids])) as held:
        chunk = _Chunk(tiers, order, ids, held)
        chunk.deliver(held.places(Outcome.READY), "ring")
        chunk.read(held.places(Outcome.OWNER))
        left = [chunk.await_others(held.places(Outcome.LOADING)), ids[held.places(Outcome.NO_SPACE)]]
    without_slot = np.concatenate(left)
    if without_slot.size:
        _load_without_ring(tiers, order, without_slot)


def deliver_resident(tiers: Tiers, order: LoadOrder, *, ids: Int64s) -> bool:
    """Copy and settle the keys ``ids`` if the ring holds them all, the short way; False: nothing was done."""
    claims = tiers.ring.pin(order.batch.keys[ids])
    held = claims.slots[claims.slots >= 0]
    try:
        whole = not (claims.outcome != _READY).any()
        if whole:
            _deliver(tiers, order, ids, tiers.ring.addresses(held), "ring")
        return whole
    finally:
        if held.size:
            tiers.ring.release(held)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One piece of a load and its slots; places are indices into ``ids``."""

    tiers: Tiers
    order: LoadOrder
    ids: Int64s
    held: HeldSlots

    def deliver(self, places: Int64s, tier: str) -> None:
        """Copy what is in the ring."""
        if places.size:
            _deliver(self.tiers, self.order, self.ids[places], self.held.addresses(places), tier)

    def read(self, places: Int64s) -> None:
        """Read what nobody else reads; publish what verified, abort what did not."""
        if not places.size:
            return
        keys = self.order.batch.keys[self.ids[places]]
        codes = self.tiers.files.read(keys, self.held.addresses(places))
        good = codes == ResultCode.OK
        self.held.publish(places[good])
        self.held.abort(places[~good])
        _settle_failures(self.order, self.ids[places[~good]], codes[~good])
        self.deliver(places[good], "file")

    def await_others(self, places: Int64s) -> Int64s:
        """Copy what other readers bring in bounded time; returns the ids that nobody brought."""
        outcome = self.held.wait(places, self.tiers.limits.load_wait_s)
        self.deliver(places[outcome == Outcome.READY], "ring")
        left: Int64s = self.ids[places[outcome != Outcome.READY]]
        return left


def _load_without_ring(tiers: Tiers, order: LoadOrder, ids: Int64s) -> None:
    if order.target is None:
        _settle_failures(order, ids, np.full(ids.size, ResultCode.NO_SPACE, dtype=np.uint8))
        return
    memory = PrivateMemory(ids.size, tiers.files.geometry.payload_bytes)
    codes = tiers.files.read(order.batch.keys[ids], memory.addresses)
    good = codes == ResultCode.OK
    _settle_failures(order, ids[~good], codes[~good])
    _deliver(tiers, order, ids[good], memory.addresses[good], "file")


def _deliver(tiers: Tiers, order: LoadOrder, ids: Int64s, addresses: Int64s, tier: str) -> None:
    """Copy verified payloads to their positions, then settle them."""
    if not ids.size:
        return
    positions, which = order.batch.expand(ids)
    codes = np.zeros(positions.size, dtype=np.uint8)
    if order.target is not None:
        codes = copy_each(order.target.scatter, positions, address=addresses[which], who="a target")
    order.ticket.settle(positions, codes)
    count_failures(order.operation, codes)
    metrics.OBJECTS_LOADED.labels(row=tiers.row, tier=tier).inc(int((codes == ResultCode.OK).sum()))


def _settle_failures(order: LoadOrder, ids: Int64s, codes: Codes) -> None:
    if ids.size:
        order.batch.settle(order.ticket, ids, codes=codes)
        count_failures(order.operation, codes)
