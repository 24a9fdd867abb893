"""A pass lets others have their turn: loads on its thread, other threads that need room, other processes."""

from __future__ import annotations

import os
import threading
import time

import pytest
from test_census import NAMESPACES, put

from ucm_core.store import gc, locks
from ucm_core.store.gc import Collector
from ucm_core.store.pool import IoPool, Priority
from ucm_core.store.root import CacheRoot

WAIT_S = 60.0
OBJECT_BYTES = 1000


@pytest.fixture
def root(tmp_path):
    with CacheRoot(tmp_path / "cache", capacity_bytes=20 * OBJECT_BYTES) as root:
        yield root


@pytest.fixture
def short_slices(monkeypatch):
    """Every slice lists one folder, or removes one family."""
    monkeypatch.setattr(gc, "SLICE_S", 0.0)


def fill(root, count=20):
    for number in range(count):
        put(root.path, number << 116, size=OBJECT_BYTES, used_s=1000 + number)
    root.usage.recount()


def left(root):
    return len(list(root.path.rglob("*.hx")))


def test_loads_run_between_the_slices_of_a_queued_pass(root, short_slices):
    """With one thread: what is queued after a slice goes before the next one."""
    fill(root)
    pool, seen, over = IoPool(1), [], threading.Event()
    collector = Collector(root, pool)
    step = collector._step

    def slice_and_load(begin, **how):
        going = step(begin, **how)
        pool.submit(Priority.LOAD, lambda: seen.append(left(root)) if going else over.set())
        return going

    collector._step = slice_and_load
    collector.note_written()
    assert over.wait(WAIT_S)
    pool.close(WAIT_S)
    assert sorted(set(seen), reverse=True) == [20, 19, 18, 17]
    assert seen.count(20) >= 20, "also while it lists"


def test_loads_run_between_the_slices_of_who_needs_room(root, short_slices):
    fill(root)
    pool, seen, over = IoPool(1), [], threading.Event()
    collector = Collector(root, pool)
    step = collector._step

    def slice_and_load(begin, **how):
        pool.submit(Priority.LOAD, lambda: seen.append(left(root)))
        return step(begin, **how)

    collector._step = slice_and_load
    pool.submit(Priority.WRITE, lambda: (seen.append(collector.make_room()), over.set()))
    assert over.wait(WAIT_S)
    pool.close(WAIT_S)
    assert {19, 18, 17} <= set(seen[: seen.index(True)])


def test_several_that_need_room_share_one_pass(root, short_slices):
    fill(root)
    pool = IoPool(1)
    collector, answers = Collector(root, pool), []
    threads = [threading.Thread(target=lambda: answers.append(collector.make_room())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == [True] * 4
    assert left(root) == 17
    pool.close(WAIT_S)


def is_free(root):
    lock = locks.KeptLock.take(root.path / ".collector")
    if lock is not None:
        lock.release()
    return lock is not None


def test_the_lock_is_held_from_slice_to_slice(root, short_slices, monkeypatch):
    fill(root)
    pool, other_pool = IoPool(1), IoPool(1)
    collector, other = Collector(root, pool), Collector(root, other_pool)
    assert collector._step(gc._always)
    assert not is_free(root)
    monkeypatch.setattr(gc, "OTHERS_WAIT_S", 0.05)
    assert not other.make_room()
    assert collector.collect().objects == 3
    assert is_free(root)
    pool.close(WAIT_S)
    other_pool.close(WAIT_S)


def test_a_closed_pool_ends_the_pass(root, short_slices):
    fill(root)
    pool = IoPool(1)
    collector = Collector(root, pool)
    gate = threading.Event()
    pool.submit(Priority.LOAD, lambda: gate.wait(WAIT_S) and None)
    collector.note_written()
    pool.close(0.0)
    gate.set()
    pool.close(WAIT_S)
    assert left(root) == 20, "one slice: the first folder"
    assert is_free(root)


def test_a_pass_that_fails_lets_go_and_the_next_one_works(root, short_slices, monkeypatch):
    fill(root)
    pool = IoPool(1)
    collector = Collector(root, pool)
    end_removal = root.usage.end_removal
    monkeypatch.setattr(root.usage, "end_removal", lambda begin, *, removed_bytes: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        collector.make_room()
    assert is_free(root)
    monkeypatch.setattr(root.usage, "end_removal", end_removal)
    assert collector.make_room()
    assert left(root) == 17
    pool.close(WAIT_S)


def test_a_count_corrects_and_removes_nothing_that_fits(root):
    fill(root, 19)
    pool = IoPool(1)
    (root.path / ".usage").write_bytes(b"\xff" * 24)
    collector = Collector(root, pool)
    collector.take_stock()
    assert collector._queued.acquire(timeout=WAIT_S)  # closing the pool would end the pass between two slices
    pool.close(WAIT_S)
    assert left(root) == 19
    assert root.usage.used_bytes == 19 * OBJECT_BYTES


def test_a_folder_that_cannot_be_read_stops_nothing_and_its_bytes_count_on(root, monkeypatch):
    fill(root)
    pool, scan = IoPool(1), os.scandir
    hidden = root.path / NAMESPACES[0] / "row" / "000"

    def refuse(path):
        if str(path) == str(hidden):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert Collector(root, pool).make_room()
    monkeypatch.undo()
    assert left(root) == 17
    assert len(list(hidden.iterdir())) == 1, "the oldest of all, but nobody could see it"
    assert root.usage.used_bytes == 17 * OBJECT_BYTES
    pool.close(WAIT_S)


def test_what_is_too_old_goes_with_the_next_write_every_few_minutes(root, monkeypatch):
    pool = IoPool(1)
    collector = Collector(root, pool, ttl_s=3600.0)
    old = put(root.path, 1, used_s=int(time.time()) - 3700)
    young = put(root.path, 2, used_s=int(time.time()) - 3500)
    assert collector._is_due()
    collector.collect()
    assert (old.exists(), young.exists()) == (False, True)
    assert not collector._is_due()
    monkeypatch.setattr(collector, "_next_expiry", 0.0)
    assert not collector._is_due(), "somebody looked lately: the lock's time says so"
    long_ago = time.time() - gc.EXPIRY_INTERVAL_S - 1
    os.utime(root.path / ".collector", (long_ago, long_ago))
    assert collector._is_due()
    pool.close(WAIT_S)


def test_without_a_ttl_nothing_is_too_old(root):
    pool = IoPool(1)
    put(root.path, 1, used_s=1)
    collector = Collector(root, pool)
    assert not collector._is_due()
    assert not collector.collect().objects
    pool.close(WAIT_S)
