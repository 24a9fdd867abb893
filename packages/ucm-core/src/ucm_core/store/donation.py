"""Zero-copy hand-over: reserve memory for an object, fill it in place, commit it; the donor loses access."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Callable

from ucm_core import _native
from ucm_core.errors import ClosedError, NoSpace, StoreError
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.spec.keys import Keys
from ucm_core.store.geometry import Geometry
from ucm_core.store.held import HeldSlots
from ucm_core.store.payloads import Payloads
from ucm_core.store.ring import Outcome
from ucm_core.store.tiers import KeyBatch, Tiers
from ucm_core.store.writing import WriteOrder, Writer


class Donation:
    """Memory that only the donor may write, until `commit` or `abort`: a ring slot, or beside a full ring.

    `view` hands it out. After `commit` or `abort` every memoryview that was handed out raises
    ``ValueError`` when used. Both refuse (`ucm_core.StoreError`) while something else still exports such a
    view, an array made from it for example, because its owner could write into memory that is no longer its
    own. One that is forgotten is aborted, as soon as no such array is left.
    """

    def __init__(self, geometry: Geometry, payload: Payloads, keep: Callable[[Ticket], None]) -> None:
        """``payload`` is one object's; ``keep`` takes it over once it is full, and settles the rest."""
        self._geometry, self._loan, self._keep = geometry, _Loan(payload), keep
        self._views: list[_View] = []

    @classmethod
    def claim(cls, tiers: Tiers, writer: Writer, *, key: Keys) -> Donation | None:
        """A donation of ``key``; None when it is present or somebody else fills it; raises `NoSpace`."""
        deadline = time.monotonic() + tiers.limits.save_wait_s
        while True:
            seen = writer.finished
            with HeldSlots(tiers.ring) as held:
                held.claim(key[None])
                if (owned := held.places(Outcome.OWNER)).size:
                    return cls._of(held.hand_over(owned), tiers, writer, key)
                if not held.places(Outcome.NO_SPACE).size:
                    return None
            if (payload := writer.borrow(1)) is not None:
                return cls._of(payload, tiers, writer, key)
            if not writer.wait_for_progress(seen, deadline):
                raise NoSpace(
                    f"row {tiers.row}: none of {tiers.ring.slots} ring slots is free; raise ring_bytes"
                )

    @classmethod
    def _of(cls, payload: Payloads, tiers: Tiers, writer: Writer, key: Keys) -> Donation:
        batch = KeyBatch(key[None])
        return cls(
            tiers.files.geometry,
            payload,
            lambda ticket: writer.write(WriteOrder(batch, ticket, batch.first), payload),
        )

    def view(self, shard: int, *, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes ``[begin, end)`` of a shard, writable, content undefined until written."""
        self._check_open()
        geometry = self._geometry
        end = geometry.shard_bytes if end is None else end
        if not (0 <= shard < geometry.shards and 0 <= begin < end <= geometry.shard_bytes):
            raise StoreError(f"bytes [{begin}, {end}) of shard {shard} of an object of {geometry}")
        address = int(self._loan.payload.addresses[0]) + shard * geometry.stride + begin
        self._views.append(_View(address, end - begin, self._loan))
        return self._views[-1].view

    def commit(self) -> Ticket:
        """Store the object, in the ring if it lies there, and on the medium; every shard must be written.

        The ticket is ``CANCELLED`` when the store was closed meanwhile.
        """
        self._revoke()
        geometry = self._geometry
        ticket = Ticket(1, geometry.shards, durable=True)
        try:
            address = self._loan.payload.addresses
            _native.zero_padding(address, geometry.shards, geometry.shard_bytes, geometry.stride)
            if self._loan.payload.publish():
                ticket.settle([0], ResultCode.OK)
            self._keep(ticket)
        except ClosedError:
            ticket.settle_rest(ResultCode.CANCELLED)
        return ticket

    def abort(self) -> None:
        """Give the slot back; nothing becomes readable. A no-op after `commit` or `abort`."""
        if not self._loan.over:
            self._revoke()
            self._loan.give_back()

    def __del__(self) -> None:
        with contextlib.suppress(StoreError, AttributeError):  # still written to, or never made
            self.abort()

    def _check_open(self) -> None:
        if self._loan.over:
            raise StoreError("the donation is over; reserve again")

    def _revoke(self) -> None:
        self._check_open()
        over = [view.is_over() for view in self._views]  # every one, also behind the first refusal
        if not all(over):
            raise StoreError("an array or a slice still uses the donated memory; delete it first")
        self._loan.over = True


class _Loan:
    """A payload while it is the donor's. It goes back unfilled, at the latest with the last way to it."""

    over = True

    def __init__(self, payload: Payloads) -> None:
        self.payload = payload
        self.over = False

    def give_back(self) -> None:
        self.over = True
        with contextlib.suppress(ClosedError):  # then the ring took the slot back itself
            self.payload.abort()

    def __del__(self) -> None:
        if not self.over:
            self.give_back()


class _View:
    """Memory that was handed out, and how to find out that nobody can reach it any more."""

    def __init__(self, address: int, size_bytes: int, loan: _Loan) -> None:
        self._memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        vars(self._memory)["loan"] = loan  # arrays made from it keep the loan, and so the memory itself
        self._idle_references = self._references()
        self.view = memoryview(self._memory).cast("B")

    def is_over(self) -> bool:
        """Release the view; False while a slice or an array made from it is alive."""
        try:
            self.view.release()
        except BufferError:
            return False
        return self._references() == self._idle_references

    def _references(self) -> int:
        return sys.getrefcount(self._memory)
