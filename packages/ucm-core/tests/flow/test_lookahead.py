"""Which loads are due, against a slow oracle; the depth that measured times ask for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import ConfigError
from ucm_core.flow.lookahead import (
    LEAST_DEPTH,
    MOST_DEPTH,
    SAMPLES,
    Backlog,
    LookAhead,
    due,
    joined,
    reach_of,
)

positions = st.integers(0, 8)
backlogs = st.builds(Backlog, positions, positions, positions, st.integers(1, 5))
times = st.floats(1e-6, 10)


def slowly_due(asked: list[Backlog], room: int) -> list[tuple[int, int]]:
    """Everything that could be submitted, nearest first; then what there is no room for is struck out."""
    wanted = sorted(
        (position, load)
        for load, backlog in enumerate(asked)
        for position in range(20)
        if backlog.begin <= position < max(backlog.urgent, backlog.end)
    )
    ahead = [(position, load) for position, load in wanted if position >= asked[load].urgent]
    return [entry for entry in wanted if entry not in ahead[max(room, 0) :]]


@given(st.lists(backlogs, max_size=5), st.integers(-2, 12))
def test_due_is_what_an_oracle_says(asked: list[Backlog], room: int) -> None:
    assert due(asked, room=room) == slowly_due(asked, room)


@given(st.lists(backlogs, max_size=5), st.integers(0, 12))
def test_what_is_submitted_of_a_load_leaves_no_hole(asked: list[Backlog], room: int) -> None:
    for load, backlog in enumerate(asked):
        mine = [position for position, index in due(asked, room=room) if index == load]
        assert mine == list(range(backlog.begin, backlog.begin + len(mine)))


def slowly_joined(backlog: Backlog, mine: list[int]) -> list[list[int]]:
    """What is waited for alone, and the first; of the rest as many at a time as go together."""
    calls: list[list[int]] = []
    while mine:
        ahead = mine[0] >= max(1, backlog.urgent)
        count = 1
        while ahead and count < backlog.together:
            count += 1
        calls.append(mine[:count])
        mine = mine[count:]
    return calls


@given(st.lists(backlogs, max_size=5), st.integers(-2, 40))
def test_neighbours_are_joined_as_an_oracle_says(asked: list[Backlog], room: int) -> None:
    entries = due(asked, room=room)
    groups = joined(asked, entries)
    for load, backlog in enumerate(asked):
        mine = [position for position, index in entries if index == load]
        calls = [list(group) for group, index in groups if index == load]
        assert calls == slowly_joined(backlog, mine)
    begins = [(group.start, load) for group, load in groups]
    assert begins == sorted(begins)  # the nearest of every load first, as what is due


@given(positions, positions, st.integers(1, 5))
def test_whole_groups_reach_as_far_as_is_asked(begin: int, least: int, together: int) -> None:
    end = reach_of(begin, least, together=together)
    ahead = list(range(begin, end))
    assert end >= max(begin, least)
    calls = slowly_joined(Backlog(begin, begin, end, together), ahead)
    assert all(call[0] < least for call in calls), "a group further than is asked for"
    assert all(len(call) == (together if call[0] else 1) for call in calls), "a group in parts"


@given(st.lists(times, max_size=9), st.lists(times, max_size=9))
def test_the_depth_is_bounded_whatever_was_measured(loads: list[float], computes: list[float]) -> None:
    ahead = LookAhead()
    for seconds in loads:
        ahead.loaded(seconds)
    for seconds in computes:
        ahead.computed(seconds)
    assert LEAST_DEPTH <= ahead.depth <= MOST_DEPTH


@pytest.mark.parametrize(
    ("load", "compute", "depth"),
    [(1, 10, 2), (10, 10, 2), (21, 10, 3), (50, 10, 5), (9e9, 1, 16), (1, 0, 16)],
)
def test_as_many_layers_as_a_load_takes(load: float, compute: float, depth: int) -> None:
    ahead = LookAhead()
    ahead.loaded(load)
    ahead.computed(compute)
    assert ahead.depth == depth == min(MOST_DEPTH, max(2, math.ceil(load / compute) if compute else 99))


def test_one_odd_measurement_changes_nothing_and_old_ones_are_forgotten() -> None:
    ahead = LookAhead()
    for _ in range(SAMPLES):
        ahead.loaded(30)
        ahead.computed(10)
    ahead.loaded(500)
    assert ahead.depth == 3
    for _ in range(SAMPLES):
        ahead.loaded(70)
    assert ahead.depth == 7


def test_nothing_measured_is_the_least() -> None:
    assert LookAhead().depth == LEAST_DEPTH == 2


def test_a_fixed_depth_stays() -> None:
    ahead = LookAhead(1)
    ahead.loaded(500)
    ahead.computed(10)
    assert ahead.depth == 1


@pytest.mark.parametrize("depth", [0, -3])
def test_a_depth_below_one_is_refused(depth: int) -> None:
    with pytest.raises(ConfigError, match=f"a look-ahead of {depth} layers; give at least 1"):
        LookAhead(depth)
