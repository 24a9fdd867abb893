"""What goes is the eldest, whole families, and only what is ours and unused at the moment it goes."""

from __future__ import annotations

import os
import time
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objects import open_files
from test_census import NAMESPACES, listed, put

from ucm_core.store.reach import NOTHING
from ucm_core.store.removal import PARTS, Removal, eldest
from ucm_core.store.root import CacheRoot

YEAR_S = 31_536_000


@pytest.fixture
def root(tmp_path):
    with CacheRoot(tmp_path / "cache") as root:
        yield root


def removal(root, census, view=NOTHING, slice_s=10.0):
    return Removal(root, census, view, slice_s=slice_s)


def remove_all(root, census):
    """Everything that may go; returns what went, by reason."""
    work = removal(root, census)
    for _ in work.eldest(lambda: 1 << 60):
        pass
    return dict(+work.objects)


NUMBERS = st.integers(-(1 << 62), 1 << 62)


@settings(max_examples=200, deadline=None)
@given(
    entries=st.lists(st.tuples(NUMBERS | st.integers(0, 3), st.integers(0, 100)), min_size=1, max_size=60),
    excess=st.integers(1, 4000),
)
def test_the_eldest_are_what_sorting_everything_says(entries, excess):
    used, sizes = (np.array(column, dtype=np.int64) for column in zip(*entries, strict=True))
    chosen = eldest(used, sizes, excess_bytes=excess)
    everything = sorted(used.tolist())
    assert used[chosen].tolist() == everything[: len(chosen)], "the smallest, in order"
    assert len(set(chosen.tolist())) == len(chosen)
    assert sizes[chosen].sum() >= excess or len(chosen) == len(used), "enough, or all"
    needed = next(
        (n for n in range(len(used)) if sizes[np.argsort(used, kind="stable")[:n]].sum() >= excess), 0
    )
    assert len(chosen) <= max(2 * needed, len(used) // PARTS, 1) or len(chosen) == len(used)


def test_families_go_whole_and_in_order_of_their_latest_use(root):
    for number, segment, used_s in (
        (1, "a", 100),
        (1, "b", 900),
        (2, "a", 500),
        (2, "b", 400),
        (3, "a", 300),
    ):
        put(root.path, number, segment=segment, used_s=used_s)
    work, steps = removal(root, listed(root.path), slice_s=0.0), []
    for _ in islice(work.eldest(lambda: 1), 2):
        steps.append(sorted(path.name[-3:] for path in root.path.rglob("*.[ab]")))
    assert steps == [["1.a", "1.b", "2.a", "2.b"], ["1.a", "1.b"]]
    assert (dict(work.objects), work.freed_bytes) == ({"capacity": 3}, 30)


def test_a_segment_that_came_after_the_census_goes_with_its_family_or_keeps_it(root):
    census_before = [put(root.path, number) for number in (1, 2)]
    census = listed(root.path)
    put(root.path, 1, segment="new")  # as old as the rest
    now = put(root.path, 2, segment="new", used_s=int(time.time()))
    assert remove_all(root, census) == {"capacity": 2}
    assert [path.exists() for path in (*census_before, now)] == [False, True, True]


def test_what_was_used_since_the_census_stays(root):
    paths = [put(root.path, number) for number in range(4)]
    census = listed(root.path)
    os.utime(paths[2])
    assert remove_all(root, census) == {"capacity": 3}
    assert [path.exists() for path in paths] == [False, False, True, False]


def test_a_time_to_come_protects_nothing(root):
    path = put(root.path, 1, used_s=int(time.time()) + YEAR_S)
    assert remove_all(root, listed(root.path)) == {"capacity": 1}
    assert not path.exists()


def test_what_expired_goes_whatever_the_bound_says(root):
    paths = [put(root.path, number, used_s=100 * number) for number in range(1, 5)]
    work = removal(root, listed(root.path))
    for _ in work.expired(250 * 10**9):
        pass
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert dict(work.objects) == {"expired": 2}
    assert not list(work.eldest(lambda: 0))


def test_removed_bytes_come_off_the_counter(root):
    for number in range(4):
        put(root.path, number, size=100)
    root.usage.recount()
    work = removal(root, listed(root.path), slice_s=0.0)
    for step, _ in enumerate(work.eldest(lambda: 1 << 60), 1):
        assert root.usage.used_bytes == 400 - 100 * step


def link_to(path, outside):
    outside.mkdir(exist_ok=True)
    moved = outside / path.name
    path.rename(moved)
    path.symlink_to(moved)


@pytest.mark.parametrize("level", ["file", "folder", "row", "namespace"])
def test_a_link_in_the_place_of_what_was_listed_is_not_followed(root, tmp_path, level):
    path = put(root.path, 1)
    census = listed(root.path)
    place = {"file": path, "folder": path.parent, "row": path.parents[1], "namespace": path.parents[2]}[level]
    link_to(place, tmp_path / "outside")
    assert remove_all(root, census) == {}
    assert len(list((tmp_path / "outside").rglob("*.hx"))) == 1
    assert place.is_symlink()


def test_a_directory_in_the_place_of_an_object_stays(root):
    path = put(root.path, 1)
    census = listed(root.path)
    path.unlink()
    path.mkdir()
    assert remove_all(root, census) == {}
    assert path.is_dir()


def test_what_is_gone_already_is_passed_over(root):
    paths = [put(root.path, number) for number in range(3)]
    census = listed(root.path)
    paths[0].unlink()
    paths[2].parent.rename(root.path / "elsewhere")
    assert remove_all(root, census) == {}
    assert len(list(root.path.rglob("*.hx"))) == 2


def test_what_the_medium_does_not_let_go_of_stays_and_stops_nothing(root, monkeypatch):
    for number in range(3):
        put(root.path, number, size=100)
    unlink = os.unlink

    def refuse(path, *, dir_fd=None):
        if str(path).startswith(f"{1:032x}"):
            raise PermissionError(1, "Operation not permitted")
        unlink(path, dir_fd=dir_fd)

    census = listed(root.path)
    monkeypatch.setattr(os, "unlink", refuse)
    assert remove_all(root, census) == {"capacity": 2}
    assert len(list(root.path.rglob("*.hx"))) == 1


def test_no_descriptor_is_left_open(root):
    for number in range(20):
        put(root.path, number)
    census = listed(root.path)
    (root.path / NAMESPACES[0] / "row" / "000").rename(root.path / "elsewhere")
    before = open_files()
    remove_all(root, census)
    assert open_files() == before
