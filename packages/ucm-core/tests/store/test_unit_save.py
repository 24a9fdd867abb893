"""Saves by units over real files and rings: the last bytes win, after their event, or nothing is kept."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from stores import Faults, close_balanced, open_store

from ucm_core.flow.copy import BufferBlocks, Span
from ucm_core.flow.ticket import ResultCode
from ucm_core.ops import metrics
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.tiers import StoreLimits
from ucm_core.testing.block_units import ALL, EngineEvent, unit
from ucm_core.testing.objects import UNTOUCHED, WAIT_S, Bytes, FaultyBlocks, blank, keys_of, payloads_of

GEOMETRY = Geometry(4, 5000)
QUICK = StoreLimits(save_wait_s=2.0, load_wait_s=0.2)
IMPATIENT = StoreLimits(save_wait_s=2.0, load_wait_s=0.2, event_wait_s=0.1)
"""With events that are never reached."""
OK, CANCELLED = ResultCode.OK, ResultCode.CANCELLED


class HeldSource(BufferBlocks):
    """A double of engine memory that holds each gather until it is let go."""

    def __init__(self, payloads: Bytes) -> None:
        super().__init__(payloads)
        self.reading, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def gather(self, index: np.ndarray, address: np.ndarray, *, span: Span | None = None) -> None:
        self.reading.release()
        assert self.go.acquire(timeout=WAIT_S)
        super().gather(index, address, span=span)


def failed(reason: str) -> float:
    return metrics.OBJECTS_FAILED.labels(operation="save", reason=reason)._value.get()


def never_reached() -> float:
    return metrics.ERRORS.labels(where="compute_event")._value.get()


def expect(store: BlockStore, *numbers: int) -> None:
    out = blank(store.geometry, len(numbers))
    ticket = store.load(keys_of(*numbers), BufferBlocks(out))
    assert ticket.wait(WAIT_S)
    assert ticket.ok
    assert np.array_equal(out, payloads_of(store.geometry, *numbers))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    store = open_store(tmp_path, GEOMETRY, limits=QUICK)
    yield store
    close_balanced(store)


def test_a_call_waits_for_nobody(store: BlockStore) -> None:
    source = HeldSource(payloads_of(GEOMETRY, 1))
    save = store.begin_save(keys_of(1), source)
    save.submit(unit(0), ready=EngineEvent())
    save.submit(slice(1, 4))
    save.seal()
    assert not save.ticket.done
    save.abandon()
    for _ in range(9):
        source.go.release()
    assert save.ticket.wait(WAIT_S)


def test_no_earlier_bytes_land_after_later_ones(store: BlockStore) -> None:  # case C-52
    payloads = payloads_of(GEOMETRY, 8)
    source = HeldSource(payloads)
    save = store.begin_save(keys_of(1), source)
    save.submit(ALL)
    assert source.reading.acquire(timeout=WAIT_S)
    save.submit(ALL)
    save.submit(ALL)  # the one in the middle need not be gathered
    save.seal()
    assert not source.reading.acquire(timeout=0.05), "one after the other"
    source.go.release()
    assert source.reading.acquire(timeout=WAIT_S)
    payloads[:] = payloads_of(GEOMETRY, 1)
    source.go.release()
    assert save.ticket.wait(WAIT_S)
    assert not source.reading.acquire(blocking=False)
    expect(store, 1)


def test_bytes_of_before_an_event_are_not_kept(store: BlockStore) -> None:  # case C-53
    payloads, ready = payloads_of(GEOMETRY, 8), EngineEvent()
    save = store.begin_save(keys_of(1), BufferBlocks(payloads))
    save.submit(ALL, ready=ready)
    save.seal()
    assert not save.ticket.wait(0.02)
    payloads[:] = payloads_of(GEOMETRY, 1)
    ready.reach()
    assert save.ticket.wait(WAIT_S)
    expect(store, 1)


def test_a_unit_whose_event_is_never_reached_is_counted_and_keeps_nothing(tmp_path: Path) -> None:
    """C-53: and gathered before, its bytes are not the last ones."""
    store = open_store(tmp_path, GEOMETRY, limits=IMPATIENT)
    before, given_up = never_reached(), failed("cancelled")
    save = store.begin_save(keys_of(1, 2), BufferBlocks(payloads_of(GEOMETRY, 1, 2)))
    save.submit(ALL)
    save.submit(unit(2), ready=EngineEvent())
    save.seal()
    assert save.ticket.wait(WAIT_S)
    assert save.ticket.object_results.tolist() == [CANCELLED] * 2
    assert (never_reached(), failed("cancelled")) == (before + 1, given_up + 2)
    assert not store.lookup(keys_of(1, 2)).any()
    assert not store.in_flight(keys_of(1, 2)).any()
    store.close()


def test_an_event_that_is_overtaken_is_not_awaited(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY, limits=StoreLimits(event_wait_s=3600.0))
    save = store.begin_save(keys_of(1), BufferBlocks(payloads_of(GEOMETRY, 1)))
    save.submit(unit(2), ready=EngineEvent())
    save.submit(ALL)
    save.seal()
    assert save.ticket.wait(WAIT_S)
    expect(store, 1)
    store.close()


def test_an_event_that_raises_gives_the_save_up(store: BlockStore) -> None:
    class Broken:
        def wait(self, timeout_s: float | None = None) -> bool:
            raise RuntimeError("on purpose")

    save = store.begin_save(keys_of(1), BufferBlocks(payloads_of(GEOMETRY, 1)))
    save.submit(ALL, ready=Broken())
    save.seal()
    assert save.ticket.wait(WAIT_S)
    assert save.ticket.object_results.tolist() == [ResultCode.UNAVAILABLE]
    assert not store.in_flight(keys_of(1)).any()


def test_preempted_memory_is_read_no_more_once_the_ticket_is_done(store: BlockStore) -> None:  # case C-38
    pool = np.stack([payloads_of(GEOMETRY, n)[0] for n in range(6)])
    source = HeldSource(pool)
    jobs = [
        store.begin_save(keys_of(*range(4)), source),
        store.begin_save(keys_of(4, 5), BufferBlocks(pool[4:])),
    ]
    jobs[0].submit(ALL)
    assert source.reading.acquire(timeout=WAIT_S), "held in mid-copy"
    jobs[1].submit(unit(0))
    for job in jobs:
        job.abandon()
    assert jobs[1].ticket.wait(WAIT_S)
    assert not jobs[0].ticket.done, "it is being read"
    source.go.release()
    assert jobs[0].ticket.wait(WAIT_S)
    pool[[2, 5]] = payloads_of(GEOMETRY, 12, 15)  # blocks 2 and 5 are another request's now
    other = store.begin_save(keys_of(12, 15), BufferBlocks(pool[[2, 5]]))
    other.submit(ALL)
    other.seal()
    assert other.ticket.wait(WAIT_S)
    assert not store.lookup(keys_of(*range(6))).any()
    expect(store, 12, 15)
    assert store._work.wait_idle(WAIT_S)
    assert store.statistics().ring.own_references <= 2, "but what is being written"


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_what_finds_no_slot_is_gathered_whole_after_its_seal(tmp_path: Path, slots: int) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=slots, limits=QUICK)
    source = FaultyBlocks(payloads_of(GEOMETRY, 1, 2, 3))
    save = store.begin_save(keys_of(1, 2, 3), source)
    for number in range(GEOMETRY.shards):
        save.submit(unit(number))
    save.seal()
    assert save.ticket.wait_durable(WAIT_S)
    assert set(source.copied) == {0, 1, 2}
    expect(store, 1, 2, 3)
    store.close()


def test_two_saves_of_one_object_keep_it_once(store: BlockStore) -> None:
    saves = [store.begin_save(keys_of(1), BufferBlocks(payloads_of(GEOMETRY, 1))) for _ in range(2)]
    for save in reversed(saves):
        save.submit(ALL)
        save.seal()
    assert all(save.ticket.wait(WAIT_S) and save.ticket.ok for save in saves)
    expect(store, 1)


def test_the_second_keeps_what_the_first_gives_up(store: BlockStore) -> None:
    first, second = [store.begin_save(keys_of(1), BufferBlocks(payloads_of(GEOMETRY, 1))) for _ in range(2)]
    second.submit(ALL)
    second.seal()
    first.abandon()
    assert second.ticket.wait(WAIT_S)
    assert second.ticket.ok
    expect(store, 1)


def test_a_unit_save_is_one_piece_of_work_until_it_ends(store: BlockStore) -> None:
    save = store.begin_save(keys_of(1), BufferBlocks(payloads_of(GEOMETRY, 1)))
    assert store.statistics().working == 1
    save.submit(ALL)
    save.seal()
    assert save.ticket.wait_durable(WAIT_S)
    assert store._work.wait_idle(WAIT_S)


def test_a_close_keeps_what_is_sealed(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY)
    ready = EngineEvent()
    sealed, left = [store.begin_save(keys_of(n), BufferBlocks(payloads_of(GEOMETRY, n))) for n in (1, 2)]
    sealed.submit(ALL, ready=ready)
    left.submit(ALL)
    sealed.seal()
    closing = threading.Thread(target=store.close)
    closing.start()
    ready.reach()
    closing.join(WAIT_S)
    assert sealed.ticket.wait_durable(0)
    assert left.ticket.object_results.tolist() == [CANCELLED]
    later = open_store(tmp_path, GEOMETRY)
    assert later.lookup(keys_of(1, 2)).tolist() == [True, False]
    later.close()


STAGES = (
    "FileTier.stored",
    "Ring.claim",
    "Ring.addresses",
    "Ring.publish",
    "Hold.abort",
    "Hold.let_go",
    "Ring.pin",
    "Ring.wait",
    "Hold.part",
    "FileTier.write",
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_at_any_stage_loses_nothing(tmp_path: Path, stage: str) -> None:
    faults = Faults()
    store = open_store(tmp_path, GEOMETRY, slots=2, faults=faults, limits=QUICK)
    faults.broken[stage] = 1
    save = store.begin_save(keys_of(1, 2, 3), FaultyBlocks(payloads_of(GEOMETRY, 1, 2, 3), broken=[1]))
    save.submit(ALL)
    save.seal()
    assert save.ticket.wait(WAIT_S)
    save.ticket.wait_durable(WAIT_S)
    assert ResultCode.PENDING not in save.ticket.durable_results
    assert save.ticket.object_results[1] != OK
    assert store._work.wait_idle(WAIT_S), "a handle is left"
    faults.broken.clear()
    for number, code in zip((1, 2, 3), save.ticket.durable_results.tolist(), strict=True):
        assert store.lookup(keys_of(number))[0] or code != OK
    store.close()


# -- against an oracle, under anything

SUBMISSIONS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from(["none", "reached", "late", "never"])),
    max_size=8,
)


@settings(max_examples=40)
@given(
    submissions=SUBMISSIONS,
    slots=st.sampled_from([0, 1, 2, 16]),
    threads=st.integers(1, 3),
    durable=st.booleans(),
    present=st.sets(st.integers(0, 3)),
    end=st.sampled_from(["seal", "seal", "abandon", "close"]),
)
def test_any_save_keeps_the_last_bytes_or_nothing(
    submissions: list[tuple[int, int, str]],
    slots: int,
    threads: int,
    durable: bool,
    present: set[int],
    end: str,
) -> None:
    numbers = (0, 1, 2, 3)
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(
            Path(directory), GEOMETRY, slots=slots, threads=threads, durable=durable, limits=IMPATIENT
        )
        for number in present:
            store.save(keys_of(number), BufferBlocks(payloads_of(GEOMETRY, number))).wait_durable(WAIT_S)
        there = {number for number in present if store.lookup(keys_of(number))[0]}
        payloads = blank(GEOMETRY, len(numbers))
        save = store.begin_save(keys_of(*numbers), BufferBlocks(payloads))
        expired = never_reached()
        newest, late = submit_all(save, payloads, submissions, numbers)
        {"seal": save.seal, "abandon": save.abandon, "close": store.close}[end]()
        for event in late:
            event.reach()
        assert save.ticket.wait(WAIT_S)
        assume("never" in newest.values() or never_reached() == expired)  # else this machine was too slow
        save.ticket.wait_durable(WAIT_S)
        whole = end == "seal" and set(newest) == set(range(4)) and "never" not in newest.values()
        judge(store, save.ticket.object_results.tolist(), whole=whole, there=there, durable=durable)
        close_balanced(store)


def submit_all(
    save: object, payloads: Bytes, submissions: list[tuple[int, int, str]], numbers: tuple[int, ...]
) -> tuple[dict[int, str], list[EngineEvent]]:
    """Submit in order; before its last submission a shard has other bytes.

    Returns what is with the event of each shard's last submission, and the events that are still to come.
    """
    newest: dict[int, str] = {}
    late: list[EngineEvent] = []
    spans = [(begin, min(begin + count, 4), event) for begin, count, event in submissions]
    for place, (begin, end, event) in enumerate(spans):
        for shard in range(begin, end):
            if not any(low <= shard < high for low, high, _ in spans[place + 1 :]):
                payloads[:, shard] = payloads_of(GEOMETRY, *numbers)[:, shard]
            newest[shard] = event
        ready = None if event == "none" else EngineEvent()
        if event == "reached":
            ready.reach()
        if event == "late":
            late.append(ready)
        save.submit(slice(begin, end), ready=ready)
    return newest, late


def judge(store: BlockStore, codes: list[int], *, whole: bool, there: set[int], durable: bool) -> None:
    """Present objects are OK; others are kept whole, or are absent."""
    for number, code in enumerate(codes):
        if number in there or (whole and code == OK):
            assert code == OK
            out = blank(GEOMETRY, 1)
            ticket = store.load(keys_of(number), BufferBlocks(out))
            assert ticket.wait(WAIT_S)
            right = np.array_equal(out, payloads_of(GEOMETRY, number))
            assert right if ticket.ok else (out == UNTOUCHED).all()
        else:
            assert code != OK
            assert not store.lookup(keys_of(number))[0]
            assert not whole or (code == ResultCode.NO_SPACE and not durable)
