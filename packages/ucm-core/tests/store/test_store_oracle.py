"""Stores with and without a ring against the double that keeps everything in a dict, under any calls."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stores import open_store

from ucm_core.flow.ticket import Ticket
from ucm_core.store.absent import ObjectStore
from ucm_core.store.geometry import Geometry
from ucm_core.testing.block_store import WAIT_S, FaultyBlocks, blank, keys_of, payloads_of
from ucm_core.testing.memory_store import MemoryStore

GEOMETRY = Geometry(2, 5000)
ALL = range(10)
NUMBER = st.integers(0, max(ALL))
NUMBERS = st.lists(NUMBER, max_size=7)
BROKEN = st.sets(st.integers(0, 6))


class Twins(RuleBasedStateMachine):
    """The same calls to a real store and to the oracle: the same codes, and the same bytes."""

    slots = 3

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.real = open_store(Path(self.directory.name), GEOMETRY, slots=self.slots)
        self.oracle = MemoryStore(GEOMETRY)

    @property
    def both(self) -> tuple[ObjectStore, ObjectStore]:
        return self.real, self.oracle

    def agree(self, tickets: list[Ticket]) -> None:
        """Equal codes, once nothing is under way: a drop spares what is being written or copied."""
        assert all(ticket.wait(WAIT_S) for ticket in tickets)
        real, oracle = tickets
        real.wait_durable(WAIT_S)
        assert self.real._work.wait_idle(WAIT_S)
        assert real.results.tolist() == oracle.results.tolist()

    @rule(numbers=NUMBERS, broken=BROKEN, inline=st.booleans())
    def save(self, numbers: list[int], broken: set[int], inline: bool) -> None:
        payloads = payloads_of(GEOMETRY, *numbers) if numbers else blank(GEOMETRY, 0)
        keys = keys_of(*numbers)
        self.agree(
            [each.save(keys, FaultyBlocks(payloads, broken), gather_inline=inline) for each in self.both]
        )

    @rule(numbers=NUMBERS, broken=BROKEN)
    def load(self, numbers: list[int], broken: set[int]) -> None:
        outs = [blank(GEOMETRY, len(numbers)) for _ in self.both]
        targets = [FaultyBlocks(out, broken) for out in outs]
        keys = keys_of(*numbers)
        self.agree([each.load(keys, target) for each, target in zip(self.both, targets, strict=True)])
        assert np.array_equal(*outs)

    @rule(numbers=NUMBERS)
    def drop(self, numbers: list[int]) -> None:
        for each in self.both:
            each.drop(keys_of(*numbers))

    @rule(number=NUMBER, commit=st.booleans())
    def donate(self, number: int, commit: bool) -> None:
        donations = [each.reserve(keys_of(number)[0]) for each in self.both]
        tickets = []
        for donation in filter(None, donations):
            for shard in range(GEOMETRY.shards):
                donation.view(shard)[:] = payloads_of(GEOMETRY, number)[0, shard].tobytes()
            tickets.append(donation.commit()) if commit else donation.abort()
        assert (donations[0] is None) == (donations[1] is None)
        if tickets:
            self.agree(tickets)

    @rule(number=NUMBER)
    def use(self, number: int) -> None:
        for each in self.both:
            each.touch(keys_of(number))
            assert each.prefetch(keys_of(number)).wait(WAIT_S)
            each.pin(keys_of(number)).release()

    @invariant()
    def the_same_is_there(self) -> None:
        real, oracle = (each.lookup(keys_of(*ALL)).tolist() for each in self.both)
        assert real == oracle
        assert not any(each.in_flight(keys_of(*ALL)).any() for each in self.both)

    def teardown(self) -> None:
        self.real.check_integrity()
        assert (self.real.statistics().pins, self.oracle.statistics().pins) == (0, 0)
        report = self.real.close()
        assert (report.lost, report.unfinished) == (0, 0)
        self.directory.cleanup()


class TwinsWithoutRing(Twins):
    slots = 0


class TwinsWithOneSlot(Twins):
    slots = 1


SETTINGS = settings(max_examples=15, stateful_step_count=15, suppress_health_check=list(HealthCheck))
TestTwins = Twins.TestCase
TestTwinsWithoutRing = TwinsWithoutRing.TestCase
TestTwinsWithOneSlot = TwinsWithOneSlot.TestCase
TestTwins.settings = TestTwinsWithoutRing.settings = TestTwinsWithOneSlot.settings = SETTINGS
