"""What the stores are made of: batches, chunks, books, the store that keeps nothing, rings by name."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import NAMESPACE, open_store

from ucm_core.errors import ConfigError, NoSpace
from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import Level, ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_core.store import ledger, stack
from ucm_core.store.absent import AbsentStore
from ucm_core.store.absent_tiers import NoRing
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.names import object_names
from ucm_core.store.payloads import PrivateMemory
from ucm_core.store.pool import Priority
from ucm_core.store.ring import Ring, RingOptions
from ucm_core.store.tiers import KeyBatch, StoreLimits
from ucm_core.testing.block_store import WAIT_S, FaultyBlocks, blank, keys_of, payloads_of

GEOMETRY = Geometry(3, 8192)


def path_of(root: Path, number: int) -> Path:
    return root / NAMESPACE / "row" / object_names(keys_of(number), "hx.u0-1.c0-1")[0].decode()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    store = open_store(tmp_path, GEOMETRY)
    yield store
    store.close()


def save(store: BlockStore, *numbers: int) -> Ticket:
    ticket = store.save(keys_of(*numbers), BufferBlocks(payloads_of(GEOMETRY, *numbers)))
    assert ticket.wait_durable(WAIT_S)
    return ticket


class EventBlocks(BufferBlocks):
    """A double of engine memory that is right once a kernel has run: whoever gathers waits for its event."""

    event = threading.Event()

    def gather(self, index: npt.NDArray[np.int64], address: npt.NDArray[np.int64]) -> None:
        assert self.event.wait(WAIT_S)
        super().gather(index, address)


def test_no_byte_is_taken_before_the_sources_event(store: BlockStore) -> None:  # case C-53
    memory = blank(GEOMETRY, 2)
    source = EventBlocks(memory)
    ticket = store.save(keys_of(1, 2), source, gather_inline=False)
    assert not store.lookup(keys_of(1, 2)).any()
    memory[:] = payloads_of(GEOMETRY, 1, 2)
    source.event.set()
    assert ticket.wait_durable(WAIT_S)
    out = blank(GEOMETRY, 2)
    assert store.load(keys_of(1, 2), BufferBlocks(out)).wait(WAIT_S)
    assert np.array_equal(out, memory)


def test_a_save_that_the_bound_refuses_makes_room_and_is_kept(tmp_path: Path) -> None:  # case C-59
    """Eight of ten places are taken, which starts no pass; five more want in."""
    bound = 10 * GEOMETRY.object_bytes
    store = open_store(tmp_path, GEOMETRY, capacity_bytes=bound)
    save(store, *range(8))
    assert not save(store, *range(100, 105)).durable_results.any()
    files = list(path_of(tmp_path, 0).parents[1].glob("???/*"))
    assert sum(path.stat().st_size for path in files) <= bound
    store.close()


def test_the_reserve_of_a_ring_is_for_loads(tmp_path: Path) -> None:
    """Two of 32 slots; thirty are in use."""
    writer = open_store(tmp_path, GEOMETRY)
    save(writer, *range(33))
    writer.close()
    store = open_store(tmp_path, GEOMETRY, slots=32)
    assert store.prefetch(keys_of(*range(30))).wait(WAIT_S)
    with store.pin(keys_of(*range(30))):
        prefetched = store.prefetch(keys_of(30))
        assert prefetched.wait(WAIT_S)
        assert prefetched.object_results.tolist() == [ResultCode.NO_SPACE]
        assert store.load(keys_of(31, 32), BufferBlocks(blank(GEOMETRY, 2))).wait(WAIT_S)
        assert store._tiers.ring.lookup(keys_of(30, 31, 32)).tolist() == [0, 1, 1]
    store.close()


def test_a_queued_save_that_is_cancelled_takes_and_keeps_nothing(tmp_path: Path) -> None:
    store, go = open_store(tmp_path, GEOMETRY, threads=1), threading.Event()
    store._tiers.pool.submit(Priority.LOAD, lambda: assert_set(go))
    source = FaultyBlocks(payloads_of(GEOMETRY, 1, 2))
    ticket = store.save(keys_of(1, 2), source, gather_inline=False)
    ticket.cancel()
    go.set()
    assert ticket.wait(WAIT_S)
    assert ticket.object_results.tolist() == ticket.durable_results.tolist() == [ResultCode.CANCELLED] * 2
    assert (source.copied, store.lookup(keys_of(1, 2)).any()) == ([], False)
    store.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


# -- batches


@given(st.lists(st.integers(0, 5), max_size=12), st.data())
def test_a_batch_knows_where_each_key_stands(numbers: list[int], data: st.DataObject) -> None:
    batch = KeyBatch(keys_of(*numbers))
    distinct = list(dict.fromkeys(numbers))
    assert len(batch) == len(distinct)
    assert batch.first.tolist() == [numbers.index(number) for number in distinct]
    ids = data.draw(st.lists(st.sampled_from(range(len(distinct))), unique=True)) if distinct else []
    positions, which = batch.expand(np.array(ids, dtype=np.int64))
    assert [(int(p), ids[w]) for p, w in zip(positions, which, strict=True)] == [
        (place, i) for i in ids for place, number in enumerate(numbers) if number == distinct[i]
    ]


def test_a_batch_settles_every_position_of_a_key() -> None:
    batch, ticket = KeyBatch(keys_of(7, 5, 7)), Ticket(3, durable=False)
    batch.settle(ticket, np.array([1, 0]), codes=[ResultCode.MISS, ResultCode.OK])
    assert ticket.object_results.tolist() == [ResultCode.OK, ResultCode.MISS, ResultCode.OK]


@given(st.integers(1, 8), st.integers(1, 64), st.integers(0, 200), st.integers(1, 4))
def test_chunks_are_a_partition_that_fits_the_ring(threads: int, slots: int, count: int, times: int) -> None:
    class Tiny:
        """Stands for tiers of that many slots and threads."""

        chunk_objects = max(1, slots // threads)
        pool = type("Pool", (), {"threads": threads, "copy_threads": max(1, threads // 2)})
        rank, ranks = 0, 1

    from ucm_core.store.tiers import Tiers

    chunks = list(Tiers.chunks(Tiny, count, times=times))  # type: ignore[arg-type]
    assert [i for chunk in chunks for i in chunk.tolist()] == list(range(count))
    assert all(0 < len(chunk) <= times * max(1, slots // threads) for chunk in chunks)


def test_private_memory_is_aligned_and_writable() -> None:
    memory = PrivateMemory(3, GEOMETRY.payload_bytes)
    assert (memory.addresses % 4096 == 0).all()
    assert np.diff(memory.addresses).tolist() == [GEOMETRY.payload_bytes] * 2


# -- the store that keeps nothing


def test_nothing_is_kept_and_nothing_is_found() -> None:
    store, keys = AbsentStore(GEOMETRY), keys_of(1, 2)
    counter = metrics.OBJECTS_FAILED.labels(operation="save", reason="unavailable")
    before = counter._value.get()
    source = FaultyBlocks(payloads_of(GEOMETRY, 1, 2))
    ticket = store.save(keys, source)
    assert ticket.wait(0)
    assert not ticket.wait_durable(0)
    assert ticket.object_results.tolist() == [ResultCode.UNAVAILABLE] * 2
    assert counter._value.get() == before + 2
    assert source.copied == []
    assert not store.lookup(keys).any()
    assert store.lookup_prefix(keys) == 0
    assert store.reserve(keys[0]) is None


def test_nothing_is_kept_and_nothing_found_by_units() -> None:
    store, keys = AbsentStore(GEOMETRY), keys_of(1, 2)
    blocks = FaultyBlocks(payloads_of(GEOMETRY, 1, 2))
    load, save = store.begin_load(keys, blocks), store.begin_save(keys, blocks)
    load.submit(slice(0, 1))
    save.submit(slice(0, 1))
    save.seal()
    assert load.ticket.object_results.tolist() == [ResultCode.MISS] * 2
    assert save.ticket.object_results.tolist() == [ResultCode.UNAVAILABLE] * 2
    load.cancel()
    save.abandon()
    assert blocks.copied == []


def test_every_load_of_nothing_is_a_miss() -> None:
    store, keys = AbsentStore(GEOMETRY), keys_of(1, 2)
    for ticket in (store.load(keys, BufferBlocks(blank(GEOMETRY, 2))), store.prefetch(keys)):
        assert ticket.wait(0)
        assert ticket.object_results.tolist() == [ResultCode.MISS] * 2
    with store.pin(keys) as pins:
        assert len(pins.keys) == 0
    store.touch(keys)
    store.drop(keys)
    store.check_integrity()
    store.close()
    assert store.statistics().ring is None


# -- pins


def test_what_is_pinned_is_loaded_although_all_else_is_gone(tmp_path: Path) -> None:
    """Nine blocks are promised from a ring of 12; their files vanish and 40 foreign blocks press on it."""
    store = open_store(tmp_path, GEOMETRY, slots=12)
    promised = list(range(9))
    save(store, *promised)
    with store.pin(keys_of(*promised)) as pins:
        assert len(pins.keys) == 9
        for number in promised:
            path_of(tmp_path, number).unlink()
        save(store, *range(100, 140))
        out = blank(GEOMETRY, 9)
        ticket = store.load(keys_of(*promised), BufferBlocks(out))
        assert ticket.wait(WAIT_S)
        assert ticket.ok
        assert np.array_equal(out, payloads_of(GEOMETRY, *promised))
    assert store.statistics().pins == 0
    store.close()


def test_without_pins_a_load_says_exactly_what_is_gone(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY)
    save(store, *range(9))
    store.close()
    for number in (6, 8):
        path_of(tmp_path, number).unlink()
    store = open_store(tmp_path, GEOMETRY)
    ticket = store.load(keys_of(*range(9)), BufferBlocks(blank(GEOMETRY, 9)))
    assert ticket.wait(WAIT_S)
    assert np.flatnonzero(ticket.object_results).tolist() == [6, 8]
    store.close()


def in_use(store: BlockStore) -> set[bytes]:
    return set(store.residents().in_use())


def names_of(*numbers: int) -> set[bytes]:
    return {key[:16].tobytes() for key in keys_of(*numbers)}


def test_residents_say_what_the_ring_holds_and_what_of_it_is_used(store: BlockStore) -> None:
    save(store, 1, 2, 3)
    first, second = store.pin(keys_of(1, 2)), store.pin(keys_of(2, 9))
    assert {bytes(name) for name in store.residents().names} == names_of(1, 2, 3)
    assert in_use(store) == names_of(1, 2)
    first.release()
    first.release()
    assert in_use(store) == names_of(2)
    second.release()
    assert in_use(store) == set()


def test_a_closed_store_has_no_residents(store: BlockStore) -> None:
    save(store, 1)
    store.close()
    assert not len(store.residents().names)


def test_pins_of_a_closed_store_hold_nothing(store: BlockStore) -> None:
    save(store, 1)
    pins = store.pin(keys_of(1))
    store.close()
    pins.release()
    assert len(store.pin(keys_of(1)).keys) == 0


# -- use


def test_files_are_touched_once_a_minute_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(ledger.time, "monotonic", lambda: now_s)
    touches = ledger.RecentTouches()
    assert len(touches.due(keys_of(1, 2))) == 2
    now_s += ledger.TOUCH_INTERVAL_S - 1
    assert touches.due(keys_of(1, 2, 3)).tolist() == keys_of(3).tolist()
    now_s += 1
    assert touches.due(keys_of(1, 2, 3)).tolist() == keys_of(1, 2).tolist()


def test_touches_are_remembered_in_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "TOUCH_MEMORY_KEYS", 4)
    touches = ledger.RecentTouches()
    for number in range(20):
        assert len(touches.due(keys_of(number))) == 1
    assert len(touches._last) == 4
    assert len(touches.due(keys_of(19))) == 0


def test_a_touch_reaches_the_files_of_ring_hits(store: BlockStore, tmp_path: Path) -> None:
    save(store, 1, 2)
    for number in (1, 2):
        os.utime(path_of(tmp_path, number), (0, 0))
    store.touch(keys_of(1, 5))
    store.close()
    assert path_of(tmp_path, 1).stat().st_mtime > 0
    assert path_of(tmp_path, 2).stat().st_mtime == 0


def test_what_only_files_hold_is_touched_too_and_once(store: BlockStore, tmp_path: Path) -> None:
    save(store, 1)
    store._tiers.ring.drop(keys_of(1))
    os.utime(path_of(tmp_path, 1), (0, 0))
    store.touch(keys_of(1))
    assert store._work.wait_idle(WAIT_S)
    assert path_of(tmp_path, 1).stat().st_mtime > 0
    os.utime(path_of(tmp_path, 1), (0, 0))
    store.touch(keys_of(1))
    store.close()
    assert path_of(tmp_path, 1).stat().st_mtime == 0


def test_lookups_are_counted_by_where_they_were_found(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY)
    save(store, 1, 2)
    store.close()
    store = open_store(tmp_path, GEOMETRY)
    assert store.prefetch(keys_of(1)).wait(WAIT_S)
    counters = {tier: metrics.LOOKUPS.labels(row="row", tier=tier) for tier in ("ring", "file", "absent")}
    before = {tier: counter._value.get() for tier, counter in counters.items()}
    store.lookup(keys_of(1, 2, 3, 4))
    grown = {tier: counter._value.get() - before[tier] for tier, counter in counters.items()}
    assert grown == {"ring": 1, "file": 1, "absent": 2}
    store.close()


def test_a_synced_save_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY, limits=StoreLimits(sync=True))
    assert save(store, 1).level is Level.SYNCED
    assert save(store, 1).level is Level.ON_MEDIUM
    store.close()


def test_a_ring_copy_without_a_file_is_written_by_the_next_save(store: BlockStore, tmp_path: Path) -> None:
    save(store, 1)
    path_of(tmp_path, 1).unlink()
    source = FaultyBlocks(payloads_of(GEOMETRY, 1))
    assert store.save(keys_of(1), source).wait_durable(WAIT_S)
    assert source.copied == []
    assert path_of(tmp_path, 1).stat().st_size == GEOMETRY.object_bytes


def test_equal_payloads_give_equal_files_whatever_the_slot_held_before(tmp_path: Path) -> None:
    geometry = Geometry(2, 5000)
    store = open_store(tmp_path, geometry, slots=1)
    ring = store._tiers.ring
    slots = ring.claim(keys_of(9)).slots
    ctypes.memset(int(ring.addresses(slots)[0]), 0xFF, geometry.payload_bytes)
    ring.abort(slots)
    assert store.save(keys_of(1), BufferBlocks(payloads_of(geometry, 1))).wait_durable(WAIT_S)
    store.close()
    shards = np.frombuffer(path_of(tmp_path, 1).read_bytes()[4096:], dtype=np.uint8).reshape(
        2, geometry.stride
    )
    assert np.array_equal(shards[:, :5000], payloads_of(geometry, 1)[0])
    assert not shards[:, 5000:].any()


# -- rings by name

FULL = SpecRow("full", RowKind.CHAIN, 16, (0,), (Part("k", (1, 8), "uint8"),))
SIDE = SpecRow("side", RowKind.FOLLOWER, 16, (0,), (Part("s", (1,), "uint8"),), follows="full")
NONE = SpecRow("cross", RowKind.NONE, 16, (1,), (Part("k", (1, 8), "uint8"),))


def test_ring_names_are_injective(tmp_path: Path) -> None:
    arguments = [("r", "ab", "c", "d"), ("r", "a", "bc", "d"), ("r", "a", "b", "cd"), ("ra", "b", "c", "d")]
    names = {
        stack.ring_name(tmp_path / root, space, row=row, segment=seg) for root, space, row, seg in arguments
    }
    assert len(names) == 4
    assert all(len(name) == 16 for name in names)


def test_a_linked_root_has_the_ring_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    names = {stack.ring_name(tmp_path / root, "n", row="r", segment="s") for root in ("root", "link")}
    assert len(names) == 1


def test_rows_that_are_never_cached_have_no_plan() -> None:
    plans = stack.plan_rows(SpecTable((FULL, SIDE, NONE), 16), 1 << 20)
    assert set(plans) == {"full", "side"}
    assert plans["full"][0].segment == "hx.u0-1.c0-1"


def test_a_follower_has_the_keys_of_its_source() -> None:
    seeds = stack.key_seeds(SpecTable((FULL, SIDE, NONE), 16), bytes(32))
    assert seeds["side"] == seeds["full"]
    assert "cross" not in seeds


def test_a_row_without_room_for_a_ring_joins_one_that_lives(caplog: pytest.LogCaptureFixture) -> None:
    (plan,) = stack.plan_rows(SpecTable((FULL,), 16), 1 << 20)["full"]
    late = replace(plan, slots=0)
    name, options = f"test-{os.getpid()}", RingOptions()
    assert isinstance(stack._join_ring(name, late, options), NoRing)
    assert caplog.text.count("row full has no ring") == 1
    with stack._open_ring(name, plan, options) as ring:
        joined = stack._join_ring(name, late, options)
        assert isinstance(joined, Ring)
        assert joined.slots == ring.slots
        joined.close()
        assert isinstance(stack._join_ring(name, replace(late, joins=False), options), NoRing)
    assert caplog.text.count("has no ring") == 1, "who wants none is not warned"


@pytest.mark.parametrize(("ring_bytes", "joins"), [(0, False), (1 << 20, True), (None, True)])
def test_who_wants_no_ring_joins_none(ring_bytes: int | None, joins: bool) -> None:
    (plan,) = stack.plan_rows(SpecTable((FULL,), 16), ring_bytes)["full"]
    assert plan.joins == joins
    assert (plan.slots == 0) == (ring_bytes == 0)


def test_without_shared_memory_the_ring_is_private(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Ring.open

    def refuse(name: str | None, **sizes: object) -> Ring:
        if name is not None:
            raise NoSpace("shared memory is full")
        return real(name, **sizes)  # type: ignore[arg-type]

    monkeypatch.setattr(stack.Ring, "open", refuse)
    (plan,) = stack.plan_rows(SpecTable((FULL,), 16), 1 << 20)["full"]
    refused = metrics.ERRORS.labels(where="ring")._value.get()
    ring = stack._open_ring("0" * 16, plan, RingOptions(policy="sieve"))
    assert metrics.ERRORS.labels(where="ring")._value.get() == refused + 1
    assert ring.statistics().policy == "sieve"
    assert ring.slots >= 8
    assert "row full: no shared ring, this process uses a private one: shared memory is full" in caplog.text
    ring.close()


def test_a_bound_of_files_below_one_object_of_each_row_is_refused() -> None:
    table = SpecTable((FULL, SIDE, NONE), 16)
    least = sum(plan.geometry.object_bytes for (plan,) in stack.plan_rows(table, 1 << 20).values())
    for fits in (None, 0, least):
        stack.plan_rows(table, 1 << 20, disk_bytes=fits)
    with pytest.raises(ConfigError, match=rf"disk_bytes = {least - 1} is too small.* needs {least};"):
        stack.plan_rows(table, 1 << 20, disk_bytes=least - 1)
