"""Prefetch: it reads the medium, gives way to loads, stops when told, and takes no room from anybody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from stores import NAMESPACE, Faults, open_store

from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.pool import Priority
from ucm_core.testing.block_store import WAIT_S, blank, keys_of, payloads_of

GEOMETRY = Geometry(1, 4096)
NUMBERS = range(8)


class CountingMedium(Faults):
    """A double of a medium that counts its reads, and holds them while it is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.reached, self.open = threading.Event(), threading.Event()
        self.open.set()

    def check(self, name: str) -> None:
        super().check(name)
        if name == "FileTier.read":
            self.reads += 1
            self.reached.set()
            assert self.open.wait(WAIT_S)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    store = open_store(tmp_path, GEOMETRY)
    assert store.save(keys_of(*NUMBERS), BufferBlocks(payloads_of(GEOMETRY, *NUMBERS))).wait_durable(WAIT_S)
    store.close()
    return tmp_path


@pytest.fixture
def medium() -> Iterator[CountingMedium]:
    medium = CountingMedium()
    yield medium
    medium.open.set()


@pytest.fixture
def store(stored: Path, medium: CountingMedium) -> Iterator[BlockStore]:
    """One thread, so that pieces of work run one after the other: each reads one object."""
    store = open_store(stored, GEOMETRY, slots=8, threads=1, faults=medium)
    yield store
    medium.open.set()
    store.close()


def load(store: BlockStore, *numbers: int) -> tuple[Ticket, np.ndarray]:
    out = blank(GEOMETRY, len(numbers))
    return store.load(keys_of(*numbers), BufferBlocks(out)), out


def unlink_files(root: Path) -> None:
    for file in (root / NAMESPACE).rglob("*.c0-1"):
        file.unlink()


def test_it_reads_the_medium(store: BlockStore, medium: CountingMedium, stored: Path) -> None:
    assert store.prefetch(keys_of(*NUMBERS)).wait(WAIT_S)
    assert medium.reads > 0
    unlink_files(stored)
    ticket, out = load(store, *NUMBERS)
    assert ticket.wait(WAIT_S)
    assert ticket.ok
    assert np.array_equal(out, payloads_of(GEOMETRY, *NUMBERS))


def test_what_the_ring_holds_is_not_read_again(store: BlockStore, medium: CountingMedium) -> None:
    assert store.prefetch(keys_of(*NUMBERS)).wait(WAIT_S)
    reads = medium.reads
    assert store.prefetch(keys_of(*NUMBERS)).wait(0)
    assert medium.reads == reads


def test_a_load_does_not_wait_for_a_prefetch_that_is_queued(
    store: BlockStore, medium: CountingMedium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only thread is busy; what was asked last by a load comes before what was asked first."""
    order: list[str] = []
    busy, go = threading.Event(), threading.Event()
    store._tiers.pool.submit(Priority.LOAD, lambda: (busy.set(), go.wait(WAIT_S), None)[2])
    assert busy.wait(WAIT_S)
    prefetched = store.prefetch(keys_of(*NUMBERS))
    loaded, out = load(store, 7)
    prefetched.add_done_callback(lambda _: order.append("prefetch"))
    loaded.add_done_callback(lambda _: order.append("load"))
    go.set()
    assert prefetched.wait(WAIT_S)
    assert loaded.ok
    assert order == ["load", "prefetch"]
    assert np.array_equal(out, payloads_of(GEOMETRY, 7))


def test_a_queued_prefetch_that_is_cancelled_never_starts(store: BlockStore, medium: CountingMedium) -> None:
    busy, go = threading.Event(), threading.Event()
    store._tiers.pool.submit(Priority.LOAD, lambda: (busy.set(), go.wait(WAIT_S), None)[2])
    assert busy.wait(WAIT_S)
    ticket = store.prefetch(keys_of(*NUMBERS))
    ticket.cancel()
    go.set()
    assert ticket.wait(WAIT_S)
    assert (medium.reads, set(ticket.object_results.tolist())) == (0, {ResultCode.CANCELLED})


def test_a_cancelled_prefetch_stops_before_its_next_piece(stored: Path, medium: CountingMedium) -> None:
    store = open_store(stored, GEOMETRY, slots=8, threads=4, faults=medium)
    store._tiers.pool._most[Priority.PREFETCH] = 1  # one piece after the other
    medium.open.clear()
    ticket = store.prefetch(keys_of(*NUMBERS))
    assert medium.reached.wait(WAIT_S)
    ticket.cancel()
    medium.open.set()
    assert ticket.wait(WAIT_S)
    codes = ticket.object_results.tolist()
    assert medium.reads == 1
    assert codes == [ResultCode.OK] * 2 + [ResultCode.CANCELLED] * 6
    store.close()


def test_what_somebody_else_reads_is_not_waited_for(stored: Path, medium: CountingMedium) -> None:
    store = open_store(stored, GEOMETRY, slots=8, threads=2, faults=medium)
    medium.open.clear()
    loaded, _ = load(store, 3)
    assert medium.reached.wait(WAIT_S)
    assert store.prefetch(keys_of(3)).wait(WAIT_S)
    assert not loaded.done
    medium.open.set()
    assert loaded.wait(WAIT_S)
    assert (medium.reads, loaded.ok) == (1, True)
    store.close()


def test_without_room_in_the_ring_it_gives_up(store: BlockStore, medium: CountingMedium) -> None:
    donations = [store.reserve(keys_of(number)[0]) for number in range(100, 108)]
    ticket = store.prefetch(keys_of(*NUMBERS))
    assert ticket.wait(WAIT_S)
    assert set(ticket.object_results.tolist()) == {ResultCode.NO_SPACE}
    assert medium.reads == 0
    for donation in donations:
        assert donation is not None
        donation.abort()
