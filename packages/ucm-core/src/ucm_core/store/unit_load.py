"""Loads whose shards come one unit at a time (`ucm_core.flow.handles.UnitLoad`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.store.geometry import Geometry
from ucm_core.store.unit_shards import shard_range


class WholeLoad:
    """Brings every object whole as soon as the first of its shards is submitted.

    ``start`` begins a load that settles ``ticket``.
    """

    def __init__(self, geometry: Geometry, ticket: Ticket, start: Callable[[], object]) -> None:
        self._geometry, self._start = geometry, start
        self._lock, self._begun = threading.Lock(), False
        self.ticket = ticket
        """Codes of each shard of each object."""

    def submit(self, shards: slice, *, urgency: int = 0) -> None:  # noqa: ARG002 - all are brought at once
        """Bring these shards, and all others."""
        shard_range(shards, self._geometry)
        if self._is_first():
            self._start()

    def cancel(self) -> None:
        """What has not begun is ``CANCELLED``."""
        self.ticket.cancel()
        if self._is_first():
            self.ticket.settle_rest(ResultCode.CANCELLED)

    def _is_first(self) -> bool:
        with self._lock:
            first, self._begun = not self._begun, True
            return first
