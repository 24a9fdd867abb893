"""Doubles of loads and saves by units, over the objects of a `ucm_core.testing.memory_store.MemoryStore`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ucm_core.flow.copy import BlockSource, BlockTarget, Span
from ucm_core.flow.handles import ComputeEvent
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.store.geometry import Geometry
from ucm_core.store.unit_work import shard_range

Bytes = npt.NDArray[np.uint8]
EVENT_WAIT_S = 0.05
"""How long a gather waits for its compute event."""


class MemoryLoad:
    """Stands for a `ucm_core.flow.handles.UnitLoad`: a shard is there when `submit` returns."""

    together, small = 4, False
    """So many shards are there at once."""

    def __init__(
        self, geometry: Geometry, found: list[Bytes | None], target: BlockTarget, *, ticket: Ticket
    ) -> None:
        self._geometry, self._found, self._target = geometry, found, target
        self.over: Callable[[], bool] = lambda: False
        """Whether nothing may be brought any more."""
        self.ticket = ticket
        """Codes of each shard of each object."""
        ticket.settle([place for place, payload in enumerate(found) if payload is None], ResultCode.MISS)

    def submit(self, shards: slice, *, urgency: int = 0, here: bool = False) -> None:  # noqa: ARG002 - always here
        """Copy what was not copied before."""
        begin, end = shard_range(shards, self._geometry)
        if self.over():
            self.cancel()
        for shard in range(begin, end):
            codes = self.ticket.results[:, shard]
            for place in np.flatnonzero(codes == ResultCode.PENDING).tolist():
                payload = self._found[place]
                assert payload is not None
                code = copy_shard(self._target.scatter, place, payload, self._geometry, shard=shard)
                self.ticket.settle([place], code, shards=slice(shard, shard + 1))

    def cancel(self) -> None:
        """What was not submitted is ``CANCELLED``."""
        self.ticket.settle_rest(ResultCode.CANCELLED)


class MemorySave:
    """Stands for a `ucm_core.flow.handles.UnitSave`: a shard is gathered when `submit` returns.

    ``keep`` is told the objects that are whole, by place; ``places`` are those that are to be gathered.
    """

    def __init__(self, geometry: Geometry, places: list[int], source: BlockSource, *, ticket: Ticket) -> None:
        self._geometry, self._source = geometry, source
        self._payloads = {place: np.zeros(geometry.payload_bytes, dtype=np.uint8) for place in places}
        self._gathered: set[int] = set()
        self.keep: Callable[[dict[int, Bytes]], None] = lambda _: None
        """Told at `seal` the payloads of whole objects, by place."""
        self.ticket = ticket
        """Codes of each object."""

    def submit(self, shards: slice, *, ready: ComputeEvent | None = None) -> None:
        """Gather these shards now, after a short wait for ``ready``."""
        begin, end = shard_range(shards, self._geometry)
        self._gathered -= set(range(begin, end))
        if self.ticket.done or not (ready is None or ready.wait(EVENT_WAIT_S)):
            return
        self._gathered |= set(range(begin, end))
        for shard in range(begin, end):
            for place, payload in list(self._payloads.items()):
                code = copy_shard(self._source.gather, place, payload, self._geometry, shard=shard)
                if code != ResultCode.OK:
                    del self._payloads[place]
                    self.ticket.settle([place], code)

    def seal(self) -> None:
        """Keep what is whole, give up the rest."""
        if len(self._gathered) == self._geometry.shards and not self.ticket.done:
            self.keep(self._payloads)
            self.ticket.settle(list(self._payloads), ResultCode.OK)
        self.abandon()

    def abandon(self) -> None:
        """Give up what is not kept."""
        self.ticket.settle(np.arange(self.ticket.results.shape[0]), ResultCode.CANCELLED)
        self.ticket.settle_rest(ResultCode.NO_SPACE)


def copy_shard(
    copy: Callable[..., None], place: int, payload: Bytes, geometry: Geometry, *, shard: int
) -> ResultCode:
    """Copy one shard of one object; ``INVALID`` when that raises."""
    span: Span = (shard * geometry.stride, (shard + 1) * geometry.stride)
    try:
        copy(np.array([place]), np.array([payload.ctypes.data]), span=span)
    except Exception:  # noqa: BLE001 - the caller's code: its failure is the object's
        return ResultCode.INVALID
    return ResultCode.OK
