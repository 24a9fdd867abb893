"""Faults at every stage that a load or a save passes through: no failure is lost, no wrong byte delivered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from stores import NAMESPACE, Faults, open_store

from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import Level, ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.names import object_names
from ucm_core.store.tiers import StoreLimits
from ucm_core.testing.block_store import UNTOUCHED, WAIT_S, FaultyBlocks, blank, keys_of, payloads_of

GEOMETRY = Geometry(3, 8192)
SEGMENT = "hx.u0-1.c0-1"
QUICK = StoreLimits(save_wait_s=0.05, load_wait_s=0.2)
FIVE = (0, 1, 2, 3, 4)

LOAD_STAGES = (
    "Ring.lookup",
    "Ring.hold",
    "Ring.pin",
    "Ring.claim",
    "Ring.addresses",
    "FileTier.read",
    "Hold.publish",
    "Hold.abort",
    "Ring.wait",
    "Hold.let_go",
)
SAVE_STAGES = (
    "FileTier.stored",
    "Ring.hold",
    "Ring.claim",
    "Ring.addresses",
    "Hold.publish",
    "Hold.abort",
    "Ring.wait",
    "Hold.part",
    "FileTier.write",
    "Hold.let_go",
)


def path_of(root: Path, number: int) -> Path:
    return root / NAMESPACE / "row" / object_names(keys_of(number), SEGMENT)[0].decode()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Five objects on the medium; unit 3 has half its bytes, unit 1 another key's payload."""
    store = open_store(tmp_path, GEOMETRY)
    assert store.save(keys_of(*FIVE, 99), BufferBlocks(payloads_of(GEOMETRY, *FIVE, 99))).wait_durable(WAIT_S)
    store.close()
    path_of(tmp_path, 1).write_bytes(path_of(tmp_path, 99).read_bytes())
    with path_of(tmp_path, 3).open("r+b") as file:
        file.truncate(GEOMETRY.object_bytes // 2)
    return tmp_path


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def store(stored: Path, faults: Faults) -> Iterator[BlockStore]:
    store = open_store(stored, GEOMETRY, threads=1, limits=QUICK, faults=faults)
    yield store
    faults.broken.clear()
    store.check_integrity()
    store.close()


def load(store: BlockStore, *numbers: int) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Into a target with code of its own, so that no stage is left out."""
    out = blank(GEOMETRY, len(numbers))
    ticket = store.load(keys_of(*numbers), FaultyBlocks(out))
    assert ticket.wait(WAIT_S)
    return out, ticket.object_results.tolist()


def check_delivery(out: npt.NDArray[np.uint8], codes: list[int]) -> set[int]:
    """Delivered objects have their own bytes, failed ones were not written; returns the failed."""
    right = payloads_of(GEOMETRY, *FIVE)
    for number, code in enumerate(codes):
        assert (
            np.array_equal(out[number], right[number])
            if code == ResultCode.OK
            else (out[number] == UNTOUCHED).all()
        )
    return {number for number, code in enumerate(codes) if code != ResultCode.OK}


def test_failed_units_are_named_exactly(store: BlockStore) -> None:  # case C-35
    out, codes = load(store, *FIVE)
    assert check_delivery(out, codes) == {1, 3}
    assert codes[1] == codes[3] == ResultCode.CORRUPT
    assert load(store, *FIVE)[1] == [0, ResultCode.MISS, 0, ResultCode.MISS, 0]


@pytest.mark.parametrize("stage", LOAD_STAGES)
def test_a_fault_at_any_stage_of_a_load_loses_nothing(store: BlockStore, faults: Faults, stage: str) -> None:
    """C-35: what the files lack is named whatever else fails, and no wrong byte comes."""
    faults.broken[stage] = 1
    out, codes = load(store, *FIVE)
    failed = check_delivery(out, codes)
    assert failed == {1, 3} if stage in {"Ring.lookup", "Ring.wait"} else failed >= {1, 3}
    faults.broken.clear()
    assert check_delivery(*load(store, *FIVE)) == {1, 3}


def test_a_fault_while_hits_are_copied_at_once_fails_what_is_not_copied(
    store: BlockStore, faults: Faults
) -> None:
    assert load(store, 0, 2, 4)[1] == [ResultCode.OK] * 3
    for stage, failed in {
        "Ring.lookup": set(),
        "Ring.pin": {0, 1, 2},
        "Ring.addresses": {0, 1, 2},
        "Hold.let_go": set(),
    }.items():
        faults.broken[stage] = 1
        codes = load(store, 0, 2, 4)[1]
        assert {place for place, code in enumerate(codes) if code != ResultCode.OK} == failed


def test_a_fault_of_the_shortest_way_is_gone_around(store: BlockStore, faults: Faults) -> None:
    """Where the one native call fails that copies a whole batch, the long way is gone."""
    faults.broken.update({"Ring.scatter": 1, "Ring.gather": 1})
    payloads = payloads_of(GEOMETRY, 5, 6)
    assert store.save(keys_of(5, 6), BufferBlocks(payloads)).wait_durable(WAIT_S)
    assert store.load(keys_of(5, 6), BufferBlocks(out := blank(GEOMETRY, 2))).wait(WAIT_S)
    assert np.array_equal(out, payloads)
    assert not any(faults.broken.values())


def test_every_stage_of_a_load_has_its_fault(store: BlockStore, faults: Faults) -> None:  # case C-35
    load(store, *FIVE)
    load(store, *FIVE)
    assert store._work.wait_idle(WAIT_S)
    assert faults.seen == set(LOAD_STAGES)


@pytest.mark.parametrize("stage", ["FileTier.read", "Ring.claim"])
def test_a_fault_of_a_common_stage_fails_all_five(store: BlockStore, faults: Faults, stage: str) -> None:
    """C-35: all five where the stage is common to them."""
    faults.broken[stage] = 1
    assert check_delivery(*load(store, *FIVE)) == set(FIVE)


def test_a_ring_without_room_is_gone_around(stored: Path) -> None:
    store = open_store(stored, GEOMETRY, slots=1, threads=4)
    assert check_delivery(*load(store, *FIVE)) == {1, 3}
    store.close()


def test_a_batch_is_served_although_its_medium_fails_in_between(store: BlockStore, faults: Faults) -> None:
    assert check_delivery(*load(store, 0)) == set()
    faults.broken["FileTier.read"] = 1
    assert check_delivery(*load(store, *FIVE)) == {1, 2, 3, 4}
    assert check_delivery(*load(store, *FIVE)) == {1, 3}


def test_a_target_that_fails_for_one_unit_names_it(store: BlockStore) -> None:
    out = blank(GEOMETRY, 5)
    ticket = store.load(keys_of(*FIVE), FaultyBlocks(out, broken=[4]))
    assert ticket.wait(WAIT_S)
    codes = ticket.object_results.tolist()
    assert codes[4] == ResultCode.INVALID
    assert check_delivery(out, codes) == {1, 3, 4}


def test_failures_are_counted_by_reason(store: BlockStore) -> None:
    counter = metrics.OBJECTS_FAILED.labels(operation="load", reason="corrupt")
    before = counter._value.get()
    load(store, *FIVE)
    assert counter._value.get() == before + 2


def save(store: BlockStore, *numbers: int) -> Ticket:
    ticket = store.save(keys_of(*numbers), FaultyBlocks(payloads_of(GEOMETRY, *numbers)))
    assert ticket.wait(WAIT_S)
    ticket.wait_durable(WAIT_S)
    assert ResultCode.PENDING not in ticket.durable_results
    return ticket


@pytest.mark.parametrize("stage", SAVE_STAGES)
def test_a_fault_at_any_stage_of_a_save_loses_nothing(
    store: BlockStore, faults: Faults, stage: str, stored: Path
) -> None:
    faults.broken[stage] = 1
    ticket = save(store, 5, 6, 7)
    durable = ticket.durable_results.tolist()
    for number, code in zip((5, 6, 7), durable, strict=True):
        assert path_of(stored, number).exists() or code != ResultCode.OK
    faults.broken.clear()
    assert save(store, 5, 6, 7).wait_durable(0)
    out, codes = load(store, 5, 6, 7)
    assert codes == [0, 0, 0]
    assert np.array_equal(out, payloads_of(GEOMETRY, 5, 6, 7))


def test_every_stage_of_a_save_has_its_fault(store: BlockStore, faults: Faults) -> None:
    save(store, 5, 6, 7)
    store.save(keys_of(8), FaultyBlocks(payloads_of(GEOMETRY, 8), broken=[0])).wait(WAIT_S)
    assert faults.seen == set(SAVE_STAGES)


def test_a_file_that_cannot_be_written_leaves_the_ring_copy(
    store: BlockStore, faults: Faults, stored: Path
) -> None:
    faults.broken["FileTier.write"] = 1
    ticket = save(store, 5)
    assert ticket.ok
    assert ticket.level is Level.IN_RING
    assert ticket.durable_results.tolist() == [ResultCode.UNAVAILABLE]
    assert np.array_equal(load(store, 5)[0], payloads_of(GEOMETRY, 5))
    assert not path_of(stored, 5).exists()


def test_results_are_per_key(store: BlockStore, stored: Path) -> None:  # case C-64
    """[k1, k1, k2 (present), k3, k4 (fails), k5]: k4 fails alone, and the next batch tries it again."""
    save(store, 12)
    source = FaultyBlocks(payloads_of(GEOMETRY, 11, 11, 12, 13, 14, 15), broken=[4])
    ticket = store.save(keys_of(11, 11, 12, 13, 14, 15), source)
    assert ticket.wait(WAIT_S)
    assert not ticket.wait_durable(WAIT_S)
    assert ticket.object_results.tolist() == [0, 0, 0, 0, ResultCode.INVALID, 0]
    assert ticket.durable_results.tolist() == [0, 0, 0, 0, ResultCode.INVALID, 0]
    assert sorted(source.copied) == [0, 3, 5]
    again = FaultyBlocks(payloads_of(GEOMETRY, 14, 15))
    assert store.save(keys_of(14, 15), again).wait_durable(WAIT_S)
    assert again.copied == [0]


def test_a_slot_is_readable_after_success_only(store: BlockStore) -> None:  # case C-43
    """A half-filled slot of a source that failed is never somebody's hit."""
    half = payloads_of(GEOMETRY, 20)
    ticket = store.save(keys_of(20), FaultyBlocks(half, broken=[0]))
    assert ticket.wait(WAIT_S)
    assert not store.lookup(keys_of(20))[0]
    assert load(store, 20)[1] == [ResultCode.MISS]


def test_a_full_ring_is_no_space_in_bounded_time(stored: Path) -> None:  # case C-46
    limits = StoreLimits(save_wait_s=0.05, load_wait_s=0.2, private_bytes=0)
    store = open_store(stored, GEOMETRY, slots=8, limits=limits)
    donations = [store.reserve(keys_of(number)[0]) for number in range(100, 108)]
    before = metrics.OBJECTS_FAILED.labels(operation="save", reason="no_space")._value.get()
    ticket = save(store, 200, 201)
    assert ticket.object_results.tolist() == [ResultCode.NO_SPACE] * 2
    assert metrics.OBJECTS_FAILED.labels(operation="save", reason="no_space")._value.get() == before + 2
    assert check_delivery(*load(store, *FIVE)) == {1, 3}
    assert store.prefetch(keys_of(2)).wait(WAIT_S)
    for donation in donations:
        assert donation is not None
        donation.abort()
    assert save(store, 200, 201).ok
    store.close()


def test_fifty_loads_wait_for_one_reader_each(stored: Path) -> None:  # case C-47
    """Equal batches of many requests: every object is read once, all are served."""
    faults = Faults()
    store = open_store(stored, GEOMETRY, threads=8, faults=faults)
    numbers = [0, 2, 4]
    outs = [blank(GEOMETRY, 3) for _ in range(50)]
    before = metrics.OBJECTS_LOADED.labels(row="row", tier="file")._value.get()
    tickets = [store.load(keys_of(*numbers), BufferBlocks(out)) for out in outs]
    assert all(ticket.wait(WAIT_S) for ticket in tickets)
    assert all(ticket.ok for ticket in tickets)
    assert all(np.array_equal(out, payloads_of(GEOMETRY, *numbers)) for out in outs)
    assert metrics.OBJECTS_LOADED.labels(row="row", tier="file")._value.get() == before + 3
    store.close()


def test_fifty_saves_that_press_on_eight_slots_all_end(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=8, threads=4)
    tickets: list[Ticket] = []

    def work(request: int) -> None:
        numbers = range(6 * request, 6 * request + 6)
        tickets.append(store.save(keys_of(*numbers), BufferBlocks(payloads_of(GEOMETRY, *numbers))))

    threads = [threading.Thread(target=work, args=(request,)) for request in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ticket.wait(WAIT_S) for ticket in tickets)
    codes = {code for ticket in tickets for code in ticket.object_results.tolist()}
    assert codes <= {ResultCode.OK, ResultCode.NO_SPACE}
    assert any(ticket.ok for ticket in tickets)
    for ticket in tickets:
        ticket.wait_durable(WAIT_S)
        assert ResultCode.PENDING not in ticket.durable_results
    store.close()


def test_another_reader_that_never_ends_is_not_waited_for_long(stored: Path) -> None:
    store = open_store(stored, GEOMETRY, limits=QUICK, ring_name=None)
    donation = store._tiers.ring.claim(keys_of(2))  # stands for a reader in another process that is stopped
    assert check_delivery(*load(store, *FIVE)) == {1, 3}
    ticket = save(store, 2)
    assert ticket.ok
    store._tiers.ring.abort(donation.slots)
    store.close()


def test_a_write_of_the_same_key_by_another_is_waited_for(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY, limits=QUICK)
    claim = store._tiers.ring.claim(keys_of(1))
    ticket = save(store, 1)
    assert ticket.object_results.tolist() == [ResultCode.TIMEOUT]
    store._tiers.ring.abort(claim.slots)
    assert save(store, 1).ok
    store.close()


def test_a_writer_that_gave_up_is_replaced_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY, limits=StoreLimits(save_wait_s=3600.0))
    claim = store._tiers.ring.claim(keys_of(1))
    giving_up = threading.Timer(0.05, lambda: store._tiers.ring.abort(claim.slots))
    giving_up.start()
    assert save(store, 1).ok
    giving_up.join()
    store.close()
