"""One piece of a load: ring hits are copied, the rest is read once per node and copied.

The order inside a piece matters. What this thread owns it reads and publishes *before* it waits for anybody
else, so no two readers can wait for each other, and every owner is running, never queued.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ucm_core.flow.copy import BlockTarget, Strides, strides_of
from ucm_core.flow.ticket import Codes, ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.spec.keys import Keys
from ucm_core.store.arrays import Int64s
from ucm_core.store.held import HeldSlots
from ucm_core.store.payloads import PrivateMemory
from ucm_core.store.ring import Outcome
from ucm_core.store.tiers import KeyBatch, Tiers, copy_each, count_failures

_OK = np.uint8(ResultCode.OK)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What one load or prefetch asks for."""

    batch: KeyBatch
    ticket: Ticket
    target: BlockTarget | None
    """None = into the ring only (prefetch)."""
    revoked: Callable[[], bool]
    """Whether the bytes are of a computation that is over: then none of them is delivered."""

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants it any more."""
        return self.ticket.cancelled or self.revoked()

    @property
    def operation(self) -> str:
        """The name under which failures are counted."""
        return "prefetch" if self.target is None else "load"


class LoadWork(Protocol):
    """What brings one piece of a load or prefetch: `load_chunk`, `prefetch_chunk`."""

    def __call__(self, tiers: Tiers, order: LoadOrder, *, ids: Int64s) -> None:
        """Bring ``ids`` and settle them."""


def load_chunk(tiers: Tiers, order: LoadOrder, *, ids: Int64s) -> None:
    """Load the distinct keys ``ids`` and settle their positions; after an exception the caller does."""
    if order.cancelled:
        order.batch.settle(order.ticket, ids, codes=ResultCode.CANCELLED)
        return
    if deliver_resident(tiers, order, ids=ids):
        return
    with HeldSlots(tiers.ring) as held:
        _claim(held, tiers, order, ids=ids)
        chunk = _Chunk(tiers, order, ids, held)
        chunk.deliver(held.places(Outcome.READY), "ring")
        chunk.read(held.places(Outcome.OWNER))
        if held.owned:
            return
        left = [chunk.await_others(held.places(Outcome.LOADING))]
    left += [ids[held.places(outcome)] for outcome in (Outcome.NO_SPACE, Outcome.ABSENT)]
    without_slot = np.concatenate(left)
    if without_slot.size:
        _load_past_ring(tiers, order, without_slot)


def prefetch_chunk(tiers: Tiers, order: LoadOrder, *, ids: Int64s) -> None:
    """Read ``ids`` into the ring and settle their positions: what is there, or comes by somebody else, is OK.

    Waits for nobody, and takes no other memory where the ring has no room.
    """
    if order.cancelled:
        order.batch.settle(order.ticket, ids, codes=ResultCode.CANCELLED)
        return
    with HeldSlots(tiers.ring) as held:
        _claim(held, tiers, order, ids=ids)
        chunk = _Chunk(tiers, order, ids, held)
        chunk.read(held.places(Outcome.OWNER))
        if held.owned:
            return
        for outcome, code in _PREFETCHED.items():
            _settle(order, ids[held.places(outcome)], np.uint8(code))


_PREFETCHED = {
    Outcome.READY: ResultCode.OK,
    Outcome.LOADING: ResultCode.OK,
    Outcome.NO_SPACE: ResultCode.NO_SPACE,
    Outcome.ABSENT: ResultCode.MISS,
}


def _claim(held: HeldSlots, tiers: Tiers, order: LoadOrder, *, ids: Int64s) -> None:
    """Slots of what is there, and slots to fill; without files nothing could fill them, so none is taken."""
    keys = order.batch.keys[ids]
    if tiers.files.keeps:
        held.claim(keys, order.batch.parents(ids), demand=order.target is not None)
    else:
        held.pin(keys)


def deliver_resident(tiers: Tiers, order: LoadOrder, *, ids: Int64s) -> bool:
    """Copy and settle the keys ``ids`` if the ring holds them all, the short way; False: nothing was done."""
    positions, which = order.batch.expand(ids)
    strides = _strides(order.target, positions)
    if strides is None or order.revoked():
        return _deliver_pinned(tiers, order, ids)
    with order.ticket.copying() as wanted:
        if wanted and not tiers.ring.scatter(order.batch.keys[ids][which], strides):
            return False
        code = ResultCode.OK if wanted else ResultCode.CANCELLED
        _tell(tiers, order, positions, codes=np.full(positions.size, code, dtype=np.uint8), tier="ring")
    return True


def load_hits(tiers: Tiers, keys: Keys, *, target: BlockTarget) -> bool:
    """Copy the payloads of a whole batch by one native call; False: nothing was done.

    That is so where the ring does not hold all of it, or the target's own code has to run.
    """
    strides = _strides(target, None)
    with suppress(Exception):  # what is wrong with the target the long way finds out, object by object
        return strides is not None and tiers.ring.scatter(keys, strides)
    return False


def _strides(target: BlockTarget | None, index: Int64s | None) -> Strides | None:
    """None: the target has to be asked, perhaps object by object, for what it can take."""
    with suppress(Exception):
        return strides_of(target, index, written=True)
    return None


def _deliver_pinned(tiers: Tiers, order: LoadOrder, ids: Int64s) -> bool:
    with HeldSlots(tiers.ring) as held:
        held.pin(order.batch.keys[ids])
        ready = held.places(Outcome.READY)
        if ready.size < ids.size:
            return False
        _deliver(tiers, order, ids, held.addresses(ready), "ring")
        return True


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
        good = places
        if np.count_nonzero(codes):
            whole = ~codes.any(axis=1)
            good, bad = places[whole], places[~whole]
            self.held.abort(bad)
            _settle(self.order, self.ids[bad], codes[~whole])
        self.held.publish(good)
        self.deliver(good, "file")

    def await_others(self, places: Int64s) -> Int64s:
        """Copy what other readers bring in bounded time; returns the ids that nobody brought."""
        outcome = self.held.wait(places, self.tiers.limits.load_wait_s)
        self.deliver(places[outcome == Outcome.READY], "ring")
        left: Int64s = self.ids[places[outcome != Outcome.READY]]
        return left


def _load_past_ring(tiers: Tiers, order: LoadOrder, ids: Int64s) -> None:
    """Read into private memory: one piece per I/O thread, and so bounded."""
    memory = PrivateMemory(ids.size, tiers.files.geometry.payload_bytes)
    codes = tiers.files.read(order.batch.keys[ids], memory.addresses)
    good = ~codes.any(axis=1)
    _settle(order, ids[~good], codes[~good])
    _deliver(tiers, order, ids[good], memory.addresses[good], "file")


def _deliver(tiers: Tiers, order: LoadOrder, ids: Int64s, addresses: Int64s, tier: str) -> None:
    """Copy verified payloads to their positions, then settle them."""
    if not ids.size:
        return
    positions, which = order.batch.expand(ids)
    codes = np.zeros(positions.size, dtype=np.uint8)
    with order.ticket.copying() as wanted:
        if not wanted:
            codes[:] = ResultCode.CANCELLED
        elif order.target is not None and not order.revoked():
            codes = copy_each(order.target.scatter, positions, address=addresses[which], who="a target")
        _tell(tiers, order, positions, codes=codes, tier=tier)


def _tell(tiers: Tiers, order: LoadOrder, positions: Int64s, *, codes: Codes, tier: str) -> None:
    """Count, then settle what was copied, unless it is not wanted any more."""
    if order.revoked():
        codes[:] = ResultCode.CANCELLED
    count_failures(order.operation, codes)
    metrics.OBJECTS_LOADED.labels(row=tiers.row, tier=tier).inc(int(np.count_nonzero(codes == _OK)))
    order.ticket.settle(positions, codes)


def _settle(order: LoadOrder, ids: Int64s, codes: npt.ArrayLike) -> None:
    """Count and settle what nothing is copied for: a code for all, for each, or for each shard of each."""
    if ids.size:
        given = np.asarray(codes, dtype=np.uint8)
        objects = given.max(axis=1) if given.ndim == 2 else np.broadcast_to(given, ids.shape)
        count_failures(order.operation, objects)
        order.batch.settle(order.ticket, ids, codes=codes)
