"""States whose block is gone go first, and no state that anybody could resume from."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_census import NAMESPACES, listed, put

from ucm_core.spec.keys import object_keys, row_seed
from ucm_core.store.arrays import Names
from ucm_core.store.ledger import NO_RESIDENTS, Residents
from ucm_core.store.reach import Cover, mask, unreachable
from ucm_core.store.removal import Removal
from ucm_core.store.root import CacheRoot

DIGESTS = np.random.default_rng(7).integers(0, 256, (8, 32), dtype=np.uint8)
SEEDS = {row: row_seed(b"namespace", row) for row in ("full", "window", "state")}
COVERS = tuple(
    Cover((NAMESPACES[0], "state"), (NAMESPACES[0], row), mask(SEEDS["state"], SEEDS[row]))
    for row in ("full", "window")
)


def name(row, position) -> bytes:
    return object_keys(SEEDS[row], DIGESTS[position][None])[0, :16].tobytes()


def store(root, row, position, *, used_s=1_700_000_000):
    return put(root, int.from_bytes(name(row, position), "big"), row=row, used_s=used_s)


def residents(*held: bytes) -> Residents:
    names: Names = np.frombuffer(b"".join(held), dtype=np.uint8).reshape(-1, 16)
    return Residents(names, np.zeros(len(held), dtype=np.bool_))


class View:
    """A double of what a process knows of its rows."""

    def __init__(self, *held: bytes) -> None:
        self.held = held

    def residents(self):
        return residents(*self.held)

    def covers(self):
        return COVERS


def lost_states(census, covers=COVERS, ring=NO_RESIDENTS):
    lost = census.families().names[unreachable(census, covers, residents=ring)]
    return {position for position in range(8) for found in lost if bytes(found) == name("state", position)}


POSITIONS = st.sets(st.integers(0, 7))


@settings(max_examples=40, deadline=None)
@given(full=POSITIONS, window=POSITIONS, states=POSITIONS, ring=POSITIONS)
def test_lost_is_what_lacks_the_block_of_its_own_position(tmp_path_factory, full, window, states, ring):
    root = tmp_path_factory.mktemp("root")
    for row, positions in (("full", full), ("window", window), ("state", states)):
        for position in positions:
            store(root, row, position)
    held = residents(*(name("full", position) for position in sorted(ring)))
    expected = {position for position in states if position not in (full | ring) & window}
    assert lost_states(listed(root), ring=held) == expected


def test_a_fresh_state_counts_as_reachable(tmp_path):
    store(tmp_path, "state", 1, used_s=int(time.time()) - 5)
    assert lost_states(listed(tmp_path)) == set()


def test_without_blocks_to_need_every_state_is_reachable(tmp_path):
    store(tmp_path, "state", 1)
    assert lost_states(listed(tmp_path), covers=()) == set()
    assert lost_states(listed(tmp_path)) == {1}


def test_a_list_with_holes_tells_nothing(tmp_path):
    store(tmp_path, "state", 1)
    census = listed(tmp_path)
    census.complete = False
    assert lost_states(census) == set()


def test_lost_states_go_before_anything_older(tmp_path):
    with CacheRoot(tmp_path / "cache") as root:
        kept = [store(root.path, row, 2, used_s=100) for row in ("full", "window", "state")]
        lost = store(root.path, "state", 3, used_s=900)
        work = Removal(root, listed(root.path), View(), slice_s=0.0)
        next(work.eldest(lambda: 1))
        assert not lost.exists()
        assert all(path.exists() for path in kept)


@pytest.mark.parametrize("where", ["medium", "ring"])
def test_a_state_whose_block_came_back_meanwhile_stays(tmp_path, where):
    with CacheRoot(tmp_path / "cache") as root:
        for position in (3, 4):
            store(root.path, "window", position)
        states = [store(root.path, "state", position, used_s=100 + position) for position in (3, 4)]
        view = View()
        steps = Removal(root, listed(root.path), view, slice_s=0.0).eldest(lambda: 1)
        next(steps)
        if where == "medium":
            store(root.path, "full", 4)
        else:
            view.held = (name("full", 4),)
        for _ in steps:
            pass
        assert [path.exists() for path in states] == [False, True]


def test_masks_are_their_own_inverse():
    both = mask(SEEDS["full"], SEEDS["state"])
    cover = Cover(("n", "a"), ("n", "b"), both)
    assert cover.block_of(name("state", 4)) == name("full", 4)
    assert cover.block_of(name("full", 4)) == name("state", 4)
