"""Locks of files: a lock ends when its holder lets go, whoever was forked meanwhile."""

import multiprocessing
import os
import signal
from contextlib import contextmanager

import pytest

from ucm_core.store import locks, writers

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


def test_a_kept_lock_ends_with_its_process_whoever_was_forked(tmp_path, children):
    lock = locks.KeptLock.take(tmp_path / "lock")
    children()
    assert locks.KeptLock.take(tmp_path / "lock") is None
    lock.forget()  # closes without unlocking, as a death does
    with locks.exclusive(tmp_path / "lock", create=False):
        pass  # once the child has run at all


def test_a_kept_lock_is_taken_once(tmp_path):
    lock = locks.KeptLock.take(tmp_path / "lock")
    assert locks.KeptLock.take(tmp_path / "lock") is None
    lock.release()
    lock.release()
    locks.KeptLock.take(tmp_path / "lock").release()


def test_letting_go_closes(tmp_path):
    descriptor = locks.open_lock_file(tmp_path / "lock", create=True)
    locks.let_go(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
