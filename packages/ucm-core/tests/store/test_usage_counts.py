"""A count beside everything else: the total is never below the truth, and a quiet count finds it exactly."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from objects import GEOMETRY, make_keys, open_shelf
from test_census import put

from ucm_core.flow.ticket import ResultCode
from ucm_core.store.census import Census
from ucm_core.store.root import CacheRoot
from ucm_core.store.usage import CountBegin

BOUND = 10_000
SIZE = GEOMETRY.object_bytes


def count(root: CacheRoot) -> int:
    """A whole count, with nothing beside it."""
    begin, census = root.usage.begin_count(), Census(root.path)
    while census.advance(0.0):
        pass
    return root.usage.end_count(begin, listed_bytes=census.total_bytes, complete=census.complete)


class CountedBooks(RuleBasedStateMachine):
    """Two writers, files that come and go, hands that delete, and counts at any pace; the model is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name)
        self.roots = [CacheRoot(self.path, capacity_bytes=BOUND).open() for _ in range(2)]
        self.files: dict[int, int] = {}
        self.open_bytes = [0, 0]
        self.counts: list[tuple[CountBegin, Census]] = []
        self.removals: list[tuple[int, int | None, int]] = []
        self.next = 0

    @property
    def truth(self) -> int:
        return sum(self.files.values()) + sum(self.open_bytes)

    @rule(who=st.integers(0, 1), size=st.integers(1, 300))
    def reserve(self, who: int, size: int) -> None:
        if self.roots[who].usage.reserve(size):
            self.open_bytes[who] += size

    @rule(who=st.integers(0, 1), share=st.floats(0, 1), folder=st.integers(0, 3))
    def write_and_settle(self, who: int, share: float, folder: int) -> None:
        reserved, self.open_bytes[who] = self.open_bytes[who], 0
        written = int(reserved * share)
        if written:
            self.next += 1
            put(self.path, folder << 116 | self.next, size=written)
            self.files[folder << 116 | self.next] = written
        self.roots[who].usage.settle(reserved, written_bytes=written)

    def remove_one(self) -> int:
        number, size = self.files.popitem()
        next(self.path.rglob(f"{number:032x}.hx")).unlink()
        return size

    @precondition(lambda self: self.files)
    @rule(who=st.integers(0, 1))
    def drop(self, who: int) -> None:
        self.removals.append((who, self.roots[who].usage.begin_removal(), self.remove_one()))

    @precondition(lambda self: self.removals)
    @rule()
    def take_off_what_was_dropped(self) -> None:
        who, begin, size = self.removals.pop(0)
        self.roots[who].usage.end_removal(begin, removed_bytes=size)

    @precondition(lambda self: self.files)
    @rule()
    def delete_by_hand(self) -> None:
        self.remove_one()

    @rule(who=st.integers(0, 1))
    def begin_count(self, who: int) -> None:
        self.counts.append((self.roots[who].usage.begin_count(), Census(self.path)))

    @precondition(lambda self: self.counts)
    @rule(steps=st.integers(1, 4))
    def go_on_counting(self, steps: int) -> None:
        begin, census = self.counts[0]
        if all(census.advance(0.0) for _ in range(steps)):
            return
        self.counts.pop(0)
        self.roots[0].usage.end_count(begin, listed_bytes=census.total_bytes, complete=census.complete)

    @rule()
    def recount(self) -> None:
        self.roots[1].usage.recount()

    @rule()
    def lose_the_books(self) -> None:
        (self.path / ".usage").unlink()

    @precondition(lambda self: not self.removals)
    @rule()
    def a_quiet_count_is_exact(self) -> None:
        assert count(self.roots[0]) == self.truth

    @invariant()
    def the_total_is_never_too_low(self) -> None:
        assert self.roots[0].usage.used_bytes >= self.truth

    def teardown(self) -> None:
        for root in self.roots:
            root.close()
        self.directory.cleanup()


TestCountedBooks = CountedBooks.TestCase
TestCountedBooks.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\xff" * 24, b"\xff" * 23, bytes(24), b"\x80" + bytes(23), b"\xff" * 100]
)
def test_whatever_the_counter_holds_one_count_makes_it_right(content: bytes, tmp_path: Path) -> None:
    """Empty, truncated, negative, huge, too long, far too low: afterwards it is what the files are."""
    shelf = open_shelf(tmp_path, capacity_bytes=5 * SIZE)
    shelf.write(make_keys(4))
    (tmp_path / ".usage").write_bytes(content)
    assert count(shelf.root) == 4 * SIZE
    assert sorted(shelf.write(make_keys(2, seed=1))) == [ResultCode.OK, ResultCode.NO_SPACE]
    shelf.root.close()


def test_the_counter_after_its_largest_number_goes_on(tmp_path: Path) -> None:
    with CacheRoot(tmp_path, capacity_bytes=BOUND) as root:
        (tmp_path / ".usage").write_bytes(struct.pack("<QQQ", 0, 0, (1 << 64) - 5))
        begin = root.usage.begin_count()
        assert root.usage.reserve(100)
        assert root.usage.end_count(begin, listed_bytes=0, complete=True) == 100


def test_a_list_with_holes_lowers_nothing(tmp_path: Path) -> None:
    with CacheRoot(tmp_path, capacity_bytes=BOUND) as root:
        root.usage.reserve(500)
        root.usage.settle(500, written_bytes=500)
        begin = root.usage.begin_count()
        assert root.usage.end_count(begin, listed_bytes=0, complete=False) == 500
        assert root.usage.end_count(begin, listed_bytes=0, complete=True) == 0
