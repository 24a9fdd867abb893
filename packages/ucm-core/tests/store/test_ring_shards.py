"""Readiness shard by shard: who waits for one shard waits for no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rings import (
    PAYLOAD_BYTES,
    fill_shards,
    keys,
    new_name,
    private_ring,
    processes,
    put,
    shared_ring,
    shows_shard,
    wait_shard,
)

from ucm_core.store.ring import Claims, Outcome, Ring

SHARDS = 8
SHAPE = {"payload_bytes": SHARDS * PAYLOAD_BYTES, "shards": SHARDS}
READY, FAILED, TIMEOUT = Outcome.READY, Outcome.FAILED, Outcome.TIMEOUT


@pytest.fixture
def ring() -> Iterator[Ring]:
    with private_ring(2, **SHAPE) as ring:
        yield ring


def outcomes(ring: Ring, claims: Claims) -> list[int]:
    """What each shard of the first claim is now."""
    return [wait_shard(ring, claims, shard, 0.0) for shard in range(ring.shards)]


def publish(ring: Ring, claims: Claims, begin: int, end: int) -> list[bool]:
    return ring.publish_shards(claims.slots, claims.version, begin=begin, end=end).tolist()


def test_a_shard_is_ready_before_its_block_is(ring: Ring) -> None:
    claims = ring.claim(keys("a"))
    assert publish(ring, claims, 2, 4) == [True]
    assert outcomes(ring, claims) == [TIMEOUT] * 2 + [READY] * 2 + [TIMEOUT] * 4
    assert not ring.lookup(keys("a")).any()


def test_the_last_shard_makes_the_block_ready(ring: Ring) -> None:
    claims = ring.claim(keys("a"))
    assert publish(ring, claims, 3, 8) == [True]
    assert not ring.lookup(keys("a")).any()
    assert publish(ring, claims, 0, 3) == [True]
    assert ring.lookup(keys("a")).all()
    assert publish(ring, claims, 0, 8) == [False]


def test_a_block_that_is_published_whole_has_all_its_shards(ring: Ring) -> None:
    claims = ring.claim(keys("a"))
    assert publish(ring, claims, 5, 6) == [True]
    assert ring.publish(claims.slots, claims.version).all()
    assert outcomes(ring, claims) == [READY] * 8


def test_shards_of_several_blocks_are_published_at_once(ring: Ring) -> None:
    claims = ring.claim(keys("a", "b"))
    assert publish(ring, claims, 1, 2) == [True, True]
    waited = ring.wait(claims.slots, claims.version, timeout_s=0, shard=1)
    assert waited.tolist() == [READY, READY]


ranges = st.integers(1, 896).flatmap(
    lambda shards: st.tuples(
        st.just(shards),
        st.lists(st.tuples(st.integers(0, shards - 1), st.integers(1, shards)).filter(lambda r: r[0] < r[1])),
    )
)


@given(ranges)
def test_exactly_what_was_published_is_ready(case: tuple[int, list[tuple[int, int]]]) -> None:
    shards, published = case
    with private_ring(1, shards=shards) as ring:
        claims = ring.claim(keys("a"))
        full: set[int] = set()
        for begin, end in published:
            assert publish(ring, claims, begin, end) == [len(full) < shards]
            full |= set(range(begin, end))
        assert outcomes(ring, claims) == [READY if shard in full else TIMEOUT for shard in range(shards)]
        assert ring.lookup(keys("a")).all() == (len(full) == shards)


def test_a_late_writer_is_stopped_by_the_version(ring: Ring) -> None:  # case C-49
    late = ring.claim(keys("a", "b"))
    publish(ring, late, 0, 3)
    ring.abort(late.slots, late.version)
    claims = ring.claim(keys("c", "d"))
    assert set(claims.slots.tolist()) == set(late.slots.tolist())
    assert publish(ring, late, 0, 8) == [False, False]
    assert outcomes(ring, claims) == [TIMEOUT] * 8
    assert not ring.lookup(keys("c", "d")).any()


def test_the_next_stay_in_a_slot_begins_without_shards(ring: Ring) -> None:
    put(ring, "a", "b")
    claims = ring.claim(keys("c"))
    assert outcomes(ring, claims) == [TIMEOUT] * 8
    assert publish(ring, claims, 0, 1) == [True]
    assert outcomes(ring, claims) == [READY] + [TIMEOUT] * 7


def test_a_version_of_long_ago_is_refused_by_a_wait(ring: Ring) -> None:
    old = ring.claim(keys("a", "b"))
    ring.abort(old.slots)
    new = ring.claim(keys("c", "d"))
    publish(ring, new, 0, 4)
    assert outcomes(ring, old) == [FAILED] * 8


def test_only_the_owner_publishes_shards() -> None:
    name = new_name()
    with shared_ring(name, **SHAPE) as owner, shared_ring(name, **SHAPE) as other:
        claims = owner.claim(keys("a"))
        joined = other.claim(keys("a"))
        assert publish(other, joined, 0, 8) == [False]
        assert outcomes(owner, claims) == [TIMEOUT] * 8


def test_what_was_published_before_the_owner_gave_up_stays_readable() -> None:
    name = new_name()
    with shared_ring(name, **SHAPE) as owner, shared_ring(name, **SHAPE) as other:
        claims = owner.claim(keys("a"))
        joined = other.claim(keys("a"))
        fill_shards(owner, claims, "a", 0, 2)
        owner.abort(claims.slots)
        assert outcomes(other, joined) == [READY] * 2 + [FAILED] * 6
        assert shows_shard(other, joined, "a", 1)


@pytest.mark.parametrize(("begin", "end"), [(-1, 1), (0, 9), (3, 3), (4, 3), (8, 9)])
def test_a_range_that_is_none_is_refused_and_changes_nothing(ring: Ring, begin: int, end: int) -> None:
    claims = ring.claim(keys("a"))
    with pytest.raises(IndexError, match=rf"shards \[{begin}, {end}\) are not in \[0, 8\)"):
        publish(ring, claims, begin, end)
    assert outcomes(ring, claims) == [TIMEOUT] * 8


@pytest.mark.parametrize("shard", [-1, 8])
def test_a_wait_for_a_shard_that_is_none_is_refused(ring: Ring, shard: int) -> None:
    claims = ring.claim(keys("a"))
    with pytest.raises(IndexError, match=rf"shards \[{shard}, {shard + 1}\) are not in \[0, 8\)"):
        wait_shard(ring, claims, shard, 0.0)


@pytest.mark.parametrize("shards", [0, 897])
def test_a_number_of_shards_that_no_header_holds_is_refused(shards: int) -> None:
    with pytest.raises(ValueError, match=rf"shards {shards} is not in \[1, 896\]"):
        private_ring(1, shards=shards)


def test_threads_that_wait_for_one_shard_each_are_woken_one_after_the_other(ring: Ring) -> None:
    claims = ring.claim(keys("a"))
    came = [threading.Event() for _ in range(SHARDS)]

    def watch(shard: int) -> None:
        if wait_shard(ring, claims, shard, 60.0) == READY and shows_shard(ring, claims, "a", shard):
            came[shard].set()

    threads = [threading.Thread(target=watch, args=(shard,)) for shard in range(SHARDS)]
    for thread in threads:
        thread.start()
    for shard in [3, 0, 7, 1, 6, 2, 5, 4]:
        assert not came[shard].is_set()
        fill_shards(ring, claims, "a", shard, shard + 1)
        assert came[shard].wait(60)
    for thread in threads:
        thread.join()


def test_processes_read_each_shard_as_soon_as_it_is_there() -> None:
    with processes(new_name(), 3, **SHAPE) as (owner, *readers):
        claims = owner.call("claim", keys("a"))
        joined = [reader.call("claim", keys("a")) for reader in readers]
        for shard in range(SHARDS):
            for reader, claim in zip(readers, joined, strict=True):
                reader.start("wait_shard", claim, shard)
            owner.call("fill_shards", claims, "a", shard, shard + 1)
            assert [reader.result() for reader in readers] == [READY] * 2
            for reader, claim in zip(readers, joined, strict=True):
                assert reader.call("shows_shard", claim, "a", shard)
        assert readers[0].call("lookup", keys("a")).all()


def test_the_death_of_the_owner_between_two_shards_fails_the_rest() -> None:
    with processes(new_name(), 3, **SHAPE) as (owner, *readers):
        claims = owner.call("claim", keys("a"))
        owner.call("fill_shards", claims, "a", 0, 3)
        joined = [reader.call("claim", keys("a")) for reader in readers]
        for reader, claim in zip(readers, joined, strict=True):
            reader.start("wait_shard", claim, 3)
        owner.kill()
        assert [reader.result() for reader in readers] == [FAILED] * 2
        assert readers[0].call("wait_shard", joined[0], 2) == READY
        assert readers[0].call("shows_shard", joined[0], "a", 2)
        for reader, claim in zip(readers, joined, strict=True):
            reader.call("release", claim.slots)
        again = readers[0].call("claim", keys("a"))
        assert again.outcome.tolist() == [Outcome.OWNER]
        assert readers[0].call("wait_shard", again, 2, 0.0) == TIMEOUT


def test_a_reader_of_a_shard_keeps_the_slot(ring: Ring) -> None:  # case C-65
    claims = ring.claim(keys("a", "b"))
    fill_shards(ring, claims, "a", 0, 1)
    reader = ring.pin(keys("a"))
    ring.abort(claims.slots[:1], claims.version[:1])
    assert ring.claim(keys("x", "y")).outcome.tolist() == [Outcome.NO_SPACE] * 2
    assert shows_shard(ring, reader, "a", 0)
