"""Saves whose caller has just looked: the medium is asked no second time, and nothing is weaker for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from stores import PATIENT, Faults, open_store

from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import Ticket
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.tiers import StoreLimits
from ucm_core.testing.block_units import ALL
from ucm_core.testing.objects import WAIT_S, FaultyBlocks, blank, keys_of, payloads_of

GEOMETRY = Geometry(2, 5000)
SYNCED = StoreLimits(save_wait_s=20.0, sync=True)
LOOK = "FileTier.stored"

Saving = Callable[..., Ticket]


def whole(store: BlockStore, *numbers: int, **more: bool) -> tuple[Ticket, list[int]]:
    """Save objects at once; the ticket, and which of them were gathered."""
    source = FaultyBlocks(payloads_of(GEOMETRY, *numbers))
    ticket = store.save(keys_of(*numbers), source, **more)
    ticket.wait_durable(WAIT_S)
    return ticket, sorted(source.copied)


def by_unit(store: BlockStore, *numbers: int, **more: bool) -> tuple[Ticket, list[int]]:
    """Save objects shard by shard; as `whole`."""
    source = FaultyBlocks(payloads_of(GEOMETRY, *numbers))
    save = store.begin_save(keys_of(*numbers), source, **more)
    save.submit(ALL)
    save.seal()
    save.ticket.wait_durable(WAIT_S)
    return save.ticket, sorted(source.copied)


both = pytest.mark.parametrize("saving", [whole, by_unit])


def kept_by_another(directory: Path, *numbers: int) -> list[tuple[int, int]]:
    """Files of these, made by a store of its own; which files lie there now."""
    other = open_store(directory, GEOMETRY)
    source = BufferBlocks(payloads_of(GEOMETRY, *numbers))
    assert other.save(keys_of(*numbers), source).wait_durable(WAIT_S)
    other.close()
    return files(directory)


def files(directory: Path) -> list[tuple[int, int]]:
    """Number and time of every object's file: one that is written again is another."""
    found = (path.stat() for path in directory.rglob("*hx.u0-1.c0-1*") if path.is_file())
    return sorted((status.st_ino, status.st_mtime_ns) for status in found)


@both
@pytest.mark.parametrize("absent", [False, True])
def test_the_medium_is_asked_unless_all_are_absent(tmp_path: Path, saving: Saving, absent: bool) -> None:
    faults = Faults()
    store = open_store(tmp_path, GEOMETRY, faults=faults)
    ticket, gathered = saving(store, 1, 2, absent=absent)
    assert ticket.ok
    assert gathered == [0, 1]
    assert (LOOK in faults.seen) is not absent
    store.close()


@both
def test_what_came_meanwhile_is_not_written_again(tmp_path: Path, saving: Saving) -> None:
    before = kept_by_another(tmp_path, 1)
    store = open_store(tmp_path, GEOMETRY)
    ticket, gathered = saving(store, 1, absent=True)
    assert len(before) == 1
    assert gathered == [0]
    assert ticket.ok
    assert not ticket.durable_results.any()
    assert files(tmp_path) == before
    store.close()


@both
def test_what_lies_damaged_under_an_absent_key_is_healed(tmp_path: Path, saving: Saving) -> None:
    kept_by_another(tmp_path, 1)
    (path,) = (path for path in tmp_path.rglob("*hx.u0-1.c0-1*") if path.is_file())
    path.write_bytes(b"half of it")
    store = open_store(tmp_path, GEOMETRY)
    assert saving(store, 1, absent=True)[0].ok
    store.close()
    later = open_store(tmp_path, GEOMETRY)
    out = blank(GEOMETRY, 1)
    loaded = later.load(keys_of(1), BufferBlocks(out))
    assert loaded.wait(WAIT_S)
    assert loaded.ok
    assert (out == payloads_of(GEOMETRY, 1)).all()
    later.close()


@both
def test_where_files_are_flushed_the_medium_is_asked(tmp_path: Path, saving: Saving) -> None:
    kept_by_another(tmp_path, 1)
    store = open_store(tmp_path, GEOMETRY, limits=SYNCED)
    ticket, gathered = saving(store, 1, 2, absent=True)
    assert gathered == [1]
    assert ticket.ok
    store.close()


@both
def test_an_absent_key_that_the_ring_holds_is_not_gathered(tmp_path: Path, saving: Saving) -> None:
    store = open_store(tmp_path, GEOMETRY, limits=PATIENT)
    saving(store, 1, absent=True)
    ticket, gathered = saving(store, 1, 2, 1, absent=True)
    assert gathered == [1]
    assert ticket.ok
    store.close()
