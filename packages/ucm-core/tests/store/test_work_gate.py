"""Work that is counted: until it is ended, given up, or nobody has it any more; never longer."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator

import pytest

from ucm_core.flow.own import OwnCondition
from ucm_core.store.ledger import Work, WorkGate

WAIT_S = 20.0


@pytest.fixture
def gate() -> WorkGate:
    return WorkGate()


def test_work_counts_from_its_beginning_to_its_end(gate: WorkGate) -> None:
    works = [Work(), Work()]
    assert [gate.begin(work) for work in works] == [True, True]
    assert gate.count == 2
    gate.end(works[0])
    gate.end(works[0])
    assert gate.count == 1
    assert not gate.wait_idle(0.0)
    gate.end(works[1])
    assert gate.wait_idle(0.0)


def test_work_that_never_began_can_be_ended(gate: WorkGate) -> None:
    work = Work()
    gate.close()
    assert not gate.begin(work)
    gate.end(work)
    assert gate.count == 0


def test_work_that_nobody_has_any_more_does_not_count(gate: WorkGate) -> None:
    gate.begin(work := Work())
    waiter = threading.Thread(target=gate.wait_idle, args=(WAIT_S,))
    waiter.start()
    del work
    gc.collect()
    waiter.join(WAIT_S / 2)
    assert not waiter.is_alive()
    assert gate.count == 0


def test_what_is_given_up_does_not_start_and_what_started_is_waited_for(gate: WorkGate) -> None:
    whom, queued, started, another = object(), *(Work(name) for name in ("", "", "another"))
    queued.whom = started.whom = whom
    for work in (queued, started, another):
        gate.begin(work)
    assert gate.start(started)
    assert not gate.give_up(whom, 0.0)
    assert not gate.start(queued)
    assert gate.start(another)
    threading.Timer(0.05, gate.end, (started,)).start()
    assert gate.give_up(whom, WAIT_S)
    assert gate.count == 1


def test_a_condition_wakes_as_many_as_it_is_told() -> None:
    condition, woken = OwnCondition(), []

    def wait() -> None:
        with condition:
            condition.wait_for(lambda: turns and turns.pop(), WAIT_S)
            woken.append(True)

    turns: list[bool] = []
    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        with condition:
            turns.append(True)
            condition.notify_all()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(woken) == 3


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), 0.01])
def test_a_condition_waits_no_longer_than_told(timeout_s: float) -> None:
    condition = OwnCondition()
    with condition:
        assert not condition.wait_for(lambda: False, timeout_s)
    with condition:
        assert condition.wait_for(lambda: True, timeout_s)


class Interruption(BaseException):
    """What a signal's handler raises."""


@pytest.fixture
def interrupted() -> Iterator[threading.Event]:
    """Set once the signal has ended what this thread did."""
    ended = threading.Event()

    def interrupt(*_signal: object) -> None:
        ended.set()
        raise Interruption

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield ended
    signal.signal(signal.SIGUSR1, before)


class Watched(OwnCondition):  # type: ignore[misc]
    """Says when a wait is over and it is to be held again."""

    def __init__(self) -> None:
        super().__init__()
        self.entering = threading.Event()

    def acquire(self, *arguments: float) -> bool:
        self.entering.set()
        return bool(super().acquire(*arguments))


def test_a_signal_that_ends_a_wait_finds_the_condition_held(interrupted: threading.Event) -> None:
    """It comes when the wait is over, while somebody else holds the condition."""
    condition, waiter, told = Watched(), threading.get_ident(), []

    def tell() -> None:
        with condition:  # not before the other has begun to wait
            told.append(True)
            condition.notify_all()
            condition.entering.wait(WAIT_S)
            signal.pthread_kill(waiter, signal.SIGUSR1)
            interrupted.wait(WAIT_S)

    def wait() -> None:
        with condition:
            teller.start()
            condition.wait_for(lambda: told, WAIT_S)

    teller = threading.Thread(target=tell)
    with pytest.raises(Interruption):
        wait()
    teller.join(WAIT_S)
    assert interrupted.is_set()
    with condition:
        assert not condition._waiters
        assert not condition.wait_for(lambda: False, 0.01)
    assert not condition._is_owned()
