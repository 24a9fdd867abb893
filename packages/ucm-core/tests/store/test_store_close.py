"""Closing a store while others use it, and callers that end instead of failing: nobody is left waiting."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stores import Faults, open_store

from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.testing.block_store import WAIT_S, keys_of, payloads_of

GEOMETRY = Geometry(1, 4096)


class Gate(Faults):
    """Holds one call of the ring until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.held = "nothing"
        self.reached, self.opened = threading.Event(), threading.Event()

    def check(self, name: str) -> None:
        super().check(name)
        if name == self.held:
            self.reached.set()
            assert self.opened.wait(WAIT_S)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def store(tmp_path: Path, gate: Gate) -> Iterator[BlockStore]:
    store = open_store(tmp_path, GEOMETRY, faults=gate)
    assert store.save(keys_of(0), BufferBlocks(payloads_of(GEOMETRY, 0))).wait_durable(WAIT_S)
    yield store
    store.close()


CALLS: dict[str, Callable[[BlockStore], object]] = {
    "lookup": lambda store: store.lookup(keys_of(0)),
    "touch": lambda store: store.touch(keys_of(0)),
    "pin": lambda store: store.pin(keys_of(0)),
    "drop": lambda store: store.drop(keys_of(0)),
    "statistics": lambda store: store.statistics(),
    "check_integrity": lambda store: store.check_integrity(),
    "claim": lambda store: store.reserve(keys_of(1)[0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_closing_waits_for_a_call_that_uses_the_ring(store: BlockStore, gate: Gate, name: str) -> None:
    gate.held = f"Ring.{name}"
    failed: list[Exception] = []

    def call() -> None:
        try:
            CALLS[name](store)
        except Exception as error:  # noqa: BLE001 - the border of a thread
            failed.append(error)

    caller, closer = threading.Thread(target=call), threading.Thread(target=store.close)
    caller.start()
    assert gate.reached.wait(WAIT_S)
    gate.held = "nothing"
    closer.start()
    gate.opened.set()
    caller.join(WAIT_S)
    closer.join(WAIT_S)
    assert failed == []


@pytest.mark.parametrize("name", CALLS)
def test_no_call_raises_after_close(store: BlockStore, name: str) -> None:
    store.close()
    CALLS[name](store)


def test_pins_outlive_their_store(store: BlockStore) -> None:
    pins = store.pin(keys_of(0))
    store.close()
    pins.release()


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_donation_outlives_its_store(store: BlockStore, end: str) -> None:
    donation = store.reserve(keys_of(1)[0])
    assert donation is not None
    donation.view(0)[:] = bytes(4096)
    store.close()
    ticket = getattr(donation, end)()
    assert ticket is None or ticket.object_results.tolist() == [ResultCode.CANCELLED]


class Ends:
    """A source or target that ends its caller."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def gather(self, index: object, address: object) -> None:
        raise self.error

    scatter = gather


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_no_ticket_is_lost_when_a_target_ends_its_thread(
    store: BlockStore, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucm_core.store.block.INLINE_BYTES", 0)
    for _ in range(3):  # more often than there are threads
        ticket = store.load(keys_of(0), Ends(error))
        assert ticket.wait(WAIT_S)
        assert not ticket.ok
    assert store.save(keys_of(2), Ends(error), gather_inline=False).wait(WAIT_S)
    assert store.prefetch(keys_of(0)).wait(WAIT_S)
    store.close()
    assert store.statistics().working == 0


def test_the_caller_of_a_save_ends_when_its_source_does(store: BlockStore) -> None:
    with pytest.raises(KeyboardInterrupt):
        store.save(keys_of(2), Ends(KeyboardInterrupt))
    assert store.statistics().working == 0


def test_the_caller_of_a_small_load_ends_when_its_target_does(store: BlockStore) -> None:
    assert store.prefetch(keys_of(0)).wait(WAIT_S)
    with pytest.raises(KeyboardInterrupt):
        store.load(keys_of(0), Ends(KeyboardInterrupt))
    assert store.statistics().working == 0
    ring = store.statistics().ring
    assert ring is not None
    assert ring.own_references == 0


def in_child(work: Callable[[], object]) -> str:
    """What ``work`` says in a forked child, which has none of our threads."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # a child that hangs dies
        try:
            os.write(writer, repr(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        words = said.read()
    os.waitpid(child, 0)
    return words


@pytest.mark.parametrize("name", CALLS)
def test_no_call_raises_in_a_forked_child(store: BlockStore, name: str) -> None:
    assert in_child(lambda: (CALLS[name](store), "went on")[1]) == "'went on'"


def test_everything_is_cancelled_in_a_forked_child(store: BlockStore) -> None:
    blocks = BufferBlocks(payloads_of(GEOMETRY, 0))

    def work() -> list[object]:
        tickets = [store.load(keys_of(0), blocks), store.save(keys_of(0), blocks), store.prefetch(keys_of(0))]
        store.close()
        return [(ticket.wait(0), int(ticket.object_results[0])) for ticket in tickets]

    assert in_child(work) == str([(True, int(ResultCode.CANCELLED))] * 3)
    assert store.load(keys_of(0), BufferBlocks(payloads_of(GEOMETRY, 5))).wait(WAIT_S)
