"""Saves and loads for which the ring has no slot go past it, through bounded private memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from stores import NAMESPACE, Faults, Gate, open_store

from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import Level, ResultCode, Ticket
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.tiers import StoreLimits
from ucm_core.testing.block_store import WAIT_S, FaultyBlocks, blank, keys_of, payloads_of

GEOMETRY = Geometry(1, 4096)


def save(store: BlockStore, *numbers: int, inline: bool = True) -> Ticket:
    source = BufferBlocks(payloads_of(GEOMETRY, *numbers))
    return store.save(keys_of(*numbers), source, gather_inline=inline)


def expect(store: BlockStore, *numbers: int) -> None:
    out = blank(GEOMETRY, len(numbers))
    ticket = store.load(keys_of(*numbers), BufferBlocks(out))
    assert ticket.wait(WAIT_S)
    assert ticket.ok
    assert np.array_equal(out, payloads_of(GEOMETRY, *numbers))


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Nothing is written until it is opened."""
    gate = Gate("FileTier.write")
    yield gate
    gate.opened.set()


@pytest.mark.parametrize("slots", [0, 1, 1024])
@pytest.mark.parametrize("inline", [True, False])
def test_a_batch_of_1025_is_all_on_the_medium(tmp_path: Path, slots: int, inline: bool) -> None:
    store, numbers = open_store(tmp_path, GEOMETRY, slots=slots), range(1025)
    ticket = save(store, *numbers, inline=inline)
    assert ticket.wait_durable(WAIT_S)
    assert ticket.level is Level.ON_MEDIUM
    assert len(list((tmp_path / NAMESPACE).rglob("*.c0-1"))) == 1025
    expect(store, *numbers)
    store.check_integrity()
    store.close()


def test_past_the_ring_means_readable_when_the_file_is_down(tmp_path: Path, gate: Gate) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=0, faults=gate)
    ticket = save(store, 1, 2)
    assert not ticket.done
    assert ticket.level is Level.SUBMITTED
    assert not store.lookup(keys_of(1, 2)).any()
    gate.opened.set()
    assert ticket.wait_durable(WAIT_S)
    assert ticket.ok
    expect(store, 1, 2)
    store.close()


def test_private_memory_is_bounded_and_then_there_is_no_space(tmp_path: Path, gate: Gate) -> None:
    limits = StoreLimits(save_wait_s=0.05, private_bytes=3 * 4096)
    store = open_store(tmp_path, GEOMETRY, slots=2, faults=gate, limits=limits)
    ticket = save(store, *range(8))
    codes = ticket.object_results.tolist()
    assert codes == [0, 0, *[ResultCode.PENDING] * 3, *[ResultCode.NO_SPACE] * 3]
    gate.opened.set()
    assert not ticket.wait_durable(WAIT_S)
    assert ticket.object_results.tolist() == [0] * 5 + [ResultCode.NO_SPACE] * 3
    assert save(store, 5, 6, 7).wait_durable(WAIT_S)
    expect(store, *range(8))
    store.close()


def test_one_object_goes_past_however_large_it_is(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=0, limits=StoreLimits(save_wait_s=3600.0, private_bytes=1))
    assert save(store, 1, 2, 3).wait_durable(WAIT_S)
    store.close()


def test_a_write_that_fails_past_the_ring_is_the_saves_failure(tmp_path: Path) -> None:
    faults = Faults()
    store = open_store(tmp_path, GEOMETRY, slots=0, faults=faults)
    faults.broken["FileTier.write"] = 1
    ticket = save(store, 1)
    assert ticket.wait(WAIT_S)
    assert ticket.object_results.tolist() == ticket.durable_results.tolist() == [ResultCode.UNAVAILABLE]
    assert save(store, 1).wait_durable(WAIT_S)
    store.close()


def test_a_source_that_fails_past_the_ring_costs_no_memory(tmp_path: Path) -> None:
    store = open_store(
        tmp_path, GEOMETRY, slots=0, limits=StoreLimits(save_wait_s=3600.0, private_bytes=4096)
    )
    for _ in range(3):
        ticket = store.save(keys_of(1), FaultyBlocks(payloads_of(GEOMETRY, 1), broken=[0]))
        assert ticket.wait(WAIT_S)
        assert ticket.object_results.tolist() == [ResultCode.INVALID]
    assert save(store, 1).wait_durable(WAIT_S)
    store.close()


def test_a_source_that_ends_its_thread_costs_no_memory(tmp_path: Path) -> None:
    class Ends:
        def gather(self, index: object, address: object) -> None:
            raise KeyboardInterrupt

    store = open_store(
        tmp_path, GEOMETRY, slots=0, limits=StoreLimits(save_wait_s=3600.0, private_bytes=4096)
    )
    with pytest.raises(KeyboardInterrupt):
        store.save(keys_of(1), Ends())  # type: ignore[arg-type]
    assert save(store, 1).wait_durable(WAIT_S)
    store.close()


def test_two_saves_of_one_key_past_the_ring_write_it_once(tmp_path: Path, gate: Gate) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=0, faults=gate)
    tickets = [save(store, 1), save(store, 1)]
    assert store.statistics().pending_writes == 1
    gate.opened.set()
    assert all(ticket.wait_durable(WAIT_S) for ticket in tickets)
    store.close()


def test_a_donation_past_the_ring_ends_with_its_store(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=0)
    donation = store.reserve(keys_of(1)[0])
    assert donation is not None
    donation.view(0)[:] = bytes(4096)
    store.close()
    assert donation.commit().object_results.tolist() == [ResultCode.CANCELLED]
    assert not list(tmp_path.rglob("*.c0-1"))


def test_without_files_the_level_ends_at_the_ring(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=4, durable=False)
    ticket = save(store, 1)
    assert not ticket.wait_durable(WAIT_S)
    assert (ticket.ok, ticket.level) == (True, Level.IN_RING)
    assert ticket.durable_results.tolist() == [ResultCode.NO_SPACE]
    store.close()
    assert not list(tmp_path.rglob("*.c0-1"))


def test_without_files_a_load_of_what_is_gone_evicts_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY, slots=4, durable=False)
    save(store, 1, 2, 3, 4)
    ticket = store.load(keys_of(5, 6, 7, 8), BufferBlocks(blank(GEOMETRY, 4)))
    assert ticket.wait(WAIT_S)
    assert ticket.object_results.tolist() == [ResultCode.MISS] * 4
    expect(store, 1, 2, 3, 4)
    store.close()


def test_without_files_a_full_ring_is_no_space(tmp_path: Path) -> None:
    limits = StoreLimits(save_wait_s=0.05)
    store = open_store(tmp_path, GEOMETRY, slots=2, durable=False, limits=limits)
    save(store, 1, 2)
    with store.pin(keys_of(1, 2)):
        assert save(store, 3).object_results.tolist() == [ResultCode.NO_SPACE]
    assert save(store, 3).ok
    store.close()
