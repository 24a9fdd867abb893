"""A snapshot store against a dict, under puts, gets into dirty memory, donations, evictions and restarts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stores import open_store

from ucm_core.errors import LayoutError
from ucm_core.flow.ticket import ResultCode
from ucm_core.store.geometry import Geometry
from ucm_core.store.snapshot import SnapshotStore
from ucm_core.testing.block_store import WAIT_S, keys_of
from ucm_core.testing.snapshot_store import ROW, blank_state, key_of, same, state_of

NUMBERS = st.integers(0, 6)
SEEDS = st.integers(100, 103)
FILLS = st.integers(0, 255)


class SnapshotMachine(RuleBasedStateMachine):
    """The model: by number, the seed of the state that was stored first. The ring has room for three."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.model: dict[int, int] = {}
        self.donation = None
        self.donated = 0
        self.open()

    def open(self) -> None:
        self.blocks = open_store(Path(self.directory.name), Geometry.of_row(ROW), slots=3, threads=1)
        self.store = SnapshotStore(ROW, self.blocks)

    def free(self, number: int) -> bool:
        """Whether nobody fills it: a put would wait for that."""
        return self.donation is None or number != self.donated

    @rule(number=NUMBERS, seed=SEEDS, fill=FILLS)
    def put(self, number: int, seed: int, fill: int) -> None:
        if self.free(number):
            state = state_of(seed)
            ticket = self.store.put(key_of(number), state)
            for part in state.values():
                part[:] = fill  # the source is its owner's again
            assert ticket.wait_durable(WAIT_S)
            self.model.setdefault(number, seed)

    @rule(number=NUMBERS, fill=FILLS)
    def get(self, number: int, fill: int) -> None:
        out = blank_state(fill)
        if not self.free(number):
            return
        ticket = self.store.get(key_of(number), out)
        assert ticket.wait(WAIT_S)
        there = number in self.model
        assert ticket.object_results[0] == (ResultCode.OK if there else ResultCode.MISS)
        assert same(out, state_of(self.model[number]) if there else blank_state(fill))
        for part in out.values():
            part[:] = ~part  # what was got is its owner's

    @rule(number=NUMBERS, name=st.sampled_from([part.name for part in ROW.parts]))
    def get_without_a_part(self, number: int, name: str) -> None:
        out = blank_state()
        del out[name]
        with pytest.raises(LayoutError, match=f"'{name}': the state has nothing"):
            self.store.get(key_of(number), out)
        assert same(out, {other: part for other, part in blank_state().items() if other != name})

    @precondition(lambda self: self.donation is None)
    @rule(number=NUMBERS)
    def reserve(self, number: int) -> None:
        self.donation, self.donated = self.store.reserve(key_of(number)), number
        assert (self.donation is None) == (number in self.model)

    def write(self, seed: int, *, leave_out: str | None = None) -> list[memoryview]:
        views = []
        for name, part in state_of(seed).items():
            for unit, row in enumerate(part) if name != leave_out else ():
                views.append(self.donation.part(name, unit))
                views[-1][:] = row.tobytes()
        return views

    def over(self, views: list[memoryview]) -> None:
        self.donation = None
        for view in views:
            with pytest.raises(ValueError, match="released"):
                view[0] = 1

    @precondition(lambda self: self.donation is not None)
    @rule(seed=SEEDS)
    def commit(self, seed: int) -> None:
        views = self.write(seed)
        assert self.donation.commit().wait_durable(WAIT_S)
        self.over(views)
        self.model[self.donated] = seed

    @precondition(lambda self: self.donation is not None)
    @rule(seed=SEEDS, forget=st.booleans())
    def give_up(self, seed: int, forget: bool) -> None:
        views = self.write(seed, leave_out="aux1")
        with pytest.raises(LayoutError, match="part 'aux1' of unit 0 was never written"):
            self.donation.commit()
        if not forget:
            self.donation.abort()
        self.over(views)

    @rule(numbers=st.lists(NUMBERS, max_size=3))
    def drop(self, numbers: list[int]) -> None:
        self.store.drop(keys_of(*numbers))
        for number in numbers:
            self.model.pop(number, None)

    @rule(number=NUMBERS)
    def evict_from_the_ring(self, number: int) -> None:
        self.blocks._tiers.ring.drop(keys_of(number))

    @rule()
    def restart(self) -> None:
        self.donation = None
        self.blocks.close()
        self.open()

    @invariant()
    def what_exists_is_what_the_model_holds(self) -> None:
        numbers = range(7)
        assert self.store.exists(keys_of(*numbers)).tolist() == [number in self.model for number in numbers]

    @invariant()
    def books_balance(self) -> None:
        assert self.blocks._work.wait_idle(WAIT_S), "a ticket is done a moment before its slot is free"
        self.blocks.check_integrity()
        ring = self.blocks.statistics().ring
        assert ring is not None
        assert ring.own_references == (self.donation is not None)

    def teardown(self) -> None:
        self.donation = None
        self.blocks.close()
        self.directory.cleanup()


TestSnapshotModel = SnapshotMachine.TestCase
TestSnapshotModel.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
