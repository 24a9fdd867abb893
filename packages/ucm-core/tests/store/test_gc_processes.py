"""Collectors and writers of several processes: killed at every step, stopped, side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal

import numpy as np
import pytest
from objects import GEOMETRY, SEED, Payloads, make_keys, open_shelf
from stores import open_store
from test_census import listed, put

from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode
from ucm_core.store import gc, usage
from ucm_core.store.files import FileTier
from ucm_core.store.gc import Collector
from ucm_core.store.pool import IoPool
from ucm_core.store.root import CacheRoot
from ucm_core.store.stack import ring_name
from ucm_core.testing.block_store import keys_of, payloads_of

FORK = multiprocessing.get_context("fork")
OBJECT_BYTES = 1000
CAPACITY_BYTES = 24 * OBJECT_BYTES
SIZE = GEOMETRY.object_bytes
WAIT_S = 60.0


class Fate:
    """Ends (or stops) this process at the n-th step that changes anything; counts them otherwise."""

    def __init__(self, at=None, signal_=signal.SIGKILL):
        self.at, self.signal, self.steps = at, signal_, 0

    def step(self, call):
        def stepped(*arguments, **named):
            self.meet()
            result = call(*arguments, **named)
            self.meet()
            return result

        return stepped

    def meet(self):
        self.steps += 1
        if self.steps == self.at:
            os.kill(os.getpid(), self.signal)

    def over(self, *places):
        for owner, name in places:
            setattr(owner, name, self.step(getattr(owner, name)))
        return self


def in_child(work, *arguments):
    """Run ``work`` in a forked process; its exit code (negative: the signal), once it ended or stopped."""
    child = FORK.Process(target=work, args=arguments)
    child.start()
    return child


def fill(path):
    """12 families of 2 segments, the bound exactly full."""
    for number in range(12):
        for segment in "ab":
            put(path, number << 116, segment=segment, size=OBJECT_BYTES, used_s=1000 + number)


def collect(path, at, signal_=signal.SIGKILL):
    gc.SLICE_S = WAIT_S  # one slice: how many steps there are does not hang on time
    root, pool = CacheRoot(path, capacity_bytes=CAPACITY_BYTES).open(), IoPool(1)
    fate = Fate(at, signal_).over((os, "unlink"), (os, "pwrite"), (os, "utime"), (os, "scandir"))
    Collector(root, pool).make_room()
    os._exit(min(fate.steps, 250))


def objects(path):
    return list(path.glob("*/*/???/*"))


def partial_families(path):
    names = [file.name[:32] for file in objects(path)]
    return sum(names.count(name) == 1 for name in set(names))


def steps_of(work, path):
    child = in_child(work, path, None)
    child.join(WAIT_S)
    assert child.exitcode > 8
    return child.exitcode


def test_a_collector_that_dies_at_any_step_leaves_true_books_and_no_lock(tmp_path):
    fill(tmp_path / "count")
    for at in range(1, steps_of(collect, tmp_path / "count") + 1):
        path = tmp_path / str(at)
        fill(path)
        child = in_child(collect, path, at)
        child.join(WAIT_S)
        assert child.exitcode == -signal.SIGKILL
        assert partial_families(path) <= 1
        assert {file.stat().st_size for file in objects(path)} == {OBJECT_BYTES}
        with CacheRoot(path, capacity_bytes=CAPACITY_BYTES) as root:
            pool = IoPool(1)
            assert root.usage.used_bytes >= len(objects(path)) * OBJECT_BYTES
            assert Collector(root, pool).make_room()
            assert root.usage.used_bytes == len(objects(path)) * OBJECT_BYTES
            assert 18 <= len(objects(path)) <= 20
            pool.close(WAIT_S)


def write(path, at):
    shelf = open_shelf(path, capacity_bytes=4 * SIZE)
    fate = Fate(at).over((os, "pwrite"), (usage.Usage, "reserve_objects"), (usage.Usage, "settle"))
    shelf.write(make_keys(3))
    shelf.tier.drop(make_keys(1))
    os._exit(min(fate.steps, 250))


def test_a_writer_that_dies_at_any_step_takes_no_room_with_it(tmp_path):
    for at in range(1, steps_of(write, tmp_path / "count") + 1):
        path = tmp_path / str(at)
        child = in_child(write, path, at)
        child.join(WAIT_S)
        assert child.exitcode == -signal.SIGKILL
        shelf = open_shelf(path, capacity_bytes=4 * SIZE)
        whole = len(objects(path))
        assert shelf.temporaries() == []
        assert shelf.root.usage.used_bytes == whole * SIZE
        codes = shelf.write(make_keys(5, seed=1))
        assert codes.count(ResultCode.OK) == 4 - whole
        shelf.root.close()


def test_who_is_stopped_in_a_pass_stops_nobody_else(tmp_path):
    fill(tmp_path)
    child = in_child(collect, tmp_path, 60, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    with CacheRoot(tmp_path, capacity_bytes=CAPACITY_BYTES) as root:
        pool = IoPool(1)
        collector = Collector(root, pool)
        collector.note_written()
        assert not collector.collect().objects
        child.kill()
        child.join(WAIT_S)
        assert collector.make_room()
        assert len(objects(tmp_path)) == 20
        pool.close(WAIT_S)


def open_shared(path):
    """A store whose ring all processes share."""
    return open_store(path, GEOMETRY, ring_name=ring_name(path, "none", row="row", segment="all"))


def pin_in_child(path, pinned, over):
    """Keep two of four blocks in the ring until told to end."""
    store = open_shared(path)
    blocks = BufferBlocks(payloads_of(GEOMETRY, 0, 1, 2, 3))
    assert store.save(keys_of(0, 1, 2, 3), blocks).wait_durable(WAIT_S)
    with store.pin(keys_of(1, 3)):
        pinned.set()
        over.wait(WAIT_S)
    store.close()
    os._exit(0)


class RingOf:
    """A double of a cache: knows the ring of one store."""

    def __init__(self, store):
        self.residents = store.residents

    def covers(self):
        return ()


def test_what_another_process_uses_in_the_ring_stays(tmp_path):
    pinned, over = FORK.Event(), FORK.Event()
    child = in_child(pin_in_child, tmp_path, pinned, over)
    assert pinned.wait(WAIT_S)
    store = open_shared(tmp_path)
    with CacheRoot(tmp_path, capacity_bytes=SIZE) as root:
        pool = IoPool(1)
        assert Collector(root, pool, view=RingOf(store)).collect().objects == 2
        assert store.residents().in_use() == {key[:16].tobytes() for key in keys_of(1, 3)}
        over.set()
        child.join(WAIT_S)
        assert child.exitcode == 0
        assert Collector(root, pool, view=RingOf(store)).collect().objects == 2
        pool.close(WAIT_S)
    store.close()


def write_many(path, seed, killed):
    """Keep what the bound allows of 60 objects, making room for each; perhaps die on the way."""
    shelf, pool = open_shelf(path, capacity_bytes=8 * SIZE), IoPool(1)
    collector = Collector(shelf.root, pool)
    for number, key in enumerate(make_keys(60, seed=seed)):
        if number == 30 and killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if shelf.write(key[None]) == [ResultCode.NO_SPACE] and collector.make_room():
            shelf.write(key[None])
        collector.note_written()
    pool.close(WAIT_S)
    shelf.root.close()
    os._exit(0)


def bytes_of(path):
    total = 0
    for file in objects(path):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_rivals_that_write_and_collect_never_pass_the_bound(tmp_path):
    children = [in_child(write_many, tmp_path, seed, seed == 2) for seed in range(3)]
    most = 0
    while any(child.is_alive() for child in children):
        most = max(most, bytes_of(tmp_path))
    for child in children:
        child.join(WAIT_S)
    assert sorted(child.exitcode for child in children) == [-signal.SIGKILL, 0, 0]
    assert 0 < most <= 8 * SIZE
    with CacheRoot(tmp_path) as root:
        assert root.usage.used_bytes == bytes_of(tmp_path) <= 8 * SIZE
        assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("by", ["segment", "family"])
def test_twenty_families_through_room_for_eight_leave_none_half(tmp_path, by):
    """C-50: 60 segments through 24 places; in whichever order their ranks write them."""
    with CacheRoot(tmp_path, capacity_bytes=24 * SIZE) as root:
        pool = IoPool(1)
        collector = Collector(root, pool)
        segments = ("h0", "h1", "h2")
        tiers = {
            name: FileTier(tmp_path / ("0" * 32) / "full", GEOMETRY, row_seed=SEED, segment=name, root=root)
            for name in segments
        }
        families = [(number, name) for number in range(20) for name in segments]
        if by == "segment":  # five families at a time, rank after rank
            families.sort(key=lambda one: (one[0] // 5, one[1]))
        payload = Payloads(1)
        for number, name in families:
            key = make_keys(1, seed=number)
            while tiers[name].write(key, payload.addresses)[0] == ResultCode.NO_SPACE:
                assert collector.make_room()
        census = listed(tmp_path)
        sizes = census.families().sizes
        assert set(sizes.tolist()) == {3 * SIZE}
        assert 5 <= len(sizes) <= 8
        found = np.stack(
            [
                tiers[name].exist(np.concatenate([make_keys(1, seed=n) for n in range(20)]))
                for name in segments
            ]
        )
        assert (found.all(axis=0) == found.any(axis=0)).all()
        pool.close(WAIT_S)
