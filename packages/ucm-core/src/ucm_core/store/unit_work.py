"""How loads and saves by units have their work done, and how a store that closes ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ucm_core.errors import LayoutError
from ucm_core.flow.copy import Span
from ucm_core.flow.ticket import ResultCode
from ucm_core.ops import metrics
from ucm_core.store.geometry import Geometry
from ucm_core.store.ledger import Work, WorkGate
from ucm_core.store.pool import Priority
from ucm_core.store.tiers import Tiers, log

SLICE_S = 0.005
"""How long a thread waits for others before it looks whether there is something to do."""


class Handle(Protocol):
    """A load or save by units that has not ended."""

    def close(self) -> None:
        """The store closes: nothing more is submitted."""


class UnitDesk:
    """The open handles of one store. Each counts as one piece of work of the store until it leaves."""

    def __init__(self, tiers: Tiers, gate: WorkGate) -> None:
        self.tiers = tiers
        """Where their bytes come from and go to."""
        self._gate = gate
        self._lock = threading.Lock()
        self._open: dict[Handle, Work] = {}
        self._closed = False

    def enter(self, handle: Handle) -> bool:
        """Count a handle in, before it takes anything; False: the store is closed."""
        work = Work(handle)
        if not self._gate.begin(work):
            return False
        with self._lock:
            if not self._closed:
                self._open[handle] = work
                return True
        self._gate.end(work)
        return False

    def leave(self, handle: Handle) -> None:
        """It holds nothing any more, and nothing of it is under way."""
        with self._lock:
            work = self._open.pop(handle, None)
        if work is not None:
            self._gate.end(work)

    def close(self) -> None:
        """Tell every handle that the store closes."""
        with self._lock:
            self._closed = True
            handles = list(self._open)
        for handle in handles:
            handle.close()

    def queue(
        self,
        priority: Priority,
        work: Callable[[], None],
        *,
        otherwise: Callable[[ResultCode], None],
        rank: int = 0,
    ) -> None:
        """Have ``work`` done; ``otherwise`` is told when it will not be, and when it raised."""
        if not self.tiers.pool.submit(priority, partial(self.run, work, otherwise=otherwise), rank=rank):
            otherwise(ResultCode.CANCELLED)

    def run(self, work: Callable[[], None], *, otherwise: Callable[[ResultCode], None]) -> None:
        """Do ``work`` here; ``otherwise`` is told when it raised."""
        try:
            work()
        except BaseException as error:
            # The border of the store: storage never raises into the engine's loop.
            metrics.ERRORS.labels(where="block_store").inc()
            log.exception("row %s: unexpected failure", self.tiers.row)
            otherwise(ResultCode.UNAVAILABLE)
            if not isinstance(error, Exception):  # somebody wants to end the program
                raise


def shard_range(shards: slice, geometry: Geometry) -> tuple[int, int]:
    """The shards ``[begin, end)`` that ``shards`` names; LayoutError for what is no range of an object's.

    >>> shard_range(slice(1, None), Geometry(3, 8))
    (1, 3)
    """
    count = geometry.shards
    begin = 0 if shards.start is None else shards.start
    end = count if shards.stop is None else shards.stop
    if shards.step not in {None, 1} or not 0 <= begin < end <= count:
        raise LayoutError(f"{shards} is no range of the {count} shards of an object")
    return begin, end


def bytes_of(shards: tuple[int, int], geometry: Geometry) -> Span:
    """Where shards ``[begin, end)`` lie in a payload.

    >>> bytes_of((1, 3), Geometry(4, 5000))
    (8192, 24576)
    """
    return shards[0] * geometry.stride, shards[1] * geometry.stride
