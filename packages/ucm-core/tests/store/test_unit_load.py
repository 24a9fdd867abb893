"""Loads by units over real files and rings: only what is submitted, only right bytes, all failures named."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import NAMESPACE, Faults, Gate, close_balanced, open_store

from ucm_core.flow.copy import BufferBlocks, Span
from ucm_core.flow.ticket import ResultCode
from ucm_core.ops import metrics
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import PAGE_BYTES, Geometry
from ucm_core.store.names import object_names
from ucm_core.store.pool import Priority
from ucm_core.store.tiers import StoreLimits
from ucm_core.testing.block_units import ALL, unit
from ucm_core.testing.objects import UNTOUCHED, WAIT_S, FaultyBlocks, blank, keys_of, payloads_of

GEOMETRY = Geometry(5, 5000)
ONE = Geometry(1, 5000)
LARGE = Geometry(4, 200 << 10)
"""Two of its shards are one read."""
QUICK = StoreLimits(save_wait_s=0.05, load_wait_s=0.1)
OK, MISS, CORRUPT = ResultCode.OK, ResultCode.MISS, ResultCode.CORRUPT


def path_of(root: Path, number: int) -> Path:
    return root / NAMESPACE / "row" / object_names(keys_of(number), "hx.u0-1.c0-1")[0].decode()


def fill(root: Path, *numbers: int, geometry: Geometry = GEOMETRY) -> Path:
    """Objects on the medium."""
    store = open_store(root, geometry)
    ticket = store.save(keys_of(*numbers), BufferBlocks(payloads_of(geometry, *numbers)))
    assert ticket.wait_durable(WAIT_S)
    store.close()
    return root


def damage(root: Path, number: int, shard: int, geometry: Geometry = GEOMETRY) -> None:
    """Turn one bit of a shard around."""
    with path_of(root, number).open("r+b") as file:
        file.seek(PAGE_BYTES + shard * geometry.stride)
        old = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([old ^ 1]))


def check(out: np.ndarray, codes: np.ndarray, *numbers: int, geometry: Geometry = GEOMETRY) -> None:
    """OK shards have their own bytes, all others were not written."""
    right = np.where((codes == OK)[..., None], payloads_of(geometry, *numbers), np.uint8(UNTOUCHED))
    assert np.array_equal(out, right)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fill(tmp_path, 1, 2, 3)


@pytest.fixture
def store(root: Path) -> Iterator[BlockStore]:
    store = open_store(root, GEOMETRY, limits=QUICK)
    yield store
    close_balanced(store)


def test_only_submitted_units_are_written(store: BlockStore) -> None:
    out = blank(GEOMETRY, 2)
    load = store.begin_load(keys_of(1, 2), BufferBlocks(out))
    load.submit(slice(1, 3))
    assert load.ticket.wait(WAIT_S, shard=1)
    assert load.ticket.wait(WAIT_S, shard=2)
    assert (load.ticket.results[:, [0, 3, 4]] == ResultCode.PENDING).all()
    check(out, load.ticket.results, 1, 2)
    load.cancel()
    assert load.ticket.wait(WAIT_S)
    check(out, load.ticket.results, 1, 2)


def test_what_is_read_for_a_load_is_in_the_ring_for_all(store: BlockStore, root: Path) -> None:
    load = store.begin_load(keys_of(1, 2), BufferBlocks(blank(GEOMETRY, 2)))
    load.submit(ALL)
    assert load.ticket.wait(WAIT_S)
    path_of(root, 1).unlink()
    assert store.load(keys_of(1), BufferBlocks(blank(GEOMETRY, 1))).wait(WAIT_S)
    assert store.lookup(keys_of(1, 2)).all()


def test_damaged_units_are_named_exactly(root: Path) -> None:  # case C-35
    damage(root, 2, shard=3)
    path_of(root, 3).unlink()
    store = open_store(root, GEOMETRY)
    out = blank(GEOMETRY, 3)
    load = store.begin_load(keys_of(1, 2, 3), BufferBlocks(out))
    load.submit(ALL)
    assert load.ticket.wait(WAIT_S)
    assert load.ticket.results.tolist() == [[OK] * 5, [MISS, MISS, MISS, CORRUPT, MISS], [MISS] * 5]
    check(out, load.ticket.results, 1, 2, 3)
    store.close()


def test_units_before_the_damaged_one_may_be_there_already(tmp_path: Path) -> None:  # case C-35
    damage(fill(tmp_path, 1, 2, geometry=LARGE), 1, shard=2, geometry=LARGE)
    gate = Gate()
    store = open_store(tmp_path, LARGE, threads=1, faults=gate)
    out = blank(LARGE, 2)
    load = store.begin_load(keys_of(1, 2), BufferBlocks(out))
    load.submit(slice(0, 3))
    assert load.ticket.wait(WAIT_S, shard=2)  # two threads read: the last unit could have been there first
    load.submit(ALL)
    assert load.ticket.wait(WAIT_S)
    codes = load.ticket.results.tolist()
    assert codes[1] == [OK] * 4
    assert codes[0][2:] == [CORRUPT, MISS]
    check(out, load.ticket.results, 1, 2, geometry=LARGE)
    store.close()


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_what_has_no_slot_comes_past_the_ring(root: Path, slots: int) -> None:
    store = open_store(root, GEOMETRY, slots=slots, limits=QUICK)
    out = blank(GEOMETRY, 3)
    load = store.begin_load(keys_of(1, 2, 3), BufferBlocks(out))
    for number in (4, 0):
        load.submit(unit(number))
        assert load.ticket.wait(WAIT_S, shard=number)
    check(out, load.ticket.results, 1, 2, 3)
    load.submit(ALL)
    assert load.ticket.wait(WAIT_S)
    assert load.ticket.ok
    check(out, load.ticket.results, 1, 2, 3)
    store.close()


def test_a_load_past_the_ring_without_memory_fails_and_ends(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("ucm_core.store.unit_load.PrivateMemory", refuse)
    store = open_store(root, GEOMETRY, slots=0, limits=QUICK)
    load = store.begin_load(keys_of(1, 2), BufferBlocks(blank(GEOMETRY, 2)))
    load.submit(ALL)
    assert load.ticket.wait(WAIT_S)
    assert (load.ticket.object_results == ResultCode.UNAVAILABLE).all()
    store.close()


def test_a_slot_that_somebody_fills_is_awaited_by_unit(root: Path) -> None:
    store = open_store(root, GEOMETRY, threads=1)  # it waits 10 seconds for others
    save = store.begin_save(keys_of(7), BufferBlocks(payloads_of(GEOMETRY, 7)))
    load = store.begin_load(keys_of(7, 1), BufferBlocks(out := blank(GEOMETRY, 2)))
    load.submit(ALL)
    save.submit(ALL)
    save.seal()
    assert load.ticket.wait(WAIT_S)
    assert load.ticket.ok
    check(out, load.ticket.results, 7, 1)
    store.close()


class TestObjectsOfOneUnit:
    """All of an object is one shard: to ask for it is to ask for everything."""

    @pytest.mark.parametrize("slots", [0, 1, 2])
    def test_they_come_past_the_ring(self, tmp_path: Path, slots: int) -> None:
        store = open_store(fill(tmp_path, 1, 2, 3, geometry=ONE), ONE, slots=slots, limits=QUICK)
        self.load_all(store)

    @pytest.mark.parametrize("chunk", [32 << 20, 1])
    def test_they_come_out_of_the_ring(
        self, tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(fill(tmp_path, 1, 2, 3, geometry=ONE), ONE)
        assert store.prefetch(keys_of(1, 2, 3)).wait(WAIT_S)
        monkeypatch.setattr("ucm_core.store.unit_load.CHUNK_BYTES", chunk)
        self.load_all(store)

    def test_they_are_awaited(self, tmp_path: Path) -> None:
        store = open_store(fill(tmp_path, 1, geometry=ONE), ONE, threads=1)  # it waits 10 seconds for others
        save = store.begin_save(keys_of(7), BufferBlocks(payloads_of(ONE, 7)))
        load = store.begin_load(keys_of(7, 1), BufferBlocks(out := blank(ONE, 2)))
        load.submit(unit(0))
        save.submit(ALL)
        save.seal()
        assert load.ticket.wait(WAIT_S)
        assert load.ticket.ok
        check(out, load.ticket.results, 7, 1, geometry=ONE)
        store.close()

    def load_all(self, store: BlockStore) -> None:
        load = store.begin_load(keys_of(1, 2, 3), BufferBlocks(out := blank(ONE, 3)))
        load.submit(unit(0))
        assert load.ticket.wait(WAIT_S)
        assert load.ticket.ok
        check(out, load.ticket.results, 1, 2, 3, geometry=ONE)
        store.close()


@pytest.mark.parametrize("ends", ["abandon", "never"])
def test_a_slot_that_nobody_fills_is_not_awaited_for_ever(store: BlockStore, ends: str) -> None:
    save = store.begin_save(keys_of(7), BufferBlocks(payloads_of(GEOMETRY, 7)))
    load = store.begin_load(keys_of(7, 1), BufferBlocks(blank(GEOMETRY, 2)))
    load.submit(ALL)
    if ends == "abandon":
        save.abandon()
    assert load.ticket.wait(WAIT_S)
    assert load.ticket.results.tolist() == [[MISS] * 5, [OK] * 5]
    save.abandon()


def test_two_loads_share_one_read(root: Path) -> None:
    gate = Gate("FileTier.read")
    store = open_store(root, GEOMETRY, faults=gate)
    outs = [blank(GEOMETRY, 1) for _ in range(2)]
    loads = [store.begin_load(keys_of(1), BufferBlocks(out)) for out in outs]
    for load in loads:
        load.submit(ALL)
    assert gate.reached.wait(WAIT_S)
    path = path_of(root, 1)
    path.rename(path.with_suffix(".held"))
    path.with_suffix(".held").rename(path)
    gate.opened.set()
    for load, out in zip(loads, outs, strict=True):
        assert load.ticket.wait(WAIT_S)
        assert load.ticket.ok
        check(out, load.ticket.results, 1)
    store.close()


def test_the_most_urgent_unit_goes_first_over_all_loads(root: Path) -> None:
    store, go, order = open_store(root, GEOMETRY, threads=1), threading.Event(), []
    assert store.prefetch(keys_of(1, 2, 3)).wait(WAIT_S)
    store._tiers.pool.submit(Priority.COPY, lambda: go.wait(WAIT_S) and None, rank=-1)
    loads = [store.begin_load(keys_of(number), _Noting(order, number)) for number in (1, 2, 3)]
    for load, urgency in zip(loads, (5, 2, 9), strict=True):
        load.submit(unit(0), urgency=urgency)
    go.set()
    assert all(load.ticket.wait(WAIT_S, shard=0) for load in loads)
    assert order == [2, 1, 3]
    store.close()
    assert all(load.ticket.done for load in loads)


class _Noting(BufferBlocks):
    """A double of engine memory that notes in which order it is written."""

    def __init__(self, order: list[int], number: int) -> None:
        super().__init__(blank(GEOMETRY, 1))
        self._order, self._number = order, number

    def scatter(self, index: np.ndarray, address: np.ndarray, *, span: Span | None = None) -> None:
        self._order.append(self._number)
        super().scatter(index, address, span=span)


class TestWhatTheRingHolds:
    """Copies that wait for no medium: neighbours go together, and a small load at once."""

    def test_as_many_go_together_as_one_piece_of_work_copies(
        self, store: BlockStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert store.prefetch(keys_of(1, 2)).wait(WAIT_S)
        stride = 2 * GEOMETRY.stride  # of both objects
        sizes = [(5 * stride, 0, 5), (5 * stride - 1, 99 * stride, 4), (0, 4 * stride - 1, 3), (0, 0, 1)]
        for small, copied, together in sizes:
            monkeypatch.setattr("ucm_core.store.unit_load.CHUNK_BYTES", max(1, small))
            monkeypatch.setattr("ucm_core.store.unit_load.TOGETHER_BYTES", copied)
            load = store.begin_load(keys_of(1, 2), BufferBlocks(blank(GEOMETRY, 2)))
            assert (load.together, load.small) == (together, small == 5 * stride), (small, copied)
            load.cancel()

    def test_each_goes_alone_where_one_object_is_not_there(self, store: BlockStore) -> None:
        assert store.prefetch(keys_of(1, 2)).wait(WAIT_S)
        for numbers in ((1, 2, 3), (1, 7)):
            load = store.begin_load(keys_of(*numbers), BufferBlocks(blank(GEOMETRY, len(numbers))))
            assert (load.together, load.small) == (1, False)
            load.cancel()

    @pytest.mark.parametrize("numbers", [(1, 2), (1, 2, 1)])
    def test_all_of_a_small_load_is_there_when_the_call_returns(
        self, store: BlockStore, numbers: tuple[int, ...]
    ) -> None:
        assert store.prefetch(keys_of(1, 2)).wait(WAIT_S)
        target = _Where(blank(GEOMETRY, len(numbers)))
        load = store.begin_load(keys_of(*numbers), target)
        load.submit(ALL, here=True)
        assert load.ticket.done
        assert load.ticket.ok
        assert target.threads == {threading.current_thread()}
        check(target.payloads, load.ticket.results, *numbers)

    def test_a_large_load_and_one_that_is_not_asked_for_here_are_copied_by_others(
        self, store: BlockStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert store.prefetch(keys_of(1, 2)).wait(WAIT_S)
        for chunk, here in ((32 << 20, False), (GEOMETRY.stride, True)):
            monkeypatch.setattr("ucm_core.store.unit_load.CHUNK_BYTES", chunk)
            load = store.begin_load(keys_of(1, 2), target := _Where(blank(GEOMETRY, 2)))
            load.submit(ALL, here=here)
            assert load.ticket.wait(WAIT_S)
            assert threading.current_thread() not in target.threads
            check(target.payloads, load.ticket.results, 1, 2)

    def test_a_part_is_copied_here_too(self, store: BlockStore) -> None:
        assert store.prefetch(keys_of(1, 2)).wait(WAIT_S)
        load = store.begin_load(keys_of(1, 2), target := _Where(blank(GEOMETRY, 2)))
        load.submit(slice(1, 3), here=True)
        assert (load.ticket.results[:, 1:3] == OK).all()
        load.submit(ALL, here=True)
        assert load.ticket.ok
        assert target.threads == {threading.current_thread()}
        check(target.payloads, load.ticket.results, 1, 2)

    def test_a_target_that_raises_is_told_object_by_object(self, store: BlockStore) -> None:
        assert store.prefetch(keys_of(1, 2)).wait(WAIT_S)
        load = store.begin_load(keys_of(1, 2), FaultyBlocks(out := blank(GEOMETRY, 2), {1}))
        load.submit(ALL, here=True)
        assert load.ticket.object_results.tolist() == [OK, ResultCode.INVALID]
        check(out, load.ticket.results, 1, 2)

    def test_what_was_cancelled_or_revoked_is_not_copied(self, store: BlockStore) -> None:
        assert store.prefetch(keys_of(1, 2)).wait(WAIT_S)
        for end in ("cancel", "revoke"):
            load = store.begin_load(keys_of(1, 2), BufferBlocks(out := blank(GEOMETRY, 2)))
            load.cancel() if end == "cancel" else store.revoke()
            load.submit(ALL, here=True)
            assert load.ticket.wait(WAIT_S)
            assert (load.ticket.results == ResultCode.CANCELLED).all()
            check(out, load.ticket.results, 1, 2)


class _Where(BufferBlocks):
    """A double of engine memory that notes which threads write to it."""

    def __init__(self, payloads: np.ndarray) -> None:
        super().__init__(payloads)
        self.threads: set[threading.Thread] = set()

    def scatter(self, index: np.ndarray, address: np.ndarray, *, span: Span | None = None) -> None:
        self.threads.add(threading.current_thread())
        super().scatter(index, address, span=span)


def test_failures_are_counted_once_per_object(root: Path) -> None:
    damage(root, 2, shard=1)
    store = open_store(root, GEOMETRY)
    counter = metrics.OBJECTS_FAILED.labels(operation="load", reason="corrupt")
    before = counter._value.get()
    load = store.begin_load(keys_of(1, 2), BufferBlocks(blank(GEOMETRY, 2)))
    load.submit(unit(0))
    load.submit(ALL)
    assert load.ticket.wait(WAIT_S)
    assert counter._value.get() == before + 1
    store.close()


STAGES = (
    "Ring.claim",
    "Ring.addresses",
    "FileTier.read",
    "Ring.publish_shards",
    "Hold.abort",
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_fault_at_any_stage_loses_nothing(root: Path, stage: str, threads: int) -> None:  # case C-35
    faults = Faults()
    damage(root, 2, shard=1)
    store = open_store(root, GEOMETRY, faults=faults, threads=threads)
    faults.broken[stage] = 1
    load = store.begin_load(keys_of(1, 2, 3), BufferBlocks(out := blank(GEOMETRY, 3)))
    load.submit(ALL)
    assert load.ticket.wait(WAIT_S)
    check(out, load.ticket.results, 1, 2, 3)
    assert load.ticket.object_results[1] != OK
    assert store._work.wait_idle(WAIT_S), "a handle is left"
    faults.broken.clear()
    again = store.load(keys_of(1, 3), BufferBlocks(blank(GEOMETRY, 2)))
    assert again.wait(WAIT_S)
    store.close()


def test_a_load_while_every_thread_waits_for_its_reads(root: Path) -> None:
    """What is owned is read by a thread that waits for nobody, so a whole load cannot starve it."""
    store = open_store(root, GEOMETRY, threads=1)
    busy, go = threading.Event(), threading.Event()
    store._tiers.pool.submit(Priority.LOAD, lambda: (busy.set(), go.wait(WAIT_S), None)[2])
    assert busy.wait(WAIT_S)
    load = store.begin_load(keys_of(1), BufferBlocks(blank(GEOMETRY, 1)))
    assert store._tiers.ring.wait(*_slot_of(store, 1), timeout_s=WAIT_S).tolist() == [1]
    go.set()
    load.submit(ALL)
    assert load.ticket.wait(WAIT_S)
    assert load.ticket.ok
    store.close()


def _slot_of(store: BlockStore, number: int) -> tuple[np.ndarray, np.ndarray]:
    claims = store._tiers.ring.pin(keys_of(number))
    store._tiers.ring.release(claims.slots)
    return claims.slots, claims.version


# -- against an oracle, under anything

STATES = st.sampled_from(["absent", "file", "ring", "both", "damaged"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 4), st.integers(1, 5)),
        st.tuples(st.just("cancel"), st.integers(0, 2)),
        st.tuples(st.just("evict"), st.integers(20, 24)),
        st.tuples(st.just("wait"), st.integers(0, 4)),
    ),
    max_size=12,
)


@settings(max_examples=40)
@given(
    states=st.lists(STATES, min_size=1, max_size=6),
    slots=st.sampled_from([0, 1, 2, 4, 16]),
    threads=st.integers(1, 3),
    broken=st.sets(st.integers(0, 5), max_size=1),
    steps=STEPS,
)
def test_any_load_brings_right_bytes_or_says_why_not(
    states: list[str], slots: int, threads: int, broken: set[int], steps: list[tuple[object, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        fill(Path(directory), *range(len(states)), 90)
        store = open_store(Path(directory), GEOMETRY, slots=slots, threads=threads, limits=QUICK)
        numbers = [*range(len(states)), 0]  # the first twice
        for number, state in enumerate(states):
            prepare(store, Path(directory), number, state)
        out = blank(GEOMETRY, len(numbers))
        load = store.begin_load(keys_of(*numbers), FaultyBlocks(out, broken))
        submitted = play(store, load, steps)
        codes = load.ticket.results
        assert not (codes[:, sorted(set(range(5)) - submitted)] == OK).any(), "not submitted, but brought"
        load.submit(ALL)
        assert load.ticket.wait(WAIT_S)
        check(out, load.ticket.results, *numbers)
        judge(states, load.ticket.object_results.tolist(), broken, cancelled=load.ticket.cancelled)
        close_balanced(store)


def prepare(store: BlockStore, root: Path, number: int, state: str) -> None:
    """Bring an object into a state; it is on the medium."""
    if state in {"ring", "both"}:
        assert store.prefetch(keys_of(number)).wait(WAIT_S)
    if state in {"absent", "ring"}:
        path_of(root, number).unlink()
    if state == "damaged":
        damage(root, number, shard=number % 5)


def play(store: BlockStore, load: object, steps: list[tuple[object, ...]]) -> set[int]:
    """Do the steps; the shards that were submitted."""
    submitted: set[int] = set()
    for name, *values in steps:
        if name == "submit":
            begin, count = values
            end = min(begin + count, 5)
            load.submit(slice(begin, end), urgency=count)
            submitted |= set(range(begin, end))
        elif name == "cancel" and values[0] == 0:
            load.cancel()
        elif name == "evict":
            store.save(keys_of(values[0]), BufferBlocks(payloads_of(GEOMETRY, values[0])))
        elif name == "wait" and values[0] in submitted:
            assert load.ticket.wait(WAIT_S, shard=values[0])
    return submitted


def judge(states: list[str], codes: list[int], broken: set[int], *, cancelled: bool) -> None:
    """What each object may have ended with."""
    right = {"absent": {MISS}, "file": {OK}, "ring": {OK, MISS}, "both": {OK}, "damaged": {CORRUPT}}
    for place, (state, code) in enumerate(zip([*states, states[0]], codes, strict=True)):
        allowed = set(right[state])
        if place in broken and code == ResultCode.INVALID:
            continue
        if cancelled:
            allowed.add(ResultCode.CANCELLED)
        assert code in allowed, (place, state, ResultCode(code).name)
