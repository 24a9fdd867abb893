"""The ring against the model on paper: the same calls must get the same slots, states, bytes and victims."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from ring_model import ModelRing
from rings import expected_payload, key, keys, parent_keys, payload, private_ring

from ucm_core.ops.config import RingPolicy
from ucm_core.store import ring as ring_module
from ucm_core.store.anchors import Anchors
from ucm_core.store.ring import Outcome, RingOptions

numbers = st.integers(0, 47)
batches = st.lists(numbers, min_size=1, max_size=12)
policies = st.sampled_from(("clock", "fifo", "lru", "sieve"))


class RingMachine(RuleBasedStateMachine):
    """Both rings get every call; slots in the bundles carry one reference each."""

    slots = 5
    names = 8
    longest = 6

    owned = Bundle("owned")
    held = Bundle("held")

    @initialize(policy=policies, ttl_s=st.sampled_from((None, None, 3)))
    def open(self, policy: RingPolicy, ttl_s: int | None) -> None:
        self.clock = ring_module._shared_clock_s
        ring_module._shared_clock_s = lambda: self.model.now_s  # a clock that the test turns
        self.model = ModelRing(self.slots, policy, ttl_s)
        self.ring = private_ring(self.slots, options=RingOptions(policy, ttl_s))
        self.ring._anchors = Anchors(capacity=0)  # the model is of what processes share

    @rule(target=owned, numbers=batches, chained=st.booleans(), whole=st.booleans(), demand=st.booleans())
    def claim_and_keep_what_is_owned(self, numbers: list[int], **how: bool) -> Any:
        return self.keep_owned(self.claim(self.some(numbers), {}, **how))

    @rule(target=owned, begin=numbers, count=numbers, whole=st.booleans(), demand=st.booleans())
    def claim_part_of_a_prefix(self, begin: int, count: int, **how: bool) -> Any:
        begin, end = begin % self.names, min(begin % self.names + 1 + count % self.longest, self.names)
        batch = [str(number) for number in range(begin, end)]
        return self.keep_owned(self.claim(batch, {name: str(int(name) - 1) for name in batch}, **how))

    @rule(target=owned, numbers=batches, parents=st.dictionaries(numbers, numbers, max_size=4))
    def claim_what_cannot_be_a_prefix(self, numbers: list[int], parents: dict[int, int]) -> Any:
        named = {self.name(one): self.name(other) for one, other in parents.items()}
        return self.keep_owned(self.claim(self.some(numbers), named))

    @rule(numbers=batches, chained=st.booleans(), demand=st.booleans())
    def put(self, numbers: list[int], **how: bool) -> None:
        for slot, outcome in self.claim(self.some(numbers), {}, **how):
            if outcome is Outcome.OWNER:
                self.publish(slot)
            if slot >= 0:
                self.release_both(slot)

    @rule(target=held, number=numbers)
    def pin(self, number: int) -> Any:
        claims = self.ring.pin(keys(self.name(number)))
        slot, outcome = self.model.pin(self.name(number))
        assert (claims.slots[0], claims.outcome[0]) == (slot, outcome)
        return multiple(*[slot] * (slot >= 0))

    @rule(target=held, slot=consumes(owned))
    def publish(self, slot: int) -> int:
        payload(self.ring, slot)[:] = expected_payload(key(self.model.at(slot).key))
        assert self.ring.publish(as_slots(slot)).all()
        self.model.publish(slot)
        return slot

    @rule(slot=consumes(owned))
    def abort(self, slot: int) -> None:
        assert self.ring.abort(as_slots(slot)).all()
        self.model.abort(slot)

    @rule(slot=consumes(held))
    def release(self, slot: int) -> None:
        self.release_both(slot)

    @rule(numbers=batches)
    def touch(self, numbers: list[int]) -> None:
        self.ring.touch(keys(*self.some(numbers)))
        for name in self.some(numbers):
            self.model.touch(name)

    @rule(numbers=batches)
    def drop(self, numbers: list[int]) -> None:
        batch = self.some(numbers)
        assert self.ring.drop(keys(*batch)).tolist() == [self.model.drop(name) for name in batch]

    @rule(seconds=st.integers(1, 2))
    def let_time_pass(self, seconds: int) -> None:
        self.model.now_s += seconds

    @invariant()
    def the_same_keys_are_ready(self) -> None:
        names = self.some(list(range(self.names)))
        assert self.ring.lookup(keys(*names)).tolist() == [self.model.ready(name) for name in names]

    @invariant()
    def every_ready_slot_shows_its_bytes(self) -> None:
        for slot, block in enumerate(self.model.blocks):
            if block is not None and block.state is Outcome.READY:
                assert (payload(self.ring, slot) == expected_payload(key(block.key))).all()

    @invariant()
    def the_books_agree(self) -> None:
        self.ring.check_integrity()
        books = self.ring.statistics()
        blocks = [block for block in self.model.blocks if block is not None]
        assert books.policy == self.model.policy
        assert books.own_references == sum(block.references for block in blocks)
        assert books.pinned == sum(block.references > 0 for block in blocks)
        states = (Outcome.LOADING, Outcome.READY, Outcome.FAILED)
        assert [books.loading, books.ready, books.failed] == [self.model.count(state) for state in states]
        assert books.empty == len(self.model.free) + len(self.model.spare)

    def claim(self, batch: list[str], parents: dict[str, str], **how: bool) -> list[tuple[int, Outcome]]:
        if how.pop("chained", False):
            parents = dict(zip(batch[1:], batch, strict=False))
        claims = self.ring.claim(keys(*batch), parent_keys(batch, parents), **how)
        answers = self.model.claim(batch, parents, **how)
        assert list(zip(claims.slots.tolist(), claims.outcome.tolist(), strict=True)) == answers
        return answers

    def keep_owned(self, answers: list[tuple[int, Outcome]]) -> Any:
        for slot, outcome in answers:
            if slot >= 0 and outcome is not Outcome.OWNER:
                self.release_both(slot)
        return multiple(*[slot for slot, outcome in answers if outcome is Outcome.OWNER])

    def release_both(self, slot: int) -> None:
        self.ring.release(as_slots(slot))
        self.model.release(slot)

    def name(self, number: int) -> str:
        return str(number % self.names)

    def some(self, numbers: list[int]) -> list[str]:
        return [self.name(number) for number in numbers[: self.longest]]

    def teardown(self) -> None:
        if hasattr(self, "ring"):
            self.ring.close()
            ring_module._shared_clock_s = self.clock


class ReserveMachine(RingMachine):
    """A ring that is large enough for a reserve of two slots."""

    slots = 32
    names = 48
    longest = 12


def as_slots(slot: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([slot], dtype=np.int32)


TestRingAgainstModel = RingMachine.TestCase
TestRingAgainstModel.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestReserveAgainstModel = ReserveMachine.TestCase
TestReserveAgainstModel.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
