"""Locks of files: a lock ends when its holder lets go, whoever was forked meanwhile."""

import multiprocessing
import os
import signal
from contextlib import contextmanager

import pytest
from objects import open_shelf

from ucm_core.store import gc, locks, writers
from ucm_core.store.pool import IoPool

FORK = multiprocessing.get_context("fork")
DEAD = "0" * 32


@contextmanager
def lock_of_a_file(path):
    with locks.exclusive(path / "lock"):
        yield


@contextmanager
def locks_of_the_dead(path):
    (path / DEAD).touch()
    with writers.dead_writers(path) as dead:
        assert dead == [DEAD]
        yield


@pytest.fixture
def children():
    """Starts children that live on as long as the test."""
    started = []

    def start():
        child = FORK.Process(target=signal.pause)
        child.start()
        started.append(child)

    yield start
    for child in started:
        assert child.is_alive()
        child.kill()
        child.join()


def is_free(path):
    with locks.exclusive(path, create=False, timeout_s=0):
        return True


@pytest.mark.parametrize("hold", [lock_of_a_file, locks_of_the_dead])
def test_a_child_that_was_forked_under_a_lock_does_not_keep_it(hold, tmp_path, children):
    with hold(tmp_path):
        children()
    assert [is_free(path) for path in tmp_path.iterdir()] == [True]


def test_a_child_that_was_forked_during_a_collection_does_not_keep_the_collectors_lock(
    tmp_path, children, monkeypatch
):
    shelf, pool = open_shelf(tmp_path), IoPool(1)
    collector = gc.Collector(shelf.root.path, shelf.root.usage, pool)
    recount = shelf.root.usage.recount
    monkeypatch.setattr(shelf.root.usage, "recount", lambda: (recount(), children()))
    collector._collect_alone()
    assert is_free(shelf.root.path / ".collector")
    pool.close()
    shelf.root.close()


def test_letting_go_closes(tmp_path):
    descriptor = locks.open_lock_file(tmp_path / "lock", create=True)
    locks.let_go(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
