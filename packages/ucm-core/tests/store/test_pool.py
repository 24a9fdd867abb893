"""The threads of a cache: priorities, no lost work, no thread lost to an exception."""

from __future__ import annotations

import os
import re
import threading
import weakref
from pathlib import Path
from random import Random

import pytest

from ucm_core.ops import metrics
from ucm_core.store.pool import IoPool, Priority

WAIT_S = 60.0


def test_loads_overtake_writes() -> None:
    pool = IoPool(1)
    gate = threading.Event()
    order: list[str] = []
    pool.submit(Priority.LOAD, lambda: gate.wait(WAIT_S) and None)
    for name in ("background", "write", "prefetch", "load", "second load"):
        priority = Priority[name.removeprefix("second ").upper()]
        pool.submit(priority, lambda name=name: order.append(name))
    gate.set()
    pool.close(WAIT_S)
    assert order == ["load", "second load", "prefetch", "write", "background"]


def test_the_smallest_rank_goes_first_and_equal_ones_in_turn() -> None:
    pool, gate, order = IoPool(1), threading.Event(), []
    pool.submit(Priority.LOAD, lambda: gate.wait(WAIT_S) and None)
    for number, rank in enumerate((3, -1, 3, 0)):
        pool.submit(Priority.LOAD, lambda number=number: order.append(number), rank=rank)
    gate.set()
    pool.close(WAIT_S)
    assert order == [1, 3, 0, 2]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_read_is_done_while_every_thread_waits_for_it(threads: int) -> None:
    pool, waiting, read = IoPool(threads), threading.Semaphore(0), threading.Event()
    for _ in range(threads):
        pool.submit(Priority.LOAD, lambda: (waiting.release(), read.wait(WAIT_S), None)[2])
    assert all(waiting.acquire(timeout=WAIT_S) for _ in range(threads))
    pool.submit(Priority.READ, read.set)
    assert read.wait(WAIT_S)
    assert pool.close(WAIT_S)


@pytest.mark.parametrize("threads", [1, 3])
def test_reads_go_on_while_a_medium_keeps_the_thread_that_only_reads(threads: int) -> None:
    pool, begun = IoPool(threads), threading.Semaphore(0)
    pass_, stuck, read = (threading.Event() for _ in range(3))
    for gate in (*[pass_] * threads, stuck):
        pool.submit(Priority.READ, lambda gate=gate: (begun.release(), gate.wait(WAIT_S), None)[2])
        assert begun.acquire(timeout=WAIT_S)
    pool.submit(Priority.READ, read.set)
    for _ in range(threads - 1):
        pool.submit(Priority.READ, lambda: (begun.release(), stuck.wait(WAIT_S), None)[2])
    pass_.set()
    assert read.wait(WAIT_S)
    stuck.set()
    assert pool.close(WAIT_S)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kept_by", [Priority.LOAD, Priority.READ, Priority.PREFETCH])
def test_copies_are_done_while_a_medium_keeps_every_thread(kept_by: Priority, threads: int) -> None:
    pool, stuck, go = IoPool(threads), threading.Semaphore(0), threading.Event()
    for _ in range(threads + (kept_by is Priority.READ)):  # the thread that only reads is stuck as well
        pool.submit(kept_by, lambda: (stuck.release(), go.wait(WAIT_S), None)[2])
        assert stuck.acquire(timeout=WAIT_S)
    for _ in range(3):
        copied = threading.Semaphore(0)
        for _ in range(2):
            pool.submit(Priority.COPY, copied.release)
        assert all(copied.acquire(timeout=WAIT_S) for _ in range(2))
    go.set()
    assert pool.close(WAIT_S)


