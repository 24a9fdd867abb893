"""Many requests at once on one ring: nobody waits for ever, nobody does another's work."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest
from rings import fill, keys, private_ring, shows, wait

from ucm_core.errors import ClosedError
from ucm_core.spec.keys import Keys
from ucm_core.store.ring import Outcome, Ring

REQUESTS = 50


Result = TypeVar("Result")


def all_at_once(work: Callable[[int], Result]) -> list[Result]:
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(work, range(REQUESTS)))


def test_fifty_requests_for_the_same_blocks_read_each_once() -> None:  # case C-47
    wanted = keys(*range(10))
    everybody_claimed = threading.Barrier(REQUESTS)

    def request(_: int) -> tuple[int, bool]:
        claims = ring.claim(wanted)
        everybody_claimed.wait()  # so long does the medium take
        fill(ring, claims, wanted)
        outcomes = wait(ring, claims)
        ring.release(claims.slots)
        return int((claims.outcome == Outcome.OWNER).sum()), set(outcomes) == {Outcome.READY}

    with private_ring(10) as ring:
        read, ready = zip(*all_at_once(request), strict=True)
        assert (sum(read), all(ready)) == (10, True)
        assert all(shows(ring, name) for name in range(10))
        assert ring.statistics().pinned == 0


def test_requests_that_need_most_of_the_ring_all_end() -> None:  # case C-46: 50 requests of 6 blocks, 8 slots
    with private_ring(8) as ring:
        served = all_at_once(lambda number: serve(ring, number))
        assert any(served)
        books = ring.statistics()
        assert (books.pinned, books.loading) == (0, 0)
        ring.check_integrity()


def serve(ring: Ring, number: int) -> bool:
    """All six blocks, or nothing: a request that gets too few slots gives them back and computes instead."""
    wanted = keys(*(f"{number}.{block}" for block in range(6)))
    claims = ring.claim(wanted)
    held = claims.slots[claims.slots >= 0]
    if held.size < 6:
        ring.abort(held)
        return False
    fill(ring, claims, wanted)
    everything = all(shows(ring, f"{number}.{block}") for block in range(6))
    ring.release(held)
    assert everything
    return True


def test_when_everything_is_held_all_claims_end_without_a_slot() -> None:
    with private_ring(8) as ring:
        held = ring.claim(keys(*range(8)))
        outcomes = all_at_once(
            lambda number: ring.claim(keys(*(f"{number}.{i}" for i in range(100)))).outcome
        )
        assert all((outcome == Outcome.NO_SPACE).all() for outcome in outcomes)
        fill(ring, held, keys(*range(8)))
        ring.release(held.slots)
        ring.check_integrity()


def test_of_fifty_claimers_of_one_key_one_is_owner() -> None:
    with private_ring(8) as ring:
        outcomes = [int(claims.outcome[0]) for claims in all_at_once(lambda _: ring.claim(keys("a")))]
        assert sorted(outcomes) == [Outcome.OWNER] + [Outcome.LOADING] * (REQUESTS - 1)
        assert ring.statistics().own_references == REQUESTS


@pytest.fixture(params=[1e-6, 5e-3], ids=["switching all the time", "switching rarely"])
def switching(request: pytest.FixtureRequest) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("round_", range(2))
def test_calls_that_keep_the_gil_and_those_that_wait_all_end_when_the_ring_closes(round_: int) -> None:
    """A short look keeps the GIL and may meet the closer; who holds the closer off needs no GIL to end."""
    ring, wanted, many = private_ring(8), keys(*range(12)), keys(*range(5000))
    begun = threading.Barrier(len(WORK) + 2)

    def until_closed(work: Callable[[], object]) -> bool:
        begun.wait()
        try:
            for _ in itertools.count():
                work()
        except ClosedError:
            return True

    def close() -> bool:
        begun.wait()
        ring.close()
        return True

    with ThreadPoolExecutor(len(WORK) + 2) as pool:
        calls = [pool.submit(until_closed, partial(work, ring, wanted, many)) for work in WORK]
        calls += [pool.submit(close) for _ in range(2)]
        assert all(call.result(timeout=60) for call in calls)


def _claim_and_fill(ring: Ring, wanted: Keys, _: Keys) -> None:
    claims = ring.claim(wanted)
    fill(ring, claims, wanted)
    ring.release(claims.slots[claims.slots >= 0])


def _pin_and_release(ring: Ring, wanted: Keys, _: Keys) -> None:
    claims = ring.pin(wanted)
    ring.release(claims.slots[claims.slots >= 0])


def _claim_and_wait(ring: Ring, wanted: Keys, _: Keys) -> None:
    claims = ring.claim(wanted[::-1])
    ring.abort(claims.slots[claims.outcome == Outcome.OWNER])
    others = (claims.slots >= 0) & (claims.outcome != Outcome.OWNER)
    ring.wait(claims.slots[others], claims.version[others], timeout_s=60)
    ring.release(claims.slots[others])


WORK: list[Callable[[Ring, Keys, Keys], object]] = [
    lambda ring, wanted, many: ring.lookup(wanted),
    lambda ring, wanted, many: ring.lookup(many),
    lambda ring, wanted, many: ring.touch(wanted),
    _pin_and_release,
    _claim_and_fill,
    _claim_and_wait,
    lambda ring, wanted, many: ring.statistics(),
    lambda ring, wanted, many: ring.drop(wanted),
]
