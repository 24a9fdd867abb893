"""The ring in one process: what each call promises."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from rings import (
    PAYLOAD_BYTES,
    expected_payload,
    fill,
    key,
    keys,
    new_name,
    payload,
    private_ring,
    put,
    shared_ring,
    shows,
    usable,
    wait,
)

from ucm_core.errors import ClosedError, StoreError
from ucm_core.store import ring as ring_module
from ucm_core.store.ring import Outcome, Touch


def test_what_is_published_is_found_with_its_bytes() -> None:
    with private_ring() as ring:
        put(ring, "a", "b")
        assert ring.lookup(keys("a", "x", "b")).tolist() == [1, 0, 1]
        assert shows(ring, "a")
        assert shows(ring, "b")


def test_an_empty_batch_is_an_empty_answer() -> None:
    with private_ring() as ring:
        none = np.zeros((0, 32), dtype=np.uint8)
        assert ring.claim(none).slots.size == ring.pin(none).slots.size == ring.lookup(none).size == 0
        assert ring.abort(np.zeros(0, dtype=np.int32)).size == 0


def test_addresses_are_aligned_and_do_not_overlap() -> None:
    with private_ring() as ring:
        addresses = np.sort(ring.addresses(np.arange(8, dtype=np.int32)))
        assert (addresses % 4096 == 0).all()
        assert (np.diff(addresses) == PAYLOAD_BYTES).all()


def test_a_claim_is_not_readable_before_it_is_published() -> None:
    with private_ring() as ring:
        claims = ring.claim(keys("a"))
        assert ring.lookup(keys("a")).tolist() == [0]
        assert ring.claim(keys("a")).outcome.tolist() == [Outcome.LOADING]
        assert ring.pin(keys("a")).outcome.tolist() == [Outcome.LOADING]
        fill(ring, claims, keys("a"))
        assert ring.claim(keys("a")).outcome.tolist() == [Outcome.READY]


def test_pin_never_makes_an_owner() -> None:
    with private_ring() as ring:
        claims = ring.pin(keys("a"))
        assert (claims.slots.tolist(), claims.outcome.tolist()) == ([-1], [Outcome.ABSENT])
        assert ring.statistics().empty == 8


def test_an_aborted_claim_leaves_nothing() -> None:  # case C-43
    with private_ring(1) as ring:
        put(ring, "old")
        ring.drop(keys("old"))
        claims = ring.claim(keys("a"))
        payload(ring, claims.slots[0])[:10] = 1
        assert ring.abort(claims.slots, claims.version).all()
        assert ring.lookup(keys("a", "old")).tolist() == [0, 0]
        assert ring.statistics().empty == 1
        assert ring.claim(keys("a")).outcome.tolist() == [Outcome.OWNER]


def test_keys_are_compared_over_all_bytes() -> None:
    with private_ring() as ring:
        twins = np.repeat(keys("a"), 33, axis=0)
        twins[np.arange(1, 33), np.arange(32)] ^= 1
        claims = ring.claim(twins[:1])
        fill(ring, claims, twins[:1])
        assert ring.lookup(twins).tolist() == [1] + [0] * 32


def test_a_key_twice_in_a_batch_is_one_slot() -> None:
    with private_ring() as ring:
        claims = ring.claim(keys("a", "b", "a"))
        assert claims.outcome.tolist() == [Outcome.OWNER, Outcome.OWNER, Outcome.LOADING]
        assert claims.slots[0] == claims.slots[2]
        assert ring.statistics().empty == 6
        ring.check_integrity()


def test_referenced_slots_are_never_reused() -> None:  # case C-46, first half
    with private_ring() as ring:
        held = ring.claim(keys(*range(8)))
        fill(ring, held, keys(*range(8)))
        ninth = ring.claim(keys("ninth", "tenth"))
        assert ninth.outcome.tolist() == [Outcome.NO_SPACE] * 2
        assert ninth.slots.tolist() == [-1, -1]
        ring.release(held.slots[3:4])
        assert ring.claim(keys("ninth")).slots.tolist() == held.slots[3:4].tolist()
        assert ring.lookup(keys(*range(8))).tolist() == [1, 1, 1, 0, 1, 1, 1, 1]


def test_a_batch_never_evicts_its_own_members() -> None:
    with private_ring(4) as ring:
        put(ring, 0, 1, 2, 3)
        claims = ring.claim(keys(4, 5, 0, 1, 2))
        assert claims.outcome.tolist() == [
            Outcome.OWNER,
            Outcome.NO_SPACE,
            Outcome.READY,
            Outcome.READY,
            Outcome.READY,
        ]
        assert ring.lookup(keys(0, 1, 2, 3)).tolist() == [1, 1, 1, 0]


def test_the_version_tells_stays_of_one_key_in_one_slot_apart() -> None:  # case C-65
    with private_ring(1) as ring:
        put(ring, "a")
        first = ring.pin(keys("a"))
        ring.release(first.slots)
        put(ring, "b")
        put(ring, "a")
        again = ring.pin(keys("a"))
        assert again.slots.tolist() == first.slots.tolist()
        assert again.version[0] == first.version[0] + 2
        assert wait(ring, first, 0) == [Outcome.FAILED]


def test_bytes_stay_while_a_reference_is_held() -> None:  # case C-65, the other half: the reuse waits
    with private_ring(1) as ring:
        put(ring, "a")
        reading = ring.pin(keys("a"))
        assert ring.claim(keys("b")).outcome.tolist() == [Outcome.NO_SPACE]
        assert not ring.drop(keys("a")).any()
        assert (payload(ring, reading.slots[0]) == expected_payload(key("a"))).all()


def test_a_late_writer_is_stopped_by_the_version() -> None:  # case C-49
    with private_ring(1) as ring:
        late = ring.claim(keys("a"))
        ring.abort(late.slots, late.version)
        now = ring.claim(keys("b"))
        assert now.slots.tolist() == late.slots.tolist()
        assert ring.publish(late.slots, late.version).tolist() == [False]
        assert ring.abort(late.slots, late.version).tolist() == [False]
        assert ring.claim(keys("b")).outcome.tolist() == [Outcome.LOADING]


def test_an_illegal_move_changes_nothing() -> None:
    with private_ring() as ring:
        put(ring, "a")
        held = ring.pin(keys("a"))
        assert ring.publish(held.slots).tolist() == [False]
        assert ring.abort(held.slots).tolist() == [False]
        assert ring.statistics().own_references == 1
        assert shows(ring, "a")


def test_a_second_release_is_an_error_and_takes_nothing() -> None:
    with private_ring() as ring:
        put(ring, "a")
        held = ring.pin(keys("a"))
        ring.release(held.slots)
        with pytest.raises(StoreError, match="hold no reference"):
            ring.release(held.slots)
        assert ring.statistics().own_references == 0


def test_drop_forgets_only_what_is_there_and_idle() -> None:
    with private_ring() as ring:
        put(ring, "a", "b")
        held = ring.pin(keys("b"))
        assert ring.drop(keys("a", "b", "c")).tolist() == [True, False, False]
        assert ring.lookup(keys("a", "b")).tolist() == [0, 1]
        ring.release(held.slots)


def test_slots_out_of_range_are_refused_before_anything_happens() -> None:
    with private_ring() as ring:
        mine = ring.claim(keys("a"))
        for call in (ring.abort, ring.publish, ring.release, ring.addresses):
            with pytest.raises(IndexError, match=r"slot -1 is not in \[0, 8\)"):
                call(np.array([-1, mine.slots[0]], dtype=np.int32))
        assert ring.statistics().loading == 1


@pytest.mark.parametrize("number", [np.int64(1 << 32), np.int64(-1 << 32), 0.5, float("nan")])
def test_a_number_that_is_no_slots_reaches_no_slot(number: float) -> None:
    with private_ring() as ring:
        mine = ring.claim(keys("a"))
        for call in (ring.abort, ring.publish, ring.release, ring.addresses):
            with pytest.raises(IndexError, match="are not all whole numbers that int32 holds"):
                call(mine.slots + number)
        assert ring.statistics().own_references == 1


@pytest.mark.parametrize("timeout_s", [0.01, 0.0, -1.0, float("-inf"), float("nan")])
def test_wait_times_out_while_the_owner_lives(timeout_s: float) -> None:
    with private_ring() as ring:
        claims = ring.claim(keys("a"))
        assert wait(ring, claims, timeout_s) == [Outcome.TIMEOUT]


def test_a_waiter_is_woken_by_abort_and_may_take_over() -> None:
    with private_ring() as ring:
        mine = ring.claim(keys("a"))
        other = ring.claim(keys("a"))
        outcomes: list[int] = []
        waiter = threading.Thread(target=lambda: outcomes.extend(wait(ring, other)))
        waiter.start()
        ring.abort(mine.slots, mine.version)
        waiter.join()
        assert outcomes == [Outcome.FAILED]
        assert ring.claim(keys("a")).outcome.tolist() == [
            Outcome.OWNER
        ]  # while the failed stay is referenced
        ring.release(other.slots)
        ring.check_integrity()


@pytest.mark.parametrize(
    ("slots", "payload_bytes", "message"),
    [(0, 4096, "slots 0"), (8, 100, "payload_bytes 100"), (8, 0, "0 is not")],
)
def test_sizes_that_make_no_sense_are_refused(slots: int, payload_bytes: int, message: str) -> None:
    from ucm_core.store.ring import Ring

    with pytest.raises(ValueError, match=message):
        Ring.open(None, slots=slots, payload_bytes=payload_bytes, geometry_digest=bytes(32))


def test_arrays_of_the_wrong_kind_are_refused() -> None:
    with private_ring() as ring:
        with pytest.raises(TypeError):
            ring.lookup(np.zeros((2, 16), dtype=np.uint8))
        with pytest.raises(TypeError):
            ring.claim(np.zeros((2, 32), dtype=np.int64))


def test_after_close_every_call_is_refused() -> None:
    ring = private_ring()
    ring.close()
    ring.close()
    assert ring.closed
    for call in (
        lambda: ring.lookup(keys("a")),
        lambda: ring.claim(keys("a")),
        ring.statistics,
        ring.check_integrity,
    ):
        with pytest.raises(ClosedError):
            call()


def test_close_ends_the_waits_of_other_threads() -> None:
    ring = private_ring()
    claims = ring.claim(keys("a"))
    errors: list[Exception] = []

    def sleep_in_the_ring() -> None:
        try:
            wait(ring, claims, 600)
        except ClosedError as error:
            errors.append(error)

    waiter = threading.Thread(target=sleep_in_the_ring)
    waiter.start()
    ring.close()
    waiter.join()
    assert len(errors) == 1


def test_a_late_copy_after_close_reaches_nobody() -> None:  # case C-62
    ring = private_ring()
    put(ring, "a")
    memory = payload(ring, 0)
    ring.close()
    assert memory.sum() == 0
    memory[:] = 1  # neither a crash nor a write to what others share


def test_a_forked_child_is_refused() -> None:
    with private_ring() as ring:
        put(ring, "a")
        child = os.fork()
        if child == 0:
            try:
                ring.lookup(keys("a"))
            except ClosedError as error:
                os._exit(42 if "open it again after a fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        assert shows(ring, "a")


class TestClock:
    """What the eviction policy promises, case C-63 included."""

    def test_what_was_hit_outlives_what_was_not(self) -> None:
        with private_ring() as ring:
            put(ring, *range(8))
            ring.touch(keys(0, 1, 2, 3))
            put(ring, *"wxyz")
            assert ring.lookup(keys(*range(8))).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]

    def test_a_hit_is_a_touch(self) -> None:
        with private_ring(2) as ring:
            put(ring, "a", "b")
            ring.release(ring.claim(keys("b")).slots)
            put(ring, "c")
            assert ring.lookup(keys("a", "b", "c")).tolist() == [0, 1, 1]

    def test_insertion_is_not_a_hit(self) -> None:
        with private_ring(2) as ring:
            put(ring, "a", "b")
            put(ring, "c")
            put(ring, "d")
            assert ring.lookup(keys("a", "b", "c", "d")).tolist() == [0, 0, 1, 1]

    def test_a_bit_buys_one_round(self) -> None:
        with private_ring(2) as ring:
            put(ring, "a", "b")
            ring.touch(keys("a", "b"))
            put(ring, "c")
            put(ring, "d")
            assert ring.lookup(keys("a", "b")).tolist() == [0, 0]

    def test_of_one_batch_the_tail_goes_first(self) -> None:
        with private_ring() as ring:
            put(ring, *range(8))
            put(ring, *"xyz")
            assert usable(ring, *range(8)) == 5

    def test_a_batch_larger_than_the_ring_keeps_its_head(self) -> None:
        with private_ring() as ring:
            claims = ring.claim(keys(*range(12)))
            assert claims.outcome.tolist() == [Outcome.OWNER] * 8 + [Outcome.NO_SPACE] * 4

    def test_a_prefix_held_while_it_grows_keeps_its_head(
        self,
    ) -> None:  # case C-63: 12 blocks, 3 steps, 8 slots
        with private_ring() as ring:
            for begin in (0, 4, 8):
                wanted = keys(*range(begin + 4))
                claims = ring.claim(wanted)
                fill(ring, claims, wanted)
                ring.release(claims.slots[claims.slots >= 0])
            assert usable(ring, *range(12)) == 8

    def test_empty_slots_are_used_before_anything_is_evicted(self) -> None:
        with private_ring() as ring:
            put(ring, *range(8))
            ring.drop(keys(6, 2))
            put(ring, "x", "y")
            assert ring.lookup(keys(0, 1, 3, 4, 5, 7)).all()


class TestTouches:
    """Who is to pass a touch on to the medium: once per interval and key, among all processes."""

    def test_the_first_of_two_participants_passes_it_on(self) -> None:
        name = new_name()
        with shared_ring(name) as one, shared_ring(name) as other:
            put(one, "a")
            assert one.touch(keys("a", "b")).tolist() == [Touch.DUE, Touch.ABSENT]
            assert other.touch(keys("a")).tolist() == [Touch.KNOWN]

    def test_it_is_due_again_after_the_interval(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now_s = 5000.0
        monkeypatch.setattr(ring_module.time, "monotonic", lambda: now_s)
        with private_ring() as ring:
            put(ring, "a")
            found = []
            for step_s in (0, 59, 1, 59):
                now_s += step_s
                found += ring.touch(keys("a"), interval_s=60).tolist()
            assert found == [Touch.DUE, Touch.KNOWN, Touch.DUE, Touch.KNOWN]

    def test_a_new_stay_begins_untouched(self) -> None:
        with private_ring(1) as ring:
            put(ring, "a")
            ring.touch(keys("a"))
            put(ring, "b")
            assert ring.touch(keys("b")).tolist() == [Touch.DUE]
