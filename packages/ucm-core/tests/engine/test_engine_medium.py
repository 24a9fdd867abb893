"""The doubles of storage that takes a given time: who goes first, what comes when, what a cancel leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode
from ucm_core.store.geometry import Geometry
from ucm_core.testing.engine.medium import SerialMedium, SlowStore
from ucm_core.testing.memory_store import MemoryStore
from ucm_core.testing.objects import blank, keys_of, payloads_of

GEOMETRY = Geometry(3, 5000)


class Steps:
    """Time that passes one order at a time."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self._turn = threading.Semaphore(0)

    def pass_(self, orders: int) -> None:
        for _ in range(orders):
            self._turn.release()

    def sleep(self, seconds: float) -> None:
        assert self._turn.acquire(timeout=60)
        self.taken.append(seconds)


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def medium(steps: Steps) -> Iterator[SerialMedium]:
    with SerialMedium(sleep=steps.sleep) as medium:
        yield medium
        steps.pass_(100)


def test_the_most_urgent_order_goes_first() -> None:
    served: list[str] = []
    begun, may_end = threading.Event(), threading.Event()
    with SerialMedium(sleep=lambda _: begun.set() or may_end.wait(60)) as medium:
        medium.order(1.0, lambda: served.append("under way"))
        assert begun.wait(60)
        for name, urgency in (("last", 3), ("first", 1), ("second", 2)):
            medium.order(0.5, lambda name=name: served.append(name), urgency=urgency)
        may_end.set()
    assert served == ["under way", "first", "second", "last"]


@pytest.fixture
def store(medium: SerialMedium) -> SlowStore:
    memory = MemoryStore(GEOMETRY)
    memory.save(keys_of(1, 2), BufferBlocks(payloads_of(GEOMETRY, 1, 2)))
    return SlowStore(memory, medium, lambda keys: 0.0 if len(keys) == 1 else 0.25)


def test_a_shard_comes_when_its_time_has_passed(store: SlowStore, steps: Steps) -> None:
    out = blank(GEOMETRY, 2)
    load = store.begin_load(keys_of(1, 2), BufferBlocks(out))
    load.submit(slice(0, 2))
    load.submit(slice(0, 1))
    assert not load.ticket.wait(0, shard=0)
    steps.pass_(2)
    assert load.ticket.wait(60, shard=0)
    assert load.ticket.wait(60, shard=1)
    assert steps.taken == [0.25, 0.25]
    assert not load.ticket.wait(0, shard=2)
    assert np.array_equal(out[:, :2], payloads_of(GEOMETRY, 1, 2)[:, :2])
    load.cancel()


def test_what_is_cancelled_does_not_come(store: SlowStore, steps: Steps) -> None:
    load = store.begin_load(keys_of(1, 2), BufferBlocks(blank(GEOMETRY, 2)))
    load.submit(slice(0, 1))
    load.cancel()
    steps.pass_(1)
    assert load.ticket.wait(60)
    assert load.ticket.object_results.tolist() == [ResultCode.CANCELLED] * 2


def test_what_takes_no_time_does_not_wait_for_the_medium(store: SlowStore, steps: Steps) -> None:
    load = store.begin_load(keys_of(2), BufferBlocks(blank(GEOMETRY, 1)))
    load.submit(slice(None))
    assert load.ticket.wait(60)
    assert load.ticket.ok
    assert steps.taken == []


def test_everything_else_is_the_stores(store: SlowStore) -> None:
    assert store.lookup(keys_of(1, 3)).tolist() == [True, False]
