"""What each eviction policy promises (`ucm_core.store.ring`), and what all of them do: cases C-46, C-63."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from rings import fill, keys, parent_keys, private_ring, put, usable

from ucm_core.ops.config import RingPolicy
from ucm_core.store import ring as ring_module
from ucm_core.store.ring import Claims, Outcome, Ring, RingOptions

POLICIES: tuple[RingPolicy, ...] = ("clock", "fifo", "lru", "sieve")
OWNER, READY, NO_SPACE = Outcome.OWNER, Outcome.READY, Outcome.NO_SPACE


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> RingPolicy:
    return request.param  # type: ignore[no-any-return]


def ring_of(slots: int, policy: RingPolicy = "clock", ttl_s: float | None = None) -> Ring:
    return private_ring(slots, options=RingOptions(policy, ttl_s))


def claim_prefix(ring: Ring, name: str, begin: int, end: int, **how: bool) -> Claims:
    """Claim blocks [begin, end) of a prefix, fill what is ours and let go."""
    names = [(name, block) for block in range(begin, end)]
    before = parent_keys(names, {(name, block): (name, block - 1) for block in range(1, end)})
    claims = ring.claim(keys(*names), before, **how)
    fill(ring, claims, keys(*names))
    ring.release(claims.slots[claims.slots >= 0])
    return claims


def blocks_there(ring: Ring, name: str, count: int) -> int:
    return usable(ring, *[(name, block) for block in range(count)])


def hits(slots: int, policy: RingPolicy, trace: list[int]) -> int:
    """How often a ring of this policy has what is asked for next."""
    found = 0
    with ring_of(slots, policy) as ring:
        assert ring.statistics().policy == policy
        for number in trace:
            found += int(ring.lookup(keys(number))[0])
            put(ring, number)
    return found


# -- textbooks: every policy once more, as it is taught


def fifo_hits(slots: int, trace: list[int]) -> int:
    queue, found = deque[int](maxlen=slots), 0
    for number in trace:
        if number in queue:
            found += 1
        else:
            queue.append(number)
    return found


def lru_hits(slots: int, trace: list[int]) -> int:
    order, found = OrderedDict[int, None](), 0
    for number in trace:
        found += number in order
        order[number] = None
        order.move_to_end(number)
        if len(order) > slots:
            order.popitem(last=False)
    return found


def clock_hits(slots: int, trace: list[int]) -> int:
    frames: list[int | None] = [None] * slots
    bits, hand, found = [False] * slots, 0, 0
    for number in trace:
        if number in frames:
            found += 1
            bits[frames.index(number)] = True
            continue
        while bits[hand]:
            bits[hand] = False
            hand = (hand + 1) % slots
        frames[hand] = number
        hand = (hand + 1) % slots
    return found


def sieve_hits(slots: int, trace: list[int]) -> int:
    queue: list[int] = []  # oldest first
    visited, hand, found = set[int](), 0, 0
    for number in trace:
        if number in queue:
            found += 1
            visited.add(number)
            continue
        if len(queue) == slots:
            while queue[hand] in visited:
                visited.remove(queue[hand])
                hand = (hand + 1) % slots
            del queue[hand]
            hand %= slots - 1
        queue.append(number)
    return found


TEXTBOOKS: dict[RingPolicy, Callable[[int, list[int]], int]] = {
    "clock": clock_hits,
    "fifo": fifo_hits,
    "lru": lru_hits,
    "sieve": sieve_hits,
}


def mixed_trace(seed: int) -> list[int]:
    """Popular and unpopular numbers; between two of them one that never comes again, so LRU knows no ties."""
    random = np.random.default_rng(seed)
    popular = random.zipf(1.3, 150) % 40
    return [int(number) for pair in zip(popular, range(1000, 1150), strict=True) for number in pair]


@pytest.mark.parametrize("seed", range(3))
def test_every_policy_hits_as_often_as_its_textbook_says(policy: RingPolicy, seed: int) -> None:
    trace = mixed_trace(seed)
    assert hits(8, policy, trace) == TEXTBOOKS[policy](8, trace)


def test_there_is_a_trace_on_which_all_four_differ() -> None:
    found = {policy: hits(8, policy, mixed_trace(1)) for policy in POLICIES}
    assert found == {policy: TEXTBOOKS[policy](8, mixed_trace(1)) for policy in POLICIES}
    assert len(set(found.values())) == 4, found


class TestPrefixes:
    """A prefix goes from its tail, under every policy."""

    def test_one_that_outgrows_the_ring_keeps_its_head(self, policy: RingPolicy) -> None:  # case C-63
        with ring_of(8, policy) as ring:
            for begin in (0, 4, 8):
                claims = claim_prefix(ring, "a", begin, begin + 4)
            assert claims.outcome.tolist() == [NO_SPACE] * 4
            assert blocks_there(ring, "a", 12) == 8

    @pytest.mark.parametrize("step", [1, 3, 5])
    def test_so_it_does_however_it_grows(self, policy: RingPolicy, step: int) -> None:
        with ring_of(8, policy) as ring:
            for begin in range(0, 40, step):
                claim_prefix(ring, "a", begin, begin + step)
                assert blocks_there(ring, "a", 40) == min(8, begin + step)

    def test_a_second_prefix_takes_the_tail_of_the_first(self, policy: RingPolicy) -> None:  # case C-63
        with ring_of(8, policy) as ring:
            claim_prefix(ring, "a", 0, 8)
            ring.touch(keys(("a", 0)))
            claim_prefix(ring, "b", 0, 3)
            assert (blocks_there(ring, "a", 8), blocks_there(ring, "b", 3)) == (5, 3)

    def test_the_common_head_outlives_both_tails(self, policy: RingPolicy) -> None:
        with ring_of(6, policy) as ring:
            claim_prefix(ring, "a", 0, 4)
            other = ring.claim(keys("x", "y"), keys(("a", 1), "x"))
            fill(ring, other, keys("x", "y"))
            ring.release(other.slots)
            claim_prefix(ring, "b", 0, 4)
            assert blocks_there(ring, "a", 4) == 2
            assert ring.lookup(keys("x", "y")).tolist() == [0, 0]

    def test_what_a_new_block_follows_is_not_evicted_for_it(self, policy: RingPolicy) -> None:
        with ring_of(2, policy) as ring:
            put(ring, "a", "b")
            for name in ("b", "a"):
                claims = ring.claim(keys("c"), keys(name))
                assert ring.lookup(keys(name)).tolist() == [1]
                ring.abort(claims.slots)
                put(ring, "a", "b")

    def test_a_hole_that_is_filled_again_is_part_of_the_prefix(self, policy: RingPolicy) -> None:
        with ring_of(4, policy) as ring:
            claim_prefix(ring, "a", 0, 4)
            ring.drop(keys(("a", 1)))
            claim_prefix(ring, "a", 0, 4)
            put(ring, "x", "y")
            assert blocks_there(ring, "a", 4) == 2
            ring.check_integrity()

    def test_nobody_can_tie_blocks_to_each_other_for_ever(self, policy: RingPolicy) -> None:
        with ring_of(2, policy) as ring:
            put(ring, "a", "b")
            for name, before in (("a", "b"), ("b", "a"), ("a", "a")):
                ring.release(ring.claim(keys(name, "c"), keys(before, before)).slots[:1])
            put(ring, "x")
            ring.check_integrity()

    def test_a_prefix_appended_block_by_block_goes_from_its_tail(self, policy: RingPolicy) -> None:
        with ring_of(64, policy) as ring:
            for block in range(64):
                claim_prefix(ring, "a", block, block + 1, demand=True)
            put(ring, *range(24))
            assert blocks_there(ring, "a", 64) == 40


class TestBounds:
    """NO_SPACE or progress, always in bounded time."""

    def test_one_block_more_than_slots(self, policy: RingPolicy) -> None:
        with ring_of(1024, policy) as ring:
            put(ring, *range(1025 - 1))
            put(ring, 1024)
            statistics = ring.statistics()
            assert (statistics.ready, statistics.evictions) == (1024, 1)

    def test_everything_pinned(self, policy: RingPolicy) -> None:  # case C-46
        with ring_of(8, policy) as ring:
            held = ring.claim(keys(*range(8)))
            fill(ring, held, keys(*range(8)))
            assert ring.claim(keys("ninth")).outcome.tolist() == [NO_SPACE]
            ring.release(held.slots[:1])
            assert ring.claim(keys("ninth")).slots.tolist() == held.slots[:1].tolist()

    def test_a_batch_larger_than_the_ring(self, policy: RingPolicy) -> None:
        with ring_of(8, policy) as ring:
            put(ring, *"abcdefgh")
            claims = ring.claim(keys(*range(12)))
            assert claims.outcome.tolist() == [OWNER] * 8 + [NO_SPACE] * 4

    def test_a_ring_of_one_slot(self, policy: RingPolicy) -> None:
        with ring_of(1, policy) as ring:
            put(ring, "a")
            claims = ring.claim(keys("b", "c"))
            assert claims.outcome.tolist() == [OWNER, NO_SPACE]
            ring.abort(claims.slots[:1])
            put(ring, "c")
            assert ring.lookup(keys("a", "b", "c")).tolist() == [0, 0, 1]

    def test_fifty_who_need_six_of_eight_all_end_and_somebody_gets_on(self, policy: RingPolicy) -> None:
        with ring_of(8, policy) as ring:  # case C-46
            outcomes: list[bool] = []
            start = threading.Barrier(50)

            def need_six(number: int) -> None:
                wanted = keys(*[(number, part) for part in range(6)])
                start.wait()
                claims = ring.claim(wanted, whole=True)
                served = bool((claims.slots >= 0).all())
                if served:
                    fill(ring, claims, wanted)
                    ring.release(claims.slots)
                outcomes.append(served)

            threads = [threading.Thread(target=need_six, args=(number,)) for number in range(50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=60)
            assert len(outcomes) == 50
            assert any(outcomes)
            assert ring.statistics().own_references == 0
            ring.check_integrity()


class TestWhole:
    """All of a batch or none; what would have had to go stays as it was."""

    def test_a_batch_that_does_not_fit_changes_nothing(self, policy: RingPolicy) -> None:
        with ring_of(8, policy) as ring:
            claim_prefix(ring, "a", 0, 8)
            before = ring.pin(keys(*[("a", block) for block in range(4)]))
            ring.release(before.slots[1:])
            claims = ring.claim(keys(*range(8)), whole=True)
            assert claims.outcome.tolist() == [NO_SPACE] * 8
            assert claims.slots.tolist() == [-1] * 8
            assert blocks_there(ring, "a", 8) == 8
            after = ring.pin(keys(*[("a", block) for block in range(4)]))
            assert after.version.tolist() == before.version.tolist()
            assert ring.statistics().evictions == 0
            ring.check_integrity()

    def test_a_batch_that_fits_is_claimed(self, policy: RingPolicy) -> None:
        with ring_of(8, policy) as ring:
            claim_prefix(ring, "a", 0, 8)
            claims = ring.claim(keys(("a", 0), *range(7)), whole=True)
            assert claims.outcome.tolist() == [READY] + [OWNER] * 7

    def test_what_comes_next_goes_as_if_nobody_had_tried(self, policy: RingPolicy) -> None:
        gone = []
        for tries in (0, 3):
            with ring_of(8, policy) as ring:
                put(ring, *range(8))
                ring.touch(keys(1, 5, 6))
                held = ring.pin(keys(3))
                for _ in range(tries):
                    ring.claim(keys(*"abcdefgh"), whole=True)
                ring.release(held.slots)
                put(ring, *"xyz")
                gone.append(ring.lookup(keys(*range(8))).tolist())
        assert gone[0] == gone[1]


class TestReserve:
    """A sixteenth of the slots is for those who wait for bytes."""

    def test_others_cannot_take_the_last_sixteenth(self, policy: RingPolicy) -> None:
        with ring_of(32, policy) as ring:
            claims = ring.claim(keys(*range(32)))
            assert (claims.slots >= 0).sum() == 30
            assert ring.claim(keys("load", "more", "most"), demand=True).outcome.tolist() == [
                OWNER,
                OWNER,
                NO_SPACE,
            ]

    def test_others_can_have_what_a_load_left_there(self, policy: RingPolicy) -> None:
        with ring_of(32, policy) as ring:
            claim_prefix(ring, "a", 0, 32, demand=True)  # its tail lies in the reserve
            assert (claim_prefix(ring, "b", 0, 4).slots >= 0).all()
            assert blocks_there(ring, "a", 32) == 26


class TestTime:
    """A block is absent from the second on in which its time is over."""

    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
        seconds = [100]
        monkeypatch.setattr(ring_module, "_shared_clock_s", lambda: seconds[0])
        return seconds

    def test_nothing_finds_an_expired_block(self, policy: RingPolicy, now: list[int]) -> None:
        with ring_of(8, policy, ttl_s=10) as ring:
            put(ring, "a")
            now[0] += 9
            assert ring.lookup(keys("a")).tolist() == [1]
            now[0] += 1
            assert ring.lookup(keys("a")).tolist() == [0]
            assert ring.pin(keys("a")).outcome.tolist() == [Outcome.ABSENT]
            assert ring.touch(keys("a")).tolist() == [ring_module.Touch.ABSENT]
            assert ring.claim(keys("a")).outcome.tolist() == [OWNER]

    def test_a_hit_gives_it_its_whole_time_again(self, now: list[int]) -> None:
        with ring_of(8, ttl_s=10) as ring:
            put(ring, "a", "b", "c")
            now[0] += 9
            ring.touch(keys("a"))
            ring.release(ring.pin(keys("b")).slots)
            now[0] += 9
            assert ring.lookup(keys("a", "b", "c")).tolist() == [1, 1, 0]

    def test_what_has_expired_goes_before_what_the_policy_names(
        self, policy: RingPolicy, now: list[int]
    ) -> None:
        with ring_of(4, policy, ttl_s=10) as ring:
            put(ring, "old", "hit")
            now[0] += 5
            put(ring, "a", "b")
            ring.touch(keys("hit"))
            now[0] += 6
            put(ring, "new")
            assert ring.lookup(keys("hit", "a", "b", "new")).tolist() == [1] * 4
            assert (ring.statistics().expired, ring.statistics().evictions) == (1, 0)

    def test_expired_and_pinned_it_goes_with_its_last_pin(self, policy: RingPolicy, now: list[int]) -> None:
        with ring_of(4, policy, ttl_s=10) as ring:
            put(ring, "a")
            reading = ring.pin(keys("a", "a"))
            now[0] += 10
            assert ring.claim(keys("a")).outcome.tolist() == [NO_SPACE]
            ring.release(reading.slots[:1])
            assert ring.statistics().ready == 1
            ring.release(reading.slots[1:])
            assert (ring.statistics().ready, ring.statistics().expired) == (0, 1)

    def test_without_a_time_nothing_expires(self, now: list[int]) -> None:
        with ring_of(4) as ring:
            put(ring, "a")
            now[0] += 10**9
            assert ring.lookup(keys("a")).tolist() == [1]
