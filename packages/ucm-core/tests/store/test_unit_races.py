"""Loads and saves by units in many threads, over a ring that is too small: only right bytes, all ends."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from stores import close_balanced, open_store

from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.stack import ring_name
from ucm_core.store.tiers import StoreLimits
from ucm_core.testing.block_units import unit
from ucm_core.testing.objects import UNTOUCHED, WAIT_S, blank, keys_of, payloads_of

GEOMETRY = Geometry(4, 5000)
LIMITS = StoreLimits(save_wait_s=1.0, load_wait_s=0.3)
KEYS = 14
ROUNDS = 10


def save(store: BlockStore, choice: np.random.Generator, numbers: list[int]) -> None:
    """Other bytes first, then the right ones; sealed, abandoned, or never submitted whole."""
    payloads = blank(GEOMETRY, len(numbers))
    handle = store.begin_save(keys_of(*numbers), BufferBlocks(payloads))
    for shard in choice.permutation(4).tolist():
        if choice.random() < 0.3:
            handle.submit(unit(shard))
        payloads[:, shard] = payloads_of(GEOMETRY, *numbers)[:, shard]
        if choice.random() < 0.95:
            handle.submit(unit(shard))
    end = handle.abandon if choice.random() < 0.2 else handle.seal
    end()
    assert handle.ticket.wait(WAIT_S)


def load(store: BlockStore, choice: np.random.Generator, numbers: list[int]) -> None:
    """Units in any order, some of them given up."""
    out = blank(GEOMETRY, len(numbers))
    handle = store.begin_load(keys_of(*numbers), BufferBlocks(out))
    for shard in choice.permutation(4)[: choice.integers(1, 5)].tolist():
        handle.submit(unit(shard), urgency=shard)
        if choice.random() < 0.5:
            assert handle.ticket.wait(WAIT_S, shard=shard)
    if choice.random() < 0.5:
        handle.submit(slice(None))
    handle.cancel()
    assert handle.ticket.wait(WAIT_S)
    there = (handle.ticket.results == ResultCode.OK)[..., None]
    right = np.where(there, payloads_of(GEOMETRY, *numbers), np.uint8(UNTOUCHED))
    assert np.array_equal(out, right)


def whole(store: BlockStore, _: np.random.Generator, numbers: list[int]) -> None:
    """As everybody else does."""
    store.save(keys_of(*numbers[:2]), BufferBlocks(payloads_of(GEOMETRY, *numbers[:2])))
    out = blank(GEOMETRY, len(numbers))
    ticket = store.load(keys_of(*numbers), BufferBlocks(out))
    assert ticket.wait(WAIT_S)
    good = ticket.object_results == ResultCode.OK
    assert np.array_equal(out[good], payloads_of(GEOMETRY, *numbers)[good])


def work(store: BlockStore, seed: int, wrong: list[BaseException]) -> None:
    choice = np.random.default_rng(seed)
    try:
        for _ in range(ROUNDS):
            numbers = choice.integers(0, KEYS, choice.integers(1, 6)).tolist()
            (save, load, whole)[choice.integers(0, 3)](store, choice, numbers)
            if choice.random() < 0.2:
                store.drop(keys_of(*numbers))
    except BaseException as error:  # noqa: BLE001 - told by the test's own thread
        wrong.append(error)


@pytest.mark.parametrize(("slots", "threads"), [(0, 2), (1, 1), (4, 1), (4, 3), (16, 2)])
def test_many_threads_see_only_right_units(tmp_path: Path, slots: int, threads: int) -> None:
    name = ring_name(tmp_path, "races", row="row", segment=f"{slots}-{threads}")
    stores = [
        open_store(tmp_path, GEOMETRY, slots=slots, threads=threads, limits=LIMITS, ring_name=name)
        for _ in range(2)  # two participants of one ring, as two processes are
    ]
    wrong: list[BaseException] = []
    workers = [threading.Thread(target=work, args=(stores[n % 2], n, wrong)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong, wrong
    for store in stores:
        close_balanced(store)
