"""Closing a store while others use it, and callers that end instead of failing: nobody is left waiting."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
from models import DENSE, GRAIN, RING_BYTES, identity_of
from stores import Gate, open_store

from ucm_core.cache import Cache
from ucm_core.errors import ClosedError
from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.ops.config import CacheConfig
from ucm_core.store.block import BlockStore
from ucm_core.store.close_report import CloseReport
from ucm_core.store.files import FileTier
from ucm_core.store.geometry import Geometry
from ucm_core.store.tiers import log
from ucm_core.testing.block_store import WAIT_S, keys_of, payloads_of

GEOMETRY = Geometry(1, 4096)


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
    assert store.statistics().pins == 0


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


# -- what closing says


def save(store: BlockStore, *numbers: int) -> Ticket:
    return store.save(keys_of(*numbers), BufferBlocks(payloads_of(GEOMETRY, *numbers)))


def test_closing_waits_for_writes_and_says_what_it_kept(store: BlockStore, gate: Gate) -> None:
    gate.held = "FileTier.write"
    ticket = save(store, 1, 2)
    assert gate.reached.wait(WAIT_S)
    opening = threading.Timer(0.05, gate.opened.set)
    opening.start()
    assert store.close() == CloseReport("row", kept=2)
    assert ticket.wait_durable(0)
    opening.join()


def test_closing_says_what_the_medium_refused(store: BlockStore, gate: Gate, tmp_path: Path) -> None:
    gate.held = "FileTier.write"
    save(store, 1)
    assert gate.reached.wait(WAIT_S)
    gate.broken["FileTier.write"] = 1
    save(store, 2)
    opening = threading.Timer(0.05, gate.opened.set)
    opening.start()
    report = store.close()
    assert (report.kept, report.lost, report.unfinished) == (1, 1, 0)
    opening.join()


def test_a_close_that_cannot_wait_says_what_it_could_not_keep(
    store: BlockStore, gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write goes on afterwards, in memory that is still there."""
    failed = metrics.OBJECTS_FAILED.labels(operation="close", reason="timeout")
    before, gate.held = failed._value.get(), "FileTier.write"
    ticket = save(store, 1, 2, 3)
    assert gate.reached.wait(WAIT_S)
    caplog.set_level("WARNING", log.name)
    monkeypatch.setattr(log, "filters", [])  # the same may have been said a moment ago
    report = store.close(timeout_s=0.05)
    assert (report.kept, report.lost) == (0, 3)
    assert report.unfinished > 0
    assert failed._value.get() == before + 3
    assert "0 objects reached the medium, 3 did not" in caplog.text
    gate.opened.set()
    assert ticket.wait_durable(WAIT_S)


def test_a_cache_that_cannot_end_keeps_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that ends after the close still settles its books, under the name of its own process."""
    reached, opened, real = threading.Event(), threading.Event(), FileTier.write

    def write(tier: FileTier, *arguments: Any, **named: Any) -> Any:
        reached.set()
        assert opened.wait(WAIT_S)
        return real(tier, *arguments, **named)

    monkeypatch.setattr(FileTier, "write", write)
    config = CacheConfig(root=tmp_path, ring_bytes=RING_BYTES, disk_bytes=1 << 30)
    cache = Cache.open(config, DENSE, identity=identity_of(DENSE))
    tickets = cache.save(cache.chain(list(range(GRAIN))), models.payloads_of(DENSE, 1))
    assert reached.wait(WAIT_S)
    (report,) = cache.close(timeout_s=0.05)
    assert (report.row, report.lost) == ("full", 1)
    opened.set()
    assert tickets.wait_durable(WAIT_S)
    assert cache.close() == (report,)


# -- forks


@contextmanager
def held(*locks: threading.Condition) -> Iterator[None]:
    """Another thread holds the locks meanwhile, as one may when its process forks."""
    ready, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            ready.set()
            assert over.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_child_waits_for_no_lock_of_its_parents_threads(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY)
    ticket = save(store, 1)
    assert ticket.wait_durable(WAIT_S)
    pins = store.pin(keys_of(1))
    parts = (store._writer, store._work, store._tiers.pool, ticket)

    def work() -> str:
        for call in CALLS.values():
            call(store)
        pins.release()
        assert store.load(keys_of(1), BufferBlocks(payloads_of(GEOMETRY, 1))).wait(0)
        store.close()
        with pytest.raises(ClosedError, match="the process that forked this one"):
            ticket.wait()
        return "went on"

    with held(*(part._changed for part in parts), store._pinned._lock, store._touches._lock):
        assert in_child(work) == "'went on'"
    pins.release()
    store.close()


def test_a_donation_of_the_parent_is_cancelled_in_a_child(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=0)
    donation = store.reserve(keys_of(1)[0])
    assert donation is not None

    def work() -> int:
        return int(donation.commit().object_results[0])

    assert in_child(work) == str(int(ResultCode.CANCELLED))
    donation.abort()
    store.close()
