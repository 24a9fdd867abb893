"""Of many requests for one block one reads and all are woken (C-47); nothing half-done is read (C-43)."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import Faults, open_store

from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode
from ucm_core.store.geometry import Geometry
from ucm_core.store.tiers import StoreLimits
from ucm_core.testing.block_store import WAIT_S, blank, keys_of, payloads_of

GEOMETRY = Geometry(1, 4096)
TEN = range(10)
THREADS = 30


class HeldMedium(Faults):
    """A double of a medium: counts the reads of each key, and holds them until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[bytes] = Counter()
        self.reading, self.open, self.fails = threading.Semaphore(0), threading.Event(), False

    def wrap(self, tier: Any) -> Any:
        return _HeldReads(tier, self) if hasattr(tier, "read") else tier


class _HeldReads:
    def __init__(self, tier: Any, medium: HeldMedium) -> None:
        self._tier, self._medium = tier, medium

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def read(self, keys: Any, addresses: Any) -> Any:
        self._medium.reads.update(key.tobytes() for key in keys)
        self._medium.reading.release()
        assert self._medium.open.wait(WAIT_S)
        if self._medium.fails:
            raise OSError("on purpose")
        return self._tier.read(keys, addresses)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    store = open_store(tmp_path, GEOMETRY)
    assert store.save(keys_of(*TEN), BufferBlocks(payloads_of(GEOMETRY, *TEN))).wait_durable(WAIT_S)
    store.close()
    return tmp_path


@pytest.mark.parametrize("fails", [False, True])
def test_fifty_requests_read_ten_blocks_once_each(stored: Path, fails: bool) -> None:
    """Ten threads read, twenty wait for them, and the rest of 500 pieces of work is queued."""
    medium = HeldMedium()
    medium.fails = fails
    store = open_store(stored, GEOMETRY, slots=THREADS, threads=THREADS, faults=medium)
    outs = [blank(GEOMETRY, 10) for _ in range(50)]
    tickets = [store.load(keys_of(*TEN), BufferBlocks(out)) for out in outs]
    assert all(medium.reading.acquire(timeout=WAIT_S) for _ in TEN)
    assert not any(ticket.done for ticket in tickets)
    medium.open.set()
    assert all(ticket.wait(WAIT_S) for ticket in tickets)
    store.check_integrity()
    store.close()
    if fails:
        assert not any(ticket.ok for ticket in tickets)
        return
    assert all(ticket.ok for ticket in tickets)
    assert all(np.array_equal(out, payloads_of(GEOMETRY, *TEN)) for out in outs)
    assert medium.reads == Counter(key.tobytes() for key in keys_of(*TEN))


def test_an_empty_answer_of_the_medium_leaves_nothing_to_read(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY)
    ticket = store.load(keys_of(1, 2), BufferBlocks(blank(GEOMETRY, 2)))
    assert ticket.wait(WAIT_S)
    assert ticket.object_results.tolist() == [ResultCode.MISS] * 2
    ring = store.statistics().ring
    assert ring is not None
    assert (ring.ready, ring.loading) == (0, 0)
    assert not store.lookup(keys_of(1, 2)).any()
    store.close()


@pytest.mark.parametrize(("slots", "capacity_bytes", "private_bytes"), [(0, 0, 1 << 20), (0, None, 0)])
def test_what_found_no_quota_or_no_room_is_never_read(
    tmp_path: Path, slots: int, capacity_bytes: int | None, private_bytes: int
) -> None:
    limits = StoreLimits(save_wait_s=0.05, private_bytes=private_bytes)
    store = open_store(tmp_path, GEOMETRY, slots=slots, capacity_bytes=capacity_bytes, limits=limits)
    ticket = store.save(keys_of(1), BufferBlocks(payloads_of(GEOMETRY, 1)))
    assert ticket.wait(WAIT_S)
    assert ticket.object_results.tolist() == ticket.durable_results.tolist() == [ResultCode.NO_SPACE]
    assert not store.lookup(keys_of(1))[0]
    out = blank(GEOMETRY, 1)
    loaded = store.load(keys_of(1), BufferBlocks(out))
    assert loaded.wait(WAIT_S)
    assert loaded.object_results.tolist() == [ResultCode.MISS]
    assert np.array_equal(out, blank(GEOMETRY, 1))
    store.close()
