"""A whole pass against the slow, obvious way to say what must be left."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_census import NAMESPACES, put
from test_reach import COVERS, name

from ucm_core.store import gc
from ucm_core.store.gc import Collector
from ucm_core.store.ledger import Residents
from ucm_core.store.pool import IoPool
from ucm_core.store.root import CacheRoot

HOUR_S = 3600
ROWS = ("full", "window", "state")


@dataclass(frozen=True)
class Family:
    """What the oracle knows of one: ``age_h`` is different for each."""

    row: str
    position: int
    age_h: int
    sizes: tuple[int, ...]
    in_use: bool

    @property
    def name(self) -> bytes:
        return name(self.row, self.position)

    def store(self, root: CacheRoot) -> None:
        used_s = int(time.time()) - HOUR_S * self.age_h - HOUR_S // 2
        for segment, size in zip("abc", self.sizes, strict=False):
            number = int.from_bytes(self.name, "big")
            put(root.path, number, segment=segment, row=self.row, size=size, used_s=used_s)


PLACES = [(row, position) for row in ROWS for position in range(4)]
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@st.composite
def caches(draw: st.DrawFn) -> list[Family]:
    places = draw(st.lists(st.sampled_from(PLACES), unique=True, min_size=1))
    ages = draw(st.permutations(range(1, len(places) + 1)))
    return [
        Family(row, position, age, draw(SIZES), draw(st.integers(0, 4)) == 0)
        for (row, position), age in zip(places, ages, strict=True)
    ]


class View:
    """A double of a process that has those families in its ring that are in use."""

    def __init__(self, families: list[Family]) -> None:
        self.held = [family.name for family in families if family.in_use]

    def residents(self) -> Residents:
        names = np.frombuffer(b"".join(self.held), dtype=np.uint8).reshape(-1, 16)
        return Residents(names, np.ones(len(names), dtype=np.bool_))

    def covers(self) -> object:
        return COVERS


def is_lost(state: Family, families: list[Family]) -> bool:
    blocks = {family.row for family in families if family.position == state.position}
    return state.row == "state" and not {"full", "window"} <= blocks


def survivors(families: list[Family], capacity: int, ttl_h: int | None) -> set[bytes]:
    """Go through all families in the order in which they must go, and stop when the rest fits."""
    left = [family for family in families if ttl_h is None or family.in_use or family.age_h < ttl_h]
    for family in sorted(left, key=lambda one: (not is_lost(one, families), -one.age_h)):
        if sum(sum(one.sizes) for one in left) <= int(gc.END_FRACTION * capacity):
            break
        if not family.in_use:
            left.remove(family)
    return {family.name for family in left}


@pytest.mark.parametrize("slice_s", [0.0, 10.0])
@settings(max_examples=40, deadline=None)
@given(families=caches(), capacity=st.integers(1, 900), ttl_h=st.none() | st.integers(1, 12))
def test_a_pass_leaves_what_the_obvious_way_leaves(tmp_path_factory, slice_s, families, capacity, ttl_h):
    pool, ttl_s = IoPool(1), None if ttl_h is None else float(ttl_h * HOUR_S)
    with (
        pytest.MonkeyPatch.context() as patch,
        CacheRoot(tmp_path_factory.mktemp("root"), capacity_bytes=capacity) as root,
    ):
        patch.setattr(gc, "SLICE_S", slice_s)
        for family in families:
            family.store(root)
        assert root.usage.used_bytes == sum(sum(family.sizes) for family in families)
        collector = Collector(root, pool, view=View(families), ttl_s=ttl_s)
        collector._run(gc._always, asked=True)
        left = {bytes.fromhex(path.name[:32]) for path in (root.path / NAMESPACES[0]).glob("*/*/*")}
        assert left == survivors(families, capacity, ttl_h)
        assert root.usage.used_bytes == sum(sum(one.sizes) for one in families if one.name in left)
    pool.close(60.0)
