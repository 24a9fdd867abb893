"""A medium that does not answer: who gives up waits for copies of memory, never for a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import Gate, open_store

from ucm_core.flow.copy import BufferBlocks, Span, Strides
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.store import block
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.pool import Priority
from ucm_core.testing.block_units import ALL
from ucm_core.testing.objects import UNTOUCHED, WAIT_S, Bytes, FaultyBlocks, blank, keys_of, payloads_of

GEOMETRY = Geometry(3, 5000)
OK, CANCELLED = ResultCode.OK, ResultCode.CANCELLED


class HeldBlocks(BufferBlocks):
    """A double of engine memory that holds each copy in its middle until it is let go."""

    def __init__(self, payloads: Bytes) -> None:
        super().__init__(payloads)
        self.copying, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def gather(self, index: np.ndarray, address: np.ndarray, *, span: Span | None = None) -> None:
        self._hold()
        super().gather(index, address, span=span)

    def scatter(self, index: np.ndarray, address: np.ndarray, *, span: Span | None = None) -> None:
        self._hold()
        super().scatter(index, address, span=span)

    def _hold(self) -> None:
        self.copying.release()
        assert self.go.acquire(timeout=WAIT_S)


class HeldStrides:
    """Holds whoever asks plain memory how it lies, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        real = BufferBlocks.strides

        def strides(blocks: BufferBlocks, *arguments: Any, **more: Any) -> Strides:
            self.asked.set()
            assert self.go.wait(WAIT_S)
            return real(blocks, *arguments, **more)

        monkeypatch.setattr(BufferBlocks, "strides", strides)


