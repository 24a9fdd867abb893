"""Prefetch on lookup: what a verdict promises comes into the ring before anybody loads it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import DENSE, FULL, GRAIN, RING_BYTES, identity_of, payloads_of

from ucm_core.cache import Cache
from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.coordinator import Verdict
from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode, Ticket, TicketGroup
from ucm_core.ops.config import CacheConfig
from ucm_core.store.files import FileTier

WAIT_S = 60.0
TOKENS = list(range(8 * GRAIN + 1))
ATTEMPT = Attempt("r1")


def open_cache(root: Path, **settings: Any) -> Cache:
    settings = {"prefetch_on_lookup": True, "io_threads": 1, **settings}
    config = CacheConfig(root=root, ring_bytes=RING_BYTES, disk_bytes=1 << 30, **settings)
    return Cache.open(config, DENSE, identity=identity_of(DENSE))


class Door:
    """A double of a slow medium: reads wait while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[int] = []
        self.reached, self.open, real = threading.Event(), threading.Event(), FileTier.read
        self.open.set()

        def read(tier: FileTier, keys: Any, addresses: Any) -> Any:
            self.reads.append(len(keys))
            self.reached.set()
            assert self.open.wait(WAIT_S)
            return real(tier, keys, addresses)

        monkeypatch.setattr(FileTier, "read", read)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    return Door(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_cache(tmp_path) as cache:
        assert cache.save(cache.chain(TOKENS), payloads_of(DENSE, 8)).wait_durable(WAIT_S)
    return tmp_path


@pytest.fixture
def cache(root: Path, door: Door) -> Iterator[Cache]:
    with open_cache(root) as cache:
        yield cache
        door.open.set()
        cache.check_integrity()


def resolve(cache: Cache) -> Verdict:
    verdict = cache.resolve(cache.chain(TOKENS))
    assert verdict.hit.resume_tokens == 8 * GRAIN
    return verdict


def ticket_of(verdict: Verdict) -> Ticket:
    assert isinstance(verdict.prefetch, TicketGroup)
    return verdict.prefetch.rows[FULL.name]


def test_what_is_promised_is_read_before_it_is_loaded(cache: Cache, root: Path) -> None:
    verdict = resolve(cache)
    assert ticket_of(verdict).wait(WAIT_S)
    for file in root.rglob("*.c0-1"):
        file.unlink()
    assert cache.load(cache.chain(TOKENS), verdict).resume_tokens == 8 * GRAIN


def test_by_default_a_verdict_reads_nothing(root: Path, door: Door) -> None:
    with open_cache(root, prefetch_on_lookup=False) as cache:
        assert resolve(cache).prefetch is None
    assert door.reads == []


def test_a_lease_that_ends_without_a_load_ends_the_reads(cache: Cache, door: Door) -> None:
    door.open.clear()
    busy = resolve(cache)  # its first piece keeps the only thread
    assert door.reached.wait(WAIT_S)
    verdict = cache.lease(resolve(cache), ATTEMPT)
    cache.release(ATTEMPT)
    ticket_of(busy).cancel()
    door.open.set()
    assert ticket_of(verdict).wait(WAIT_S)
    assert set(ticket_of(verdict).object_results.tolist()) == {ResultCode.CANCELLED}
    assert len(door.reads) == 1


def test_the_next_verdict_of_an_attempt_ends_the_reads_of_the_last(cache: Cache, door: Door) -> None:
    door.open.clear()
    first = cache.lease(resolve(cache), ATTEMPT)
    second = cache.lease(resolve(cache), ATTEMPT)
    assert ticket_of(first).cancelled
    assert not ticket_of(second).cancelled
    door.open.set()
    assert ticket_of(second).wait(WAIT_S)
    cache.release(ATTEMPT)
    assert cache.statistics().leases.held == 0


def test_a_load_takes_over_from_the_reads_of_its_verdict(cache: Cache) -> None:
    verdict = resolve(cache)
    loaded = cache.load(cache.chain(TOKENS), verdict)
    assert ticket_of(verdict).cancelled
    assert loaded.resume_tokens == 8 * GRAIN
    right = payloads_of(DENSE, 8)[FULL.name]
    assert (loaded.payloads[FULL.name] == right).all()


@pytest.mark.parametrize("change", ["weights_changed", "reset"])
def test_no_load_that_is_under_way_ends_well_when_what_it_brings_is_over(
    root: Path, door: Door, change: str
) -> None:
    """The bytes of the old weights may be in the target; nobody is told to use them."""
    with open_cache(root, prefetch_on_lookup=False) as cache:
        verdict = resolve(cache)
        door.open.clear()
        out = np.zeros_like(payloads_of(DENSE, 8)[FULL.name])
        tickets = cache.load_into(verdict, {FULL.name: BufferBlocks(out)})
        changing = threading.Thread(target=getattr(cache, change))
        changing.start()
        old = cache.stores[FULL.name]
        while changing.is_alive() and cache.stores[FULL.name] is old:
            changing.join(0.01)
        door.open.set()
        changing.join(WAIT_S)
        assert tickets.wait(WAIT_S)
        assert not (tickets.rows[FULL.name].object_results == ResultCode.OK).any()
