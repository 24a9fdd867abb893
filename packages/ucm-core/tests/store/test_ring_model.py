"""The ring against the model on paper: the same calls must get the same slots, states, bytes and victims."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from ring_model import ModelRing
from rings import expected_payload, key, keys, payload, private_ring

from ucm_core.store.ring import Outcome

SLOTS = 5
NAMES = tuple("abcdefgh")
names = st.sampled_from(NAMES)
batches = st.lists(names, min_size=1, max_size=6)


class RingMachine(RuleBasedStateMachine):
    """Both rings get every call; slots in the bundles carry one reference each."""

    owned = Bundle("owned")
    held = Bundle("held")

    @initialize()
    def open(self) -> None:
        self.ring = private_ring(SLOTS)
        self.model = ModelRing(SLOTS)

    @rule(target=owned, batch=batches, into=st.just(Outcome.OWNER))
    def claim_and_keep_what_is_owned(self, batch: list[str], into: Outcome) -> Any:
        answers = self.claim(batch)
        for slot, outcome in answers:
            if slot >= 0 and outcome is not into:
                self.release_both(slot)
        return multiple(*[slot for slot, outcome in answers if outcome is into])

    @rule(target=held, name=names)
    def pin(self, name: str) -> Any:
        claims = self.ring.pin(keys(name))
        slot, outcome = self.model.pin(name)
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

    @rule(batch=batches)
    def touch(self, batch: list[str]) -> None:
        self.ring.touch(keys(*batch))
        for name in batch:
            self.model.touch(name)

    @rule(batch=batches)
    def drop(self, batch: list[str]) -> None:
        assert self.ring.drop(keys(*batch)).tolist() == [self.model.drop(name) for name in batch]

    @invariant()
    def the_same_keys_are_ready(self) -> None:
        slots = [self.model.find(name) for name in NAMES]
        ready = [slot is not None and self.model.at(slot).state is Outcome.READY for slot in slots]
        assert self.ring.lookup(keys(*NAMES)).astype(bool).tolist() == ready

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
        assert books.own_references == sum(block.references for block in blocks)
        assert books.pinned == sum(block.references > 0 for block in blocks)
        states = (Outcome.LOADING, Outcome.READY, Outcome.FAILED)
        assert [books.loading, books.ready, books.failed] == [self.model.count(state) for state in states]
        assert books.empty == len(self.model.free)

    def claim(self, batch: list[str]) -> list[tuple[int, Outcome]]:
        claims = self.ring.claim(keys(*batch))
        answers = self.model.claim(batch)
        assert list(zip(claims.slots.tolist(), claims.outcome.tolist(), strict=True)) == answers
        return answers

    def release_both(self, slot: int) -> None:
        self.ring.release(as_slots(slot))
        self.model.release(slot)

    def teardown(self) -> None:
        if hasattr(self, "ring"):
            self.ring.close()


def as_slots(slot: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([slot], dtype=np.int32)


TestRingAgainstModel = RingMachine.TestCase
TestRingAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