@pytest.mark.parametrize(("processors", "most"), [(None, 1), (1, 1), (2, 1), (4, 2), (64, 3)])
def test_copies_keep_no_more_threads_than_half_of_the_processors(
    monkeypatch: pytest.MonkeyPatch, processors: int | None, most: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    pool, copying, go = IoPool(3), threading.Semaphore(0), threading.Event()
    loaded, copied = threading.Event(), threading.Semaphore(0)
    for _ in range(5):
        pool.submit(Priority.COPY, lambda: (copying.release(), go.wait(WAIT_S), copied.release(), None)[3])
    assert all(copying.acquire(timeout=WAIT_S) for _ in range(most))
    if most < 3:  # another thread is free, and takes what may begin
        pool.submit(Priority.LOAD, loaded.set)
        assert loaded.wait(WAIT_S)
    assert (pool.copy_threads, copying.acquire(blocking=False)) == (most, False)
    go.set()
    assert all(copied.acquire(timeout=WAIT_S) for _ in range(5))
    assert pool.close(WAIT_S)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_nothing_of_a_burst_is_left_lying(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    pool, random = IoPool(threads), Random(threads)
    for _ in range(200):
        done, count = threading.Semaphore(0), random.randint(1, 12)
        for _ in range(count):
            pool.submit(random.choice([Priority.COPY, Priority.LOAD, Priority.WRITE]), done.release)
        assert all(done.acquire(timeout=WAIT_S) for _ in range(count))
    assert pool.close(WAIT_S)


def test_giving_way_copies_as_well() -> None:
    pool, order, done = IoPool(1), [], threading.Event()

    def write() -> None:
        pool._busy[Priority.COPY] += 1  # as if somebody copied: no thread beside this one takes it
        pool.submit(Priority.COPY, lambda: order.append("copy"))
        pool._busy[Priority.COPY] -= 1
        pool.give_way()
        order.append("write")
        done.set()

    pool.submit(Priority.WRITE, write)
    assert done.wait(WAIT_S)
    pool.close(WAIT_S)
    assert order == ["copy", "write"]


def test_threads_start_on_demand_and_no_more_than_allowed() -> None:
    pool = IoPool(3)
    barrier = threading.Barrier(4)
    before = threading.active_count()
    for _ in range(3):
        pool.submit(Priority.LOAD, lambda: barrier.wait(WAIT_S) and None)
    barrier.wait(WAIT_S)
    assert threading.active_count() <= before + 3
    pool.close(WAIT_S)
    assert pool.threads == 3


def test_close_finishes_what_is_queued_and_refuses_more() -> None:
    pool = IoPool(2)
    done: list[int] = []
    for number in range(100):
        assert pool.submit(Priority.WRITE, lambda number=number: done.append(number))
    pool.close(WAIT_S)
    assert sorted(done) == list(range(100))
    assert not pool.submit(Priority.LOAD, lambda: done.append(-1))
    assert -1 not in done


@pytest.mark.parametrize("error", [RuntimeError, KeyError, OSError])
def test_work_that_raises_costs_no_thread(error: type[Exception]) -> None:
    pool = IoPool(1)
    counter = metrics.ERRORS.labels(where="io_thread")
    before = counter._value.get()
    done = threading.Event()

    def fail() -> None:
        raise error("on purpose")

    for _ in range(3):
        pool.submit(Priority.LOAD, fail)
    pool.submit(Priority.LOAD, done.set)
    assert done.wait(WAIT_S)
    assert counter._value.get() == before + 3
    pool.close(WAIT_S)


@pytest.mark.parametrize("timeout_s", [1e10, 1e300, float("inf")])
def test_a_pool_waits_for_its_end_any_number_of_seconds(timeout_s: float) -> None:
    pool, done = IoPool(1), []
    pool.submit(Priority.WRITE, lambda: done.append(1))
    assert pool.close(timeout_s)
    assert done == [1]


def test_a_pool_may_be_closed_by_its_own_work() -> None:
    pool, ended = IoPool(1), []
    pool.submit(Priority.LOAD, lambda: ended.append(pool.close(WAIT_S)))
    assert pool.close(WAIT_S)
    assert ended == [False], "its own thread had not ended"


class NoThread(threading.Thread):
    """Stands for a system that has no more threads."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_without_any_thread_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", NoThread)
    pool = IoPool(2)
    assert not pool.submit(Priority.LOAD, lambda: None)
    pool.close(WAIT_S)


def test_the_threads_that_there_are_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, both = IoPool(2), threading.Semaphore(0)
    assert pool.submit(Priority.LOAD, both.release)
    monkeypatch.setattr(threading, "Thread", NoThread)
    assert all(pool.submit(Priority.LOAD, both.release) for _ in range(9))
    assert all(both.acquire(timeout=WAIT_S) for _ in range(10))
    pool.close(WAIT_S)


@pytest.mark.parametrize(
    ("threads", "asked", "most"), [(1, None, 1), (2, None, 1), (4, None, 3), (4, 2, 2), (2, 9, 2)]
)
def test_writes_leave_a_thread_for_loads(threads: int, asked: int | None, most: int) -> None:
    assert IoPool(threads, write_threads=asked).write_threads == most


def test_a_load_is_served_while_all_writes_that_may_run_are_stuck() -> None:
    pool, stuck, gate, loaded = IoPool(2), threading.Semaphore(0), threading.Event(), threading.Event()

    def write() -> None:
        stuck.release()
        assert gate.wait(WAIT_S)

    for _ in range(4):
        pool.submit(Priority.WRITE, write)
    assert stuck.acquire(timeout=WAIT_S)
    pool.submit(Priority.LOAD, loaded.set)
    assert loaded.wait(WAIT_S)
    assert not stuck.acquire(blocking=False)
    gate.set()
    pool.close(WAIT_S)
    assert all(stuck.acquire(blocking=False) for _ in range(3))


class Memory:
    """Stands for memory that a piece of work uses."""

    def use(self) -> None:
        """Nothing to do."""


def test_an_idle_thread_keeps_nobodys_memory_alive() -> None:
    pool, gone, memory = IoPool(1), threading.Event(), Memory()
    weakref.finalize(memory, gone.set)
    pool.submit(Priority.LOAD, memory.use)
    del memory
    assert gone.wait(WAIT_S)
    pool.close(WAIT_S)


def wake_ups(threads: set[threading.Thread]) -> int:
    """How often these threads have gone to sleep so far, as the kernel counts it."""
    status = [Path(f"/proc/self/task/{thread.native_id}/status").read_text() for thread in threads]
    return sum(int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.M)[1]) for text in status)


def stay_asleep(threads: set[threading.Thread]) -> bool:
    """Whether none of them wakes up within a second."""
    before = wake_ups(threads)
    threading.Event().wait(1.0)
    return wake_ups(threads) == before


def test_idle_threads_sleep_without_waking_and_end_at_close() -> None:
    pool, all_four, before = IoPool(3), threading.Barrier(4), set(threading.enumerate())
    for _ in range(3):
        pool.submit(Priority.LOAD, lambda: all_four.wait(WAIT_S) and None)
    all_four.wait(WAIT_S)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    assert any(stay_asleep(threads) for _ in range(60)), "at first some may be on their way to sleep"
    pool.close(WAIT_S)
    assert not threads & set(threading.enumerate())


def test_giving_way_runs_the_queued_loads_here_and_nothing_else() -> None:
    pool, busy, gate, order = IoPool(1), threading.Event(), threading.Event(), []
    pool.submit(Priority.LOAD, lambda: (busy.set(), gate.wait(WAIT_S), None)[2])
    assert busy.wait(WAIT_S)
    for name in ("write", "load", "prefetch", "second load"):
        priority = Priority[name.removeprefix("second ").upper()]
        pool.submit(priority, lambda name=name: order.append((name, threading.get_ident())))
    pool.give_way()
    taken, here = [name for name, _ in order], {thread for _, thread in order}
    assert [name for name in taken if "load" in name] == taken
    assert here <= {threading.get_ident()}
    gate.set()
    pool.close(WAIT_S)
    assert sorted(name for name, _ in order) == ["load", "prefetch", "second load", "write"]


def test_a_thread_whose_start_a_signal_ended_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interruption(BaseException):
        """What a signal's handler raises."""

    class Interrupted(threading.Thread):
        """Runs, but its start ends before anybody knows that."""

        def start(self) -> None:
            started.append(self)
            super().start()
            raise Interruption

        def is_alive(self) -> bool:
            return False

    started: list[threading.Thread] = []
    pool, done = IoPool(2), threading.Event()
    with monkeypatch.context() as changed:
        changed.setattr("ucm_core.store.pool.threading.Thread", Interrupted)
        with pytest.raises(Interruption):
            pool.submit(Priority.LOAD, done.set)
    started[0].join(WAIT_S)
    assert not threading.Thread.is_alive(started[0])
    assert pool.submit(Priority.LOAD, done.set)
    assert done.wait(WAIT_S)
    assert pool.close(WAIT_S)
