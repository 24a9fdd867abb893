"""Saves whose shards come one unit at a time (`ucm_core.flow.handles.UnitSave`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ucm_core.flow.handles import ComputeEvent
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.store.geometry import Geometry
from ucm_core.store.tiers import count_failures
from ucm_core.store.unit_shards import shard_range


class WholeSave:
    """Gathers every object whole, once all shards were submitted and sealed.

    ``start(events)`` begins a save that settles ``ticket``, after those events.
    """

    def __init__(
        self, geometry: Geometry, ticket: Ticket, start: Callable[[list[ComputeEvent]], object]
    ) -> None:
        self._geometry, self._start = geometry, start
        self._lock, self._over = threading.Lock(), False
        self._events: dict[int, ComputeEvent | None] = {}
        self.ticket = ticket
        """Codes of each object."""

    def submit(self, shards: slice, *, ready: ComputeEvent | None = None) -> None:
        """Note that these shards will be there once ``ready`` is reached."""
        begin, end = shard_range(shards, self._geometry)
        with self._lock:
            self._events.update(dict.fromkeys(range(begin, end), ready))

    def seal(self) -> None:
        """Save objects that have all shards; give the others up."""
        if self._is_first():
            if len(self._events) == self._geometry.shards:
                self._start([event for event in self._events.values() if event is not None])
            else:
                self._give_up()

    def abandon(self) -> None:
        """Give up what has not begun."""
        self.ticket.cancel()
        if self._is_first():
            self._give_up()

    def _give_up(self) -> None:
        self.ticket.settle_rest(ResultCode.CANCELLED)
        count_failures("save", self.ticket.object_results)

    def _is_first(self) -> bool:
        with self._lock:
            first, self._over = not self._over, True
            return first