class HungEvent:
    """A double of a compute event that hangs until it is reached."""

    def __init__(self) -> None:
        self.asked, self.reached = threading.Event(), threading.Event()

    def wait(self, timeout_s: float | None = None) -> bool:
        self.asked.set()
        return self.reached.wait(WAIT_S)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Objects 1 to 3 on the medium."""
    store = open_store(tmp_path, GEOMETRY)
    numbers = (1, 2, 3)
    assert store.save(keys_of(*numbers), BufferBlocks(payloads_of(GEOMETRY, *numbers))).wait_durable(WAIT_S)
    store.close()
    return tmp_path


@pytest.fixture
def reads() -> Iterator[Gate]:
    gate = Gate("FileTier.read")
    yield gate
    gate.opened.set()


@pytest.fixture
def writes() -> Iterator[Gate]:
    gate = Gate("FileTier.write")
    yield gate
    gate.opened.set()


def expect_cancelled(ticket: Ticket) -> None:
    """At once."""
    assert ticket.done
    assert set(ticket.object_results.tolist()) == {CANCELLED}


def answer(gate: Gate, store: BlockStore) -> None:
    """The medium does after all; then nothing is left over."""
    gate.opened.set()
    assert not store.close().unfinished
    assert store.statistics().working == 0
    ring = store.statistics().ring
    assert ring is None or ring.own_references == 0


# -- loads


@pytest.mark.parametrize("slots", [0, 16])
def test_a_load_by_units_that_is_cancelled_waits_for_no_file(root: Path, reads: Gate, slots: int) -> None:
    store = open_store(root, GEOMETRY, slots=slots, threads=1, faults=reads)
    load = store.begin_load(keys_of(1, 2, 3), BufferBlocks(out := blank(GEOMETRY, 3)))
    load.submit(ALL)
    assert reads.reached.wait(WAIT_S)
    load.cancel()
    expect_cancelled(load.ticket)
    answer(reads, store)
    assert (out == UNTOUCHED).all()


@pytest.mark.parametrize("slots", [0, 16])
def test_a_whole_load_that_is_abandoned_waits_for_no_file(root: Path, reads: Gate, slots: int) -> None:
    store = open_store(root, GEOMETRY, slots=slots, threads=1, faults=reads)
    ticket = store.load(keys_of(1, 2, 3), BufferBlocks(out := blank(GEOMETRY, 3)))
    assert reads.reached.wait(WAIT_S)
    ticket.abandon()
    expect_cancelled(ticket)
    answer(reads, store)
    assert (out == UNTOUCHED).all()


def test_hits_of_a_load_that_was_given_up_are_not_copied(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(root, GEOMETRY, threads=1)
    assert store.prefetch(keys_of(1, 2)).wait(WAIT_S)
    monkeypatch.setattr(block, "INLINE_BYTES", 0)  # what is copied on the caller's thread it cannot give up
    held, out = HeldStrides(monkeypatch), blank(GEOMETRY, 2)
    ticket = store.load(keys_of(1, 2), BufferBlocks(out))
    assert held.asked.wait(WAIT_S)
    ticket.abandon()
    expect_cancelled(ticket)
    held.go.set()
    assert not store.close().unfinished
    assert (out == UNTOUCHED).all()


def test_a_load_that_is_cancelled_waits_for_what_is_copied(root: Path) -> None:
    store = open_store(root, GEOMETRY)
    whole, by_units = HeldBlocks(blank(GEOMETRY, 1)), HeldBlocks(blank(GEOMETRY, 1))
    load = store.begin_load(keys_of(1), by_units)
    load.submit(ALL)
    ticket = store.load(keys_of(2), whole)
    assert whole.copying.acquire(timeout=WAIT_S)
    assert by_units.copying.acquire(timeout=WAIT_S)
    ticket.abandon()
    load.cancel()
    assert not ticket.done
    assert not load.ticket.done
    for blocks in (whole, by_units):
        blocks.go.release()
    assert ticket.wait(WAIT_S)
    assert load.ticket.wait(WAIT_S)
    assert ticket.ok
    store.close()


# -- saves


def test_a_sealed_save_is_abandoned_while_no_thread_answers(tmp_path: Path, writes: Gate) -> None:
    store = open_store(tmp_path, GEOMETRY, threads=1, faults=writes)
    store.save(keys_of(8), BufferBlocks(payloads_of(GEOMETRY, 8)))
    assert writes.reached.wait(WAIT_S), "the only thread"
    save = store.begin_save(keys_of(1, 2), BufferBlocks(payloads_of(GEOMETRY, 1, 2)))
    save.submit(ALL)
    save.seal()
    assert not save.ticket.done
    save.abandon()
    expect_cancelled(save.ticket)
    assert not store.in_flight(keys_of(1, 2)).any(), "its slots are free"
    answer(writes, store)
    later = open_store(tmp_path, GEOMETRY)
    assert later.lookup(keys_of(8, 1, 2)).tolist() == [True, False, False]
    later.close()


def test_a_save_is_abandoned_while_its_files_are_written(tmp_path: Path, writes: Gate) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=0, threads=1, faults=writes)
    payloads = payloads_of(GEOMETRY, 1, 2)
    save = store.begin_save(keys_of(1, 2), BufferBlocks(payloads))
    save.submit(ALL)
    save.seal()
    assert writes.reached.wait(WAIT_S)
    save.abandon()
    expect_cancelled(save.ticket)
    payloads[:] = 0  # the engine's again
    answer(writes, store)
    later = open_store(tmp_path, GEOMETRY)
    out = blank(GEOMETRY, 2)
    codes = later.load(keys_of(1, 2), BufferBlocks(out)).object_results
    assert np.array_equal(out[codes == OK], payloads_of(GEOMETRY, 1, 2)[codes == OK])
    later.close()


@pytest.mark.parametrize("slots", [0, 16])
def test_what_was_cancelled_while_it_was_gathered_is_not_kept(tmp_path: Path, slots: int) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=slots)
    source = HeldBlocks(payloads_of(GEOMETRY, 1, 2))
    ticket = store.save(keys_of(1, 2), source, gather_inline=False)
    assert source.copying.acquire(timeout=WAIT_S)
    ticket.cancel()
    assert not ticket.done
    source.go.release()
    assert ticket.wait(WAIT_S)
    assert set(ticket.object_results.tolist()) == {CANCELLED}
    store.close()
    later = open_store(tmp_path, GEOMETRY)
    assert not later.lookup(keys_of(1, 2)).any()
    later.close()


def test_what_was_cancelled_while_plain_memory_was_gathered_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, held = open_store(tmp_path, GEOMETRY), HeldStrides(monkeypatch)
    ticket = store.save(keys_of(1), BufferBlocks(payloads_of(GEOMETRY, 1)), gather_inline=False)
    assert held.asked.wait(WAIT_S)
    ticket.cancel()
    held.go.set()
    assert ticket.wait(WAIT_S)
    expect_cancelled(ticket)
    assert not store.lookup(keys_of(1)).any()
    store.close()


def test_what_was_given_up_before_it_was_gathered_is_not_read(tmp_path: Path) -> None:
    claims = Gate("Ring.claim")
    store, source = open_store(tmp_path, GEOMETRY, faults=claims), HeldBlocks(payloads_of(GEOMETRY, 1))
    source.go.release(100)
    ticket = store.save(keys_of(1), source, gather_inline=False)
    assert claims.reached.wait(WAIT_S)
    ticket.abandon()
    expect_cancelled(ticket)
    answer(claims, store)
    assert not source.copying.acquire(blocking=False), "it was read"


def test_units_that_were_given_up_before_their_event_are_not_read(tmp_path: Path) -> None:
    store, event = open_store(tmp_path, GEOMETRY), HungEvent()
    source = HeldBlocks(payloads_of(GEOMETRY, 1))
    source.go.release(100)
    save = store.begin_save(keys_of(1), source)
    save.submit(ALL, ready=event)
    assert event.asked.wait(WAIT_S)
    save.abandon()
    expect_cancelled(save.ticket)
    event.reached.set()
    assert not store.close().unfinished
    assert not source.copying.acquire(blocking=False), "they were read"


@pytest.mark.parametrize("slots", [0, 16])
def test_units_that_were_given_up_while_they_were_gathered_are_not_kept(tmp_path: Path, slots: int) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=slots)
    source = HeldBlocks(payloads_of(GEOMETRY, 1))
    save = store.begin_save(keys_of(1), source)
    save.submit(ALL)
    save.seal()
    assert source.copying.acquire(timeout=WAIT_S)
    save.abandon()
    assert not save.ticket.done, "it is being read"
    source.go.release()
    assert save.ticket.wait(WAIT_S)
    expect_cancelled(save.ticket)
    store.close()
    later = open_store(tmp_path, GEOMETRY)
    assert not later.lookup(keys_of(1)).any()
    later.close()


# -- failures are counted before a ticket says so


def counted(operation: str, reason: str) -> float:
    return metrics.OBJECTS_FAILED.labels(operation=operation, reason=reason)._value.get()


def test_whoever_hears_of_a_failure_finds_it_counted(tmp_path: Path) -> None:
    store, go = open_store(tmp_path, GEOMETRY, threads=1), threading.Event()
    store._tiers.pool.submit(Priority.LOAD, lambda: go.wait(WAIT_S) and None)
    broken = FaultyBlocks(payloads_of(GEOMETRY, 1), broken=[0])
    tickets = {
        ("load", "miss"): store.load(keys_of(9), BufferBlocks(blank(GEOMETRY, 1))),
        ("save", "invalid"): store.save(keys_of(1), broken, gather_inline=False),
    }
    before = {names: counted(*names) for names in tickets}
    seen: dict[tuple[str, str], float] = {}
    for names, ticket in tickets.items():
        ticket.add_done_callback(lambda _, names=names: seen.update({names: counted(*names)}))
    go.set()
    assert all(ticket.wait(WAIT_S) for ticket in tickets.values())
    store.close()
    assert seen == {names: count + 1 for names, count in before.items()}
