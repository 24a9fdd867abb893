"""A ring's memory: taken when it is needed, once, and never missed by whoever touches it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_errors import failing
from rings import (
    PAYLOAD_BYTES,
    RingProcess,
    keys,
    private_ring,
    put,
    region_path,
    shared_ring,
    shows,
    wait,
)

from ucm_core import _native
from ucm_core.errors import NoSpace
from ucm_core.store import huge_pages, ring
from ucm_core.store.ring import Claims, Outcome, Ring, RingOptions
from ucm_core.store.sizing import SLOT_OVERHEAD_BYTES

PREFAULT = RingOptions(prefault=True)
CHILDREN = Path(__file__).with_name("ring_children.py")
PAYLOADS = 0xFFFFF000
"""Bits of an offset: any is set but at the begin of a region."""
SPARE_PAGES = 10
"""Header, the least index, and the rounding of each part to whole pages."""


def taken_bytes(name: str) -> int:
    return region_path(name).stat().st_blocks * 512


def claim_without_memory(ring: Ring, *names: object) -> Claims:
    """A claim while the kernel has no memory to give."""
    return failing("fallocate", errno.ENOSPC, lambda: ring.claim(keys(*names)))


def test_the_structure_is_taken_at_once_and_each_payload_with_its_first_claim(name: str) -> None:
    with shared_ring(name, slots=16, payload_bytes=1 << 20) as ring:
        size = region_path(name).stat().st_size
        assert size == _native.ring_bytes(16, 1 << 20)
        structure = size - (16 << 20)
        assert taken_bytes(name) == structure
        put(ring, "a", "b")
        assert taken_bytes(name) == structure + (2 << 20)


def test_a_slot_takes_its_memory_once(name: str) -> None:
    with shared_ring(name, slots=2) as ring:
        put(ring, "a", "b")
        taken = taken_bytes(name)
        assert taken == region_path(name).stat().st_size
        claims = claim_without_memory(ring, "c", "d")
        assert claims.outcome.tolist() == [Outcome.OWNER] * 2
        assert taken_bytes(name) == taken


def test_free_slots_that_have_memory_are_used_again_before_others_take_some(name: str) -> None:
    with shared_ring(name, slots=16) as ring:
        for number in range(20):
            put(ring, number)
            assert ring.drop(keys(number)).all()
        assert taken_bytes(name) == region_path(name).stat().st_size - 15 * PAYLOAD_BYTES


@pytest.mark.parametrize("count", [1, 8])
def test_without_memory_a_claim_is_refused_counted_and_leaves_nothing(count: int) -> None:
    with private_ring(8) as ring:
        claims = claim_without_memory(ring, *range(count))
        assert claims.outcome.tolist() == [Outcome.NO_SPACE] * count
        assert claims.slots.tolist() == [-1] * count
        books = ring.statistics()
        assert (books.refusals, books.empty, books.own_references) == (count, 8, 0)
        ring.check_integrity()
        put(ring, *range(8))  # the memory is back


def test_a_key_that_stands_twice_in_a_refused_claim_fails_for_its_second_place() -> None:
    with private_ring(2) as ring:
        claims = claim_without_memory(ring, "a", "a")
        assert claims.outcome.tolist() == [Outcome.NO_SPACE, Outcome.LOADING]
        assert ring.wait(claims.slots[1:], claims.version[1:], timeout_s=60).tolist() == [Outcome.FAILED]
        ring.release(claims.slots[1:])
        put(ring, "a")


def test_where_memory_is_short_blocks_make_room_for_others() -> None:
    with private_ring(8) as ring:
        put(ring, "a", "b")
        assert claim_without_memory(ring, "c").outcome.tolist() == [Outcome.NO_SPACE]
        claims = claim_without_memory(ring, "c", "d")
        assert claims.outcome.tolist() == [Outcome.OWNER] * 2
        books = ring.statistics()
        assert (books.evictions, books.refusals, books.empty) == (2, 1, 6)
        assert claim_without_memory(ring, "e").outcome.tolist() == [Outcome.NO_SPACE]  # all are referenced


def test_what_is_there_is_served_while_memory_is_short() -> None:
    with private_ring(8) as ring:
        put(ring, "a")
        ring.pin(keys("a"))
        claims = claim_without_memory(ring, "a", "b")
        assert claims.outcome.tolist() == [Outcome.READY, Outcome.NO_SPACE]
        assert shows(ring, "a")


def test_the_death_of_one_who_takes_memory_leaves_it_to_the_next(name: str) -> None:
    with shared_ring(name, slots=1) as ring:
        victim = RingProcess(name)
        victim.start("die_while_memory_is_taken", keys("a"))
        victim.process.join()
        assert victim.process.exitcode == -signal.SIGSYS
        joined = ring.claim(keys("a"))
        assert joined.outcome.tolist() == [Outcome.LOADING]
        assert wait(ring, joined) == [Outcome.FAILED]
        ring.release(joined.slots)
        assert taken_bytes(name) == region_path(name).stat().st_size - PAYLOAD_BYTES
        put(ring, "a")
        assert shows(ring, "a")
        assert taken_bytes(name) == region_path(name).stat().st_size
        ring.check_integrity()


# -- prefault


def test_prefault_takes_all(name: str) -> None:
    with shared_ring(name, options=PREFAULT) as ring:
        assert taken_bytes(name) == region_path(name).stat().st_size
        assert claim_without_memory(ring, *range(8)).outcome.tolist() == [Outcome.OWNER] * 8


def test_one_who_joins_may_take_what_the_maker_did_not(name: str) -> None:
    with shared_ring(name) as maker:
        put(maker, "a")
        with shared_ring(name, options=PREFAULT) as late:
            assert taken_bytes(name) == region_path(name).stat().st_size
            assert shows(late, "a")
        assert claim_without_memory(maker, "b").outcome.tolist() == [Outcome.OWNER]


@pytest.mark.parametrize("shared", [True, False])
def test_prefault_without_memory_is_refused_with_both_numbers_and_leaves_nothing(
    name: str, shared: bool
) -> None:
    def open_it() -> None:
        with pytest.raises(NoSpace, match=rf"needs {8 * PAYLOAD_BYTES} bytes of shared memory, \d+ are free"):
            shared_ring(name if shared else None, options=PREFAULT)

    failing("fallocate", errno.ENOSPC, open_it, flags=PAYLOADS)
    assert not region_path(name).exists()


def test_one_who_joins_and_finds_no_memory_leaves_the_ring_as_it_was(name: str) -> None:
    def join() -> None:
        with pytest.raises(NoSpace, match="are free"):
            shared_ring(name, options=PREFAULT)

    with shared_ring(name) as maker:
        put(maker, "a")
        failing("fallocate", errno.ENOSPC, join)
        assert maker.statistics().participants == 1
        assert shows(maker, "a")


@pytest.mark.parametrize("shared", [True, False])
def test_a_ring_without_memory_for_its_structure_is_refused(name: str, shared: bool) -> None:
    def open_it() -> None:
        size = _native.ring_bytes(8, PAYLOAD_BYTES)
        with pytest.raises(NoSpace, match=rf"needs {size} bytes of shared memory, \d+ are free"):
            shared_ring(name if shared else None)

    failing("fallocate", errno.ENOSPC, open_it)
    assert not region_path(name).exists()


# -- huge pages


def test_huge_pages_that_are_not_to_be_had_are_mentioned_once(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huge_pages, "refusal", lambda _: "there are none today")
    ring._say_no_huge_pages.cache_clear()
    for _ in range(2):
        with shared_ring(name, options=RingOptions(huge_pages=True)) as opened:
            put(opened, "a")
            assert shows(opened, "a")
    assert caplog.messages == ["rings get no huge pages: there are none today"]


@pytest.mark.parametrize("prefault", [True, False])
def test_a_ring_that_asks_for_huge_pages_works(
    prefault: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huge_pages, "refusal", lambda _: None)
    options = RingOptions(huge_pages=True, prefault=prefault)
    with shared_ring(None, slots=4, payload_bytes=1 << 20, options=options) as opened:
        put(opened, *range(4))
        assert all(shows(opened, number) for number in range(4))
    assert caplog.messages == []


# -- sizes


@given(st.integers(1, 1 << 16), st.integers(1, 896))
def test_a_slot_costs_no_more_than_sizes_are_counted_with(slots: int, shards: int) -> None:
    structure = _native.ring_bytes(slots, 4096, shards) - slots * 4096
    assert structure <= slots * SLOT_OVERHEAD_BYTES + SPARE_PAGES * 4096


# -- a small /dev/shm of our own


def run_mounted(size: str, case: str) -> dict[str, object]:
    """Run one case of ``ring_children.py`` where ``/dev/shm`` has ``size``; what it tells."""
    mount = f'mount -t tmpfs -o size={size} ucm-test /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, CHILDREN, case]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


@pytest.fixture
def may_mount(tmp_path: Path) -> None:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "ucm-test", tmp_path]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")


@pytest.mark.usefixtures("may_mount")
def test_shared_memory_that_others_took_is_a_refusal_and_no_crash() -> None:
    told = run_mounted("2m", "taken")
    fits = int(str(told["fits"]))
    assert 0 < fits < 16
    assert told["meanwhile"] == [Outcome.OWNER] * fits + [Outcome.NO_SPACE] * (16 - fits)
    assert told["afterwards"] == [True] * 16


@pytest.mark.usefixtures("may_mount")
def test_what_another_ring_was_promised_is_not_there_for_a_second() -> None:  # case C-61
    told = run_mounted("2m", "promised")
    needed, free = told["needed"], told["free"]
    who = f"ucm-{os.geteuid()}-two needs {needed} bytes of shared memory, {free} are free:"
    assert who in str(told["refused"])
    assert told["regions"] == ["ucm-0-one"]


@pytest.mark.usefixtures("may_mount")
def test_a_ring_that_its_process_left_or_died_in_gives_its_memory_back() -> None:
    told = run_mounted("2m", "given back")
    assert told["closed"] == told["killed"] == told["before"]


def test_signals_do_not_keep_a_claim_from_its_memory() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: came.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        with private_ring(4, payload_bytes=16 << 20) as opened:
            assert opened.claim(keys(*range(4))).outcome.tolist() == [Outcome.OWNER] * 4
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came
