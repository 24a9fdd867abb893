"""The ring between real processes, killed for real."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from rings import RingProcess, hammer, keys, new_name, processes, put, region_path, shared_ring, shows, wait

from ucm_core.store.ring import Claims, Outcome


def all_wait(waiters: list[RingProcess], *names: object) -> list[Claims]:
    """Every process joins a load of ``names`` and starts to wait."""
    claims = [waiter.call("claim", keys(*names)) for waiter in waiters]
    for waiter, claim in zip(waiters, claims, strict=True):
        assert (claim.outcome == Outcome.LOADING).all()
        waiter.start("wait", claim)
    return claims


def test_three_waiters_see_the_death_of_the_owner_and_one_takes_over() -> None:  # case C-49
    with processes(new_name(), 4) as (owner, *waiters):
        owner.call("claim", keys("a"))
        claims = all_wait(waiters, "a")
        owner.kill()
        assert [waiter.result() for waiter in waiters] == [[Outcome.FAILED]] * 3
        for waiter, claim in zip(waiters, claims, strict=True):
            waiter.call("release", claim.slots)
        outcomes = [int(waiter.call("claim", keys("a")).outcome[0]) for waiter in waiters]
        assert outcomes == [Outcome.OWNER, Outcome.LOADING, Outcome.LOADING]


@pytest.mark.parametrize("shard", [None, 0])
def test_signals_hide_no_death(shard: int | None) -> None:
    name = new_name()
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    with processes(name, 1) as (owner,), shared_ring(name) as ring:
        owner.call("claim", keys("a"))
        claim = ring.claim(keys("a"))
        owner.kill()
        signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)  # more often than a waiter looks who is alive
        outcome = ring.wait(claim.slots, claim.version, timeout_s=1e9, shard=shard)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert outcome == [Outcome.FAILED]
    signal.signal(signal.SIGALRM, before)


def test_three_waiters_see_that_the_owner_gave_up() -> None:  # case C-49
    with processes(new_name(), 4) as (owner, *waiters):
        claim = owner.call("claim", keys("a"))
        all_wait(waiters, "a")
        assert owner.call("abort", claim.slots, claim.version).all()
        assert [waiter.result() for waiter in waiters] == [[Outcome.FAILED]] * 3


def test_three_waiters_are_woken_by_one_publish() -> None:
    with processes(new_name(), 4) as (owner, *waiters):
        wanted = keys("a", "b")
        claim = owner.call("claim", wanted)
        all_wait(waiters, "a", "b")
        owner.call("fill", claim, wanted)
        assert [waiter.result() for waiter in waiters] == [[Outcome.READY] * 2] * 3
        assert [waiter.call("shows", "b") for waiter in waiters] == [True] * 3


def test_the_references_of_a_killed_process_are_recovered() -> None:
    name = new_name()
    with processes(name, 1) as (holder,), shared_ring(name) as ring:
        put(ring, *range(8))
        holder.call("pin", keys(*range(8)))
        holder.call("pin", keys(3))
        assert ring.claim(keys("x")).outcome.tolist() == [Outcome.NO_SPACE]
        holder.kill()
        assert ring.claim(keys("x", "y")).outcome.tolist() == [Outcome.OWNER] * 2
        books = ring.statistics()
        assert (books.reaped, books.participants, books.own_references) == (1, 1, 2)
        ring.check_integrity()


def test_the_references_of_the_living_stay_when_another_is_killed() -> None:
    name = new_name()
    with processes(name, 2) as (dies, lives), shared_ring(name) as ring:
        put(ring, *range(8))
        for process in (dies, lives):
            process.call("pin", keys(*range(8)))
        dies.kill()
        assert ring.claim(keys("x")).outcome.tolist() == [Outcome.NO_SPACE]
        assert ring.statistics().pinned == 8


def test_what_a_killed_process_published_stays() -> None:
    name = new_name()
    with processes(name, 1) as (writer,), shared_ring(name) as ring:
        writer.call("put", "a")
        writer.kill()
        assert shows(ring, "a")


def test_a_second_release_takes_nobody_elses_reference() -> None:  # case C-45
    name = new_name()
    with processes(name, 1) as (other,), shared_ring(name) as ring:
        put(ring, "a")
        claim = other.call("pin", keys("a"))
        with pytest.raises(Exception, match="hold no reference"):
            ring.release(claim.slots)
        assert not ring.drop(keys("a")).any()
        assert ring.statistics().pinned == 1


def test_the_death_of_a_process_is_seen_although_its_forked_child_lives() -> None:
    name = new_name()
    with processes(name, 1) as (owner,), shared_ring(name) as ring:
        owner.call("claim", keys("a"))
        child = owner.call("fork_and_stay")
        claim = ring.claim(keys("a"))
        owner.kill()
        outcome = wait(ring, claim)
        os.kill(child, signal.SIGKILL)
        assert outcome == [Outcome.FAILED]


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_survives_kills_in_the_middle_of_anything(seed: int) -> None:
    name = new_name()
    random = np.random.default_rng(seed)
    with shared_ring(name) as ring:
        for _ in range(2):
            with processes(name, 2) as victims:
                for number, victim in enumerate(victims):
                    victim.start("hammer_forever", number)
                hammer(ring, seed, int(random.integers(5, 50)))
                victims[0].kill()
                hammer(ring, seed, 20)
        end = time.monotonic() + 60
        while ring.statistics().participants > 1 and time.monotonic() < end:
            # whoever joins looks for the dead, whose memory and lock stay while `ps` looks at them
            shared_ring(name).close()
        books = ring.statistics()
        assert (books.reaped, books.participants, books.pinned, books.loading) == (4, 1, 0, 0)
        ring.check_integrity()
        put(ring, *range(8))
    assert not region_path(name).exists()
