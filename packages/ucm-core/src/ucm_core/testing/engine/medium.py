"""Doubles of storage that takes a given time: a medium, loads over it, and a store whose loads take it.

They stand for disks and networks where a test or a benchmark must know how long a load takes. Bytes come from
the store that is wrapped; the medium only makes everybody wait for its turn.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from ucm_core.flow.copy import BlockTarget
from ucm_core.flow.handles import UnitLoad
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.spec.keys import Keys
from ucm_core.store.absent import ObjectStore

__all__ = ["SerialMedium", "SlowLoad", "SlowStore"]


class SerialMedium:
    """A double of a medium that serves one order at a time, the most urgent first. A context manager."""

    def __init__(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._orders: list[tuple[int, int, float, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self.busy_s = 0.0
        """Time that orders took so far."""
        self._thread = threading.Thread(target=self._serve, name="serial medium", daemon=True)
        self._thread.start()

    def order(self, seconds: float, then: Callable[[], None], *, urgency: int = 0) -> None:
        """Call ``then`` when the medium was busy with it for ``seconds``; the smallest urgency goes first."""
        with self._changed:
            heapq.heappush(self._orders, (urgency, next(self._numbers), seconds, then))
            self._changed.notify()

    def close(self) -> None:
        """Serve what was ordered, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._orders or self._closed)
                if not self._orders:
                    return
                _, _, seconds, then = heapq.heappop(self._orders)
            self._sleep(seconds)
            self.busy_s += seconds
            then()


class SlowLoad:
    """A double of a load whose every shard takes ``unit_s`` on ``medium``, and then what ``load`` takes."""

    together, small = 1, False
    """The medium brings one at a time."""

    def __init__(self, load: UnitLoad, medium: SerialMedium, *, unit_s: float) -> None:
        self._load, self._medium, self._unit_s = load, medium, unit_s
        objects, shards = load.ticket.results.shape
        self._shards = range(shards)
        self._ordered: set[int] = set()
        self._cancelled = False
        self.ticket = Ticket(objects, shards, durable=False)
        """A shard has its code when the medium has brought it."""

    def submit(self, shards: slice, *, urgency: int = 0, here: bool = False) -> None:  # noqa: ARG002 - never small
        """Order each shard that was not ordered before."""
        for shard in self._shards[shards]:
            if shard not in self._ordered and not self._cancelled:
                self._ordered.add(shard)
                self._medium.order(self._unit_s, partial(self._bring, shard), urgency=urgency)

    def cancel(self) -> None:
        """Nothing more comes."""
        self._cancelled = True
        self._load.cancel()
        self._load.ticket.add_done_callback(lambda _: self.ticket.settle_rest(ResultCode.CANCELLED))

    def _bring(self, shard: int) -> None:
        if not self._cancelled:
            self._load.submit(slice(shard, shard + 1))
            self._load.ticket.wait(shard=shard)
            codes = self._load.ticket.results[:, shard]
            self.ticket.settle(range(len(codes)), codes, shards=slice(shard, shard + 1))


class SlowStore:
    """A double of a store: all of ``store``, but loads by units take time on ``medium``.

    ``unit_s`` says how long a unit takes, of the load of these keys; 0 = the medium is not asked.
    """

    def __init__(self, store: ObjectStore, medium: SerialMedium, unit_s: Callable[[Keys], float]) -> None:
        self._store, self._medium, self._unit_s = store, medium, unit_s

    def begin_load(self, keys: Keys, target: BlockTarget, *, parents: Keys | None = None) -> UnitLoad:
        """As the store's, later."""
        load, unit_s = self._store.begin_load(keys, target, parents=parents), self._unit_s(keys)
        return SlowLoad(load, self._medium, unit_s=unit_s) if unit_s else load

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
