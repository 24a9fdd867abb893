"""The usage counter: a bound that holds with writes under way, over processes and restarts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from objects import GEOMETRY, make_keys, open_shelf

from ucm_core.flow.ticket import ResultCode
from ucm_core.store import locks, usage
from ucm_core.store.root import CacheRoot

SIZE = GEOMETRY.object_bytes


@pytest.fixture
def root(tmp_path):
    with CacheRoot(tmp_path, capacity_bytes=10) as opened:
        yield opened


def test_the_bound_holds_for_what_is_only_reserved(root):
    assert root.usage.reserve(6)
    assert not root.usage.reserve(5)
    assert root.usage.reserve(4)
    assert root.usage.used_bytes == 10


def test_a_batch_gets_as_much_as_fits(root):
    assert root.usage.reserve_objects(5, 3) == 3
    assert root.usage.reserve_objects(5, 3) == 0
    assert root.usage.reserve_objects(1, 1) == 1


def test_what_failed_is_given_back(root):
    root.usage.reserve(10)
    root.usage.settle(10, written_bytes=4)
    assert root.usage.used_bytes == 4
    root.usage.end_removal(root.usage.begin_removal(), removed_bytes=4)
    assert root.usage.used_bytes == 0


def test_giving_back_too_much_stops_at_zero(root):
    root.usage.reserve(2)
    root.usage.end_removal(root.usage.begin_removal(), removed_bytes=5)
    assert root.usage.used_bytes == 0
    assert root.usage.reserve(10)


@pytest.mark.parametrize("lost", [False, True])
def test_what_a_count_did_not_see_any_more_is_not_taken_off_once_more(lost, tmp_path):
    """Somebody counts after the files are gone, and before that was told: the total would be too low."""
    shelf = open_shelf(tmp_path)
    shelf.write(make_keys(4))
    begin = shelf.root.usage.begin_removal()
    shelf.file(make_keys(4)[0]).unlink()
    if lost:
        (tmp_path / ".usage").unlink()
    assert shelf.root.usage.recount() == 3 * SIZE
    shelf.root.usage.end_removal(begin, removed_bytes=SIZE)
    assert shelf.root.usage.used_bytes == 3 * SIZE


def test_a_drop_whose_counter_is_damaged_meanwhile_is_not_counted_twice(tmp_path, monkeypatch):
    shelf, keys = open_shelf(tmp_path), make_keys(4)
    shelf.write(keys)
    note = shelf.tier._note_absent
    monkeypatch.setattr(
        shelf.tier, "_note_absent", lambda *what: (note(*what), (tmp_path / ".usage").write_bytes(b"?"))
    )
    assert shelf.tier.drop(keys[:2]).all()
    assert shelf.root.usage.used_bytes == 2 * SIZE


def test_short_answers_of_the_system_are_no_damage(tmp_path, monkeypatch):
    shelf = open_shelf(tmp_path, capacity_bytes=4 * SIZE)
    pread, pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda number, size, at: pread(number, min(size, 5), at))
    monkeypatch.setattr(os, "pwrite", lambda number, data, at: pwrite(number, data[:3], at))
    monkeypatch.setattr(usage.Usage, "_begin_books", None)
    (tmp_path / ".usage").write_bytes(bytes(24))
    assert sorted(shelf.write(make_keys(5))) == [ResultCode.OK] * 4 + [ResultCode.NO_SPACE]
    assert shelf.tier.drop(make_keys(1)).all()
    assert shelf.root.usage.recount() == shelf.root.usage.used_bytes == 3 * SIZE


def test_what_an_error_kept_from_being_settled_is_settled_by_the_next_call(root, monkeypatch):
    assert root.usage.reserve(6)
    with monkeypatch.context() as patch:
        patch.setattr(locks, "write_all", lambda *_: os.close(-1))
        with pytest.raises(OSError, match="descriptor"):
            root.usage.settle(6, written_bytes=4)
    root.usage.settle(0, written_bytes=0)
    assert root.usage.used_bytes == 4


def test_a_recount_keeps_what_is_under_way(root):
    root.usage.reserve(7)
    assert root.usage.recount() == 7


def test_no_bound_by_default(tmp_path):
    with CacheRoot(tmp_path) as root:
        assert root.usage.reserve(2**60)


def test_the_bound_is_kept_by_writes(tmp_path):
    shelf = open_shelf(tmp_path, capacity_bytes=3 * SIZE + 100)
    codes = shelf.write(make_keys(5))
    assert sorted(codes) == [ResultCode.OK] * 3 + [ResultCode.NO_SPACE] * 2
    assert shelf.root.usage.used_bytes == 3 * SIZE
    shelf.tier.drop(make_keys(5)[[codes.index(ResultCode.OK)]])
    assert shelf.write(make_keys(1, seed=9)) == [ResultCode.OK]


def test_usage_is_there_after_a_restart(tmp_path):  # case C-59
    shelf = open_shelf(tmp_path, capacity_bytes=5 * SIZE)
    shelf.write(make_keys(4))
    shelf.root.close()
    shelf = open_shelf(tmp_path, capacity_bytes=5 * SIZE)
    assert shelf.root.statistics().used_bytes == 4 * SIZE
    assert sorted(shelf.write(make_keys(2, seed=1))) == [0, 3]


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 3, b"\xff" * 9])
def test_a_lost_or_damaged_counter_is_counted_from_the_files(content, tmp_path):
    shelf = open_shelf(tmp_path)
    shelf.write(make_keys(4))
    (tmp_path / ".usage").unlink()
    if content is not None:
        (tmp_path / ".usage").write_bytes(content)
    assert shelf.root.usage.used_bytes == 4 * SIZE
    assert shelf.root.usage.reserve(1)
    assert shelf.root.usage.used_bytes == 4 * SIZE + 1


def in_the_way(path, kind):
    path.unlink(missing_ok=True)
    {
        "directory": path.mkdir,
        "link": lambda: path.symlink_to("/etc/passwd"),
        "pipe": lambda: os.mkfifo(path),
    }[kind]()


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_what_is_no_writer_does_not_hide_the_root(kind, tmp_path):
    with CacheRoot(tmp_path):
        pass
    in_the_way(tmp_path / ".writers" / ("ab" * 16), kind)
    with CacheRoot(tmp_path) as root:
        assert root.usage.recount() == 0
        assert root.sweep() == 0


def test_numbers_that_are_too_large_stay_numbers(tmp_path):
    """What a writer claims to have in flight is believed only where nothing else is known."""
    with CacheRoot(tmp_path) as root, CacheRoot(tmp_path) as other:
        assert root.usage.used_bytes == 0
        for path in (tmp_path / ".writers").iterdir():
            path.write_bytes(b"\xff" * 8)
        assert root.usage.recount() == 0
        assert other.usage.reserve(1)
        (tmp_path / ".usage").unlink()
        assert root.usage.used_bytes > 2**62
        assert not other.usage.reserve(1)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(locks, "WAIT_S", 0.05)


def test_a_holder_that_does_not_go_on_is_an_error_and_stops_nobody(impatient, tmp_path):
    shelf, keys = open_shelf(tmp_path), make_keys(4)
    shelf.write(keys[:2])
    with locks.exclusive(tmp_path / ".usage"):  # as a process that was stopped would
        assert set(shelf.write(keys[2:])) == {ResultCode.UNAVAILABLE}
        assert shelf.read(keys[:2]) == [ResultCode.OK] * 2
        assert shelf.root.statistics().used_bytes == 0
    assert set(shelf.write(keys[2:])) == {ResultCode.OK}
    assert shelf.root.usage.used_bytes == 4 * SIZE


def test_what_could_not_be_settled_is_settled_later(impatient, root):
    assert root.usage.reserve(6)
    with locks.exclusive(root.path / ".usage"), pytest.raises(TimeoutError, match="does not go on"):
        root.usage.settle(6, written_bytes=4)
    root.usage.settle(0, written_bytes=0)
    assert root.usage.used_bytes == 4
    assert root.usage.recount() == 0


def test_rival_writers_never_pass_the_bound(tmp_path):  # case C-59
    """Three processes race for eight places; none is lost and none is taken twice."""
    code = (
        "import sys; from ucm_core.store.root import CacheRoot\n"
        "usage = CacheRoot(sys.argv[1], capacity_bytes=8).open().usage\n"
        "print(sum(usage.reserve_objects(1, 1) for _ in range(100)), flush=True)\n"
        "sys.stdin.read()"  # what a dead writer has reserved would be free again
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in range(3)]
    assert sum(int(child.stdout.readline()) for child in children) == 8
    for child in children:
        child.communicate()


class Books(RuleBasedStateMachine):
    """Two writers of one root against a model of plain numbers."""

    def __init__(self):
        super().__init__()
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        self.roots = [CacheRoot(self.directory.name, capacity_bytes=20).open() for _ in range(2)]
        self.open_bytes = [0, 0]
        self.stored = 0

    @rule(who=st.integers(0, 1), count=st.integers(0, 4), size=st.integers(1, 6))
    def reserve(self, who, count, size):
        room = 20 - self.stored - sum(self.open_bytes)
        granted = self.roots[who].usage.reserve_objects(count, size)
        assert granted == min(count, room // size)
        self.open_bytes[who] += granted * size

    @precondition(lambda self: any(self.open_bytes))
    @rule(who=st.integers(0, 1), share=st.floats(0, 1))
    def settle(self, who, share):
        written = int(self.open_bytes[who] * share)
        self.roots[who].usage.settle(self.open_bytes[who], written_bytes=written)
        self.stored += written
        self.open_bytes[who] = 0

    @precondition(lambda self: self.stored)
    @rule(share=st.floats(0, 1))
    def remove(self, share):
        removed = int(self.stored * share)
        usage = self.roots[0].usage
        usage.end_removal(usage.begin_removal(), removed_bytes=removed)
        self.stored -= removed

    @invariant()
    def books_balance(self):
        assert self.roots[1].usage.used_bytes == self.stored + sum(self.open_bytes)

    def teardown(self):
        for root in self.roots:
            root.close()
        self.directory.cleanup()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
