"""The budget keeps the most valuable states, whatever happens: against sorting everything every time."""

from __future__ import annotations

import numpy as np
import pytest
from doubles import Clock
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.coordinator.density import DensityBudget, state_value
from ucm_core.errors import SpecError
from ucm_core.spec.keys import Keys

HOUR_S = 3600.0
TICK_S = 0.7310585
"""No two ages that are different numbers of ticks make one count of sights worth exactly another one."""


def keys(*numbers: int) -> Keys:
    made = np.zeros((len(numbers), 32), dtype=np.uint8)
    made[:, 31] = numbers
    return made


def numbers(found: Keys) -> list[int]:
    return found[:, 31].tolist()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def budget_of(clock: Clock, states: int, *, half_life_s: float = HOUR_S) -> DensityBudget:
    return DensityBudget(1000 * states + 999, 1000, half_life_s=half_life_s, clock=clock)


@pytest.mark.parametrize(
    ("sightings", "age_s", "value"), [(1, 0.0, 1.0), (3, HOUR_S, 1.5), (8, 3 * HOUR_S, 1.0), (1, 1e9, 0.0)]
)
def test_a_state_counts_half_after_each_half_life(sightings: int, age_s: float, value: float) -> None:
    assert state_value(sightings, age_s=age_s, half_life_s=HOUR_S) == value


def test_what_fits_stays(clock: Clock) -> None:
    budget = budget_of(clock, 3)
    assert numbers(budget.sight(keys(1, 2, 3))) == []
    assert numbers(budget.sight(keys(4))) == [1]


def test_the_oldest_of_equals_falls(clock: Clock) -> None:
    budget = budget_of(clock, 2)
    for number in (1, 2):
        budget.sight(keys(number))
        clock.now += 1
    assert numbers(budget.sight(keys(3))) == [1]


def test_many_sights_outlive_a_fresh_one_until_they_are_old(clock: Clock) -> None:
    """4 sights are worth 2 after one half-life and less than 1 after more than two."""
    budget = budget_of(clock, 1)
    for _ in range(4):
        budget.sight(keys(1))
    clock.now = HOUR_S
    assert numbers(budget.sight(keys(2))) == [2]  # gets no place itself
    clock.now = 2 * HOUR_S + 1
    assert numbers(budget.sight(keys(3))) == [1]


def test_a_new_sight_makes_a_state_young_again(clock: Clock) -> None:
    budget = budget_of(clock, 2)
    budget.sight(keys(1, 2))
    clock.now = HOUR_S
    budget.sight(keys(1))
    assert numbers(budget.sight(keys(3))) == [2]


def test_a_state_that_is_gone_gives_its_place_back(clock: Clock) -> None:
    budget = budget_of(clock, 2)
    budget.sight(keys(1, 2))
    budget.forget(keys(1, 7))
    assert numbers(budget.sight(keys(3))) == []
    budget.check_integrity()


def test_statistics_count_states_sights_and_falls(clock: Clock) -> None:
    budget = budget_of(clock, 2)
    budget.sight(keys(1, 2, 2, 3))
    counts = budget.statistics()
    assert (counts.states, counts.capacity, counts.sights, counts.fallen) == (2, 2, 4, 1)


def test_a_budget_for_no_state_is_refused(clock: Clock) -> None:
    with pytest.raises(SpecError, match="999 bytes holds no state of 1000 bytes"):
        DensityBudget(999, 1000, half_life_s=HOUR_S, clock=clock)


def test_a_senseless_half_life_is_refused(clock: Clock) -> None:
    with pytest.raises(SpecError, match="half_life_s = 0"):
        DensityBudget(1000, 1000, half_life_s=0, clock=clock)


def test_its_own_memory_is_bounded_however_many_bytes_are_allowed(clock: Clock) -> None:
    assert DensityBudget(1 << 60, 1, half_life_s=HOUR_S, clock=clock).statistics().capacity == 1 << 20


def test_old_sights_do_not_pile_up(clock: Clock) -> None:
    budget = budget_of(clock, 3)
    for _ in range(500):
        budget.sight(keys(1, 2, 3))
        budget.check_integrity()


class Sorted:
    """The oracle: values everything anew and sorts, each time."""

    def __init__(self, states: int, half_life_s: float) -> None:
        self.states, self.half_life_s = states, half_life_s
        self.seen: dict[int, tuple[int, float, int]] = {}
        self.turn = 0

    def sight(self, batch: list[int], now: float) -> set[int]:
        for number in batch:
            self.turn += 1
            self.seen[number] = (self.seen.get(number, (0,))[0] + 1, now, self.turn)

        def worth(number: int) -> tuple[float, int]:
            count, last, turn = self.seen[number]
            return state_value(count, age_s=now - last, half_life_s=self.half_life_s), turn

        best = sorted(self.seen, key=worth, reverse=True)[: self.states]
        fallen = set(self.seen) - set(best)
        self.seen = {number: self.seen[number] for number in best}
        return fallen


EVENTS = st.tuples(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 20), st.booleans())


@given(states=st.integers(1, 6), events=st.lists(EVENTS, max_size=40))
def test_the_most_valuable_are_kept(states: int, events: list[tuple[list[int], int, bool]]) -> None:
    clock = Clock()
    budget, oracle = budget_of(clock, states, half_life_s=10.0), Sorted(states, 10.0)
    for batch, ticks, vanishes in events:
        clock.now += ticks * TICK_S
        assert set(numbers(budget.sight(keys(*batch)))) == oracle.sight(batch, clock.now)
        if vanishes and batch:
            budget.forget(keys(batch[0]))
            oracle.seen.pop(batch[0], None)
        budget.check_integrity()
        assert budget.statistics().states == len(oracle.seen) <= states
