"""Tickets: no failure is lost, nothing is taken back, waiters wake."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.flow.ticket import Level, ResultCode, Ticket, TicketGroup
from ucm_core.ops import metrics

FAILURES = [code for code in ResultCode if code not in (ResultCode.OK, ResultCode.PENDING)]


def test_a_ticket_for_nothing_is_done_and_durable() -> None:
    ticket = Ticket(0, shards=4, durable=True)
    assert ticket.wait(0)
    assert ticket.wait_durable(0)
    assert ticket.ok
    assert ticket.level is Level.SYNCED


def test_pending_is_neither_done_nor_ok() -> None:
    ticket = Ticket(2, shards=2, durable=True)
    ticket.settle([0], ResultCode.OK)
    assert not ticket.done
    assert not ticket.ok
    assert not ticket.wait(0)
    assert not ticket.wait_durable(0)


def test_what_is_abandoned_ends_at_once() -> None:
    ticket = Ticket(2, shards=2, durable=True)
    ticket.settle([0], ResultCode.OK)
    ticket.abandon()
    assert ticket.done
    assert ticket.object_results.tolist() == [ResultCode.OK, ResultCode.CANCELLED]
    with ticket.copying() as wanted:
        assert not wanted
    assert ticket.durable_results.tolist() == [ResultCode.PENDING, ResultCode.CANCELLED]


def test_what_is_abandoned_while_it_is_copied_ends_with_the_last_copy() -> None:
    ticket = Ticket(2, durable=False)
    with ticket.copying() as outer:
        with ticket.copying() as inner:
            ticket.abandon()
            ticket.settle([0], ResultCode.OK)
        assert not ticket.done
    assert (outer, inner) == (True, True)
    assert ticket.object_results.tolist() == [ResultCode.OK, ResultCode.CANCELLED]


def test_a_copy_that_raises_is_over() -> None:
    ticket = Ticket(1, durable=False)
    with pytest.raises(ValueError, match="on purpose"), ticket.copying():
        raise ValueError("on purpose")
    ticket.abandon()
    assert ticket.done


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("-inf")])
def test_what_is_no_time_waits_for_nothing(timeout_s: float) -> None:
    ticket = Ticket(1, durable=True)
    assert not ticket.wait(timeout_s)
    assert not ticket.wait_durable(timeout_s)


@pytest.mark.parametrize("timeout_s", [1e308, float("inf")])
def test_the_longest_time_ends_when_the_ticket_is_done(timeout_s: float) -> None:
    ticket = Ticket(1, durable=True)
    timer = threading.Timer(0.01, lambda: ticket.settle_rest(ResultCode.OK))
    timer.start()
    assert ticket.wait_durable(timeout_s)
    timer.join()


@pytest.mark.parametrize("code", FAILURES)
def test_a_failed_result_is_a_failed_durable_result(code: ResultCode) -> None:
    ticket = Ticket(1, durable=True)
    ticket.settle([0], code)
    ticket.settle_durable([0], ResultCode.OK)
    assert not ticket.wait_durable(0)
    assert ticket.durable_results.tolist() == [code]
    assert ticket.object_results.tolist() == [code]


def test_a_code_is_never_taken_back() -> None:
    ticket = Ticket(1, shards=2, durable=False)
    ticket.settle([0], ResultCode.CORRUPT, shards=slice(0, 1))
    ticket.settle([0], ResultCode.OK)
    assert ticket.results.tolist() == [[ResultCode.CORRUPT, ResultCode.OK]]
    assert ticket.object_results.tolist() == [ResultCode.CORRUPT]


def test_a_medium_failure_leaves_the_result_good() -> None:
    ticket = Ticket(2, durable=True)
    ticket.settle([0, 1], ResultCode.OK)
    ticket.settle_durable([0, 1], [ResultCode.OK, ResultCode.NO_SPACE])
    assert ticket.ok
    assert not ticket.wait_durable(0)
    assert ticket.durable_results.tolist() == [ResultCode.OK, ResultCode.NO_SPACE]
    assert ticket.levels.tolist() == [Level.ON_MEDIUM, Level.IN_RING]


def test_the_level_is_the_lowest_of_all_objects() -> None:
    ticket = Ticket(2, durable=True)
    assert ticket.level is Level.SUBMITTED
    ticket.settle([0, 1], ResultCode.OK)
    assert ticket.level is Level.IN_RING
    ticket.settle_durable([0], ResultCode.OK, level=Level.SYNCED)
    assert ticket.level is Level.IN_RING
    ticket.settle_durable([1], ResultCode.OK)
    assert ticket.level is Level.ON_MEDIUM


def test_a_load_asks_nothing_of_the_medium() -> None:
    ticket = Ticket(1, durable=False)
    ticket.settle([0], ResultCode.OK)
    assert ticket.wait_durable(0)


def test_one_shard_can_be_waited_for() -> None:
    ticket = Ticket(2, shards=3, durable=False)
    ticket.settle([0, 1], ResultCode.OK, shards=slice(1, 2))
    assert ticket.wait(0, shard=1)
    assert not ticket.wait(0, shard=2)


def test_waiters_on_other_threads_wake() -> None:
    ticket = Ticket(1, durable=True)
    answers: list[bool] = []
    waiters = [
        threading.Thread(target=lambda w=w: answers.append(w(30.0)))
        for w in (ticket.wait, ticket.wait_durable)
    ]
    for waiter in waiters:
        waiter.start()
    ticket.settle([0], ResultCode.OK)
    ticket.settle_durable([0], ResultCode.OK)
    for waiter in waiters:
        waiter.join()
    assert answers == [True, True]


def test_callbacks_run_once_whether_early_or_late() -> None:
    ticket = Ticket(1, durable=False)
    seen: list[str] = []
    ticket.add_done_callback(lambda _: seen.append("early"))
    assert seen == []
    ticket.settle([0], ResultCode.OK)
    ticket.settle([0], ResultCode.OK)
    ticket.add_done_callback(lambda _: seen.append("late"))
    assert seen == ["early", "late"]


def test_a_raising_callback_is_counted_and_the_next_still_runs() -> None:
    before = metrics.ERRORS.labels(where="ticket_callback")._value.get()
    ticket = Ticket(1, durable=False)
    seen: list[Ticket] = []
    ticket.add_done_callback(lambda _: 1 // 0)
    ticket.add_done_callback(seen.append)
    ticket.settle([0], ResultCode.OK)
    assert seen == [ticket]
    assert metrics.ERRORS.labels(where="ticket_callback")._value.get() == before + 1


def test_the_rest_can_be_settled_at_a_border() -> None:
    ticket = Ticket(3, shards=2, durable=True)
    ticket.settle([0], ResultCode.OK)
    ticket.settle_rest(ResultCode.UNAVAILABLE)
    assert ticket.object_results.tolist() == [ResultCode.OK, ResultCode.UNAVAILABLE, ResultCode.UNAVAILABLE]
    assert ticket.durable_results.tolist() == [ResultCode.UNAVAILABLE] * 3


def test_what_the_caller_reads_is_a_copy() -> None:
    ticket = Ticket(1, durable=True)
    ticket.results[:] = ResultCode.OK
    ticket.durable_results[:] = ResultCode.OK
    assert not ticket.done
    assert not ticket.ok


events = st.lists(
    st.tuples(
        st.sampled_from(["settle", "durable"]), st.integers(0, 3), st.sampled_from([ResultCode.OK, *FAILURES])
    )
)


@given(events)
def test_the_first_code_of_each_question_stands(moves: list[tuple[str, int, ResultCode]]) -> None:
    ticket = Ticket(4, shards=2, durable=True)
    results: dict[int, int] = {}
    durable: dict[int, int] = {}
    for move, index, code in moves:
        if move == "settle":
            ticket.settle([index], code)
            results.setdefault(index, code)
            if results[index] != ResultCode.OK:
                durable.setdefault(index, results[index])
        else:
            ticket.settle_durable([index], code)
            durable.setdefault(index, code)
    expected = np.array([results.get(i, ResultCode.PENDING) for i in range(4)])
    assert (ticket.results == expected[:, None]).all()
    assert ticket.durable_results.tolist() == [durable.get(i, ResultCode.PENDING) for i in range(4)]
    assert ticket.done == (ResultCode.PENDING not in expected)


def test_a_group_is_as_good_as_its_worst_row() -> None:
    good, bad = Ticket(1, durable=True), Ticket(2, durable=True)
    group = TicketGroup({"good": good, "bad": bad})
    good.settle([0], ResultCode.OK)
    assert not group.wait(0)
    assert group.level is Level.SUBMITTED
    bad.settle([0, 1], [ResultCode.OK, ResultCode.NO_SPACE])
    assert group.wait(0)
    assert not group.ok
    good.settle_durable([0], ResultCode.OK)
    bad.settle_durable([0], ResultCode.OK)
    assert not group.wait_durable(0)


def test_a_group_that_is_durable_says_so() -> None:
    tickets = {name: Ticket(1, durable=True) for name in "ab"}
    group = TicketGroup(tickets)
    for ticket in tickets.values():
        ticket.settle([0], ResultCode.OK)
        assert not group.wait_durable(0)
        ticket.settle_durable([0], ResultCode.OK)
    assert group.wait_durable(0)
    assert group.ok
    assert group.level is Level.ON_MEDIUM


def test_a_group_of_no_rows_is_done() -> None:
    group = TicketGroup({})
    assert group.wait(0)
    assert group.wait_durable()
    assert group.level is Level.SYNCED


def test_a_group_waits_no_longer_than_asked_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ticket would take a quarter of a second, on a clock that stands in for time."""
    now, given = [100.0], []

    def wait(ticket: Ticket, timeout_s: float) -> bool:
        given.append(timeout_s)
        now[0] += min(timeout_s, 0.25)
        return timeout_s >= 0.25

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Ticket, "wait", wait)
    group = TicketGroup({str(number): Ticket(1, durable=True) for number in range(6)})
    assert not group.wait(1.0)
    assert (given, now) == ([1.0, 0.75, 0.5, 0.25, 0.0, 0.0], [101.0])


def test_a_group_calls_back_once_when_all_rows_are_done() -> None:
    tickets = {name: Ticket(2, durable=False) for name in "ab"}
    called: list[bool] = []
    group = TicketGroup(tickets)
    group.add_done_callback(lambda: called.append(group.wait(0)))
    tickets["a"].settle([0, 1], ResultCode.OK)
    tickets["b"].settle([0], ResultCode.MISS)
    assert called == []
    tickets["b"].settle([1], ResultCode.OK)
    assert called == [True]


@pytest.mark.parametrize("rows", [[], ["a"], ["a", "b"]])
def test_a_group_that_is_done_calls_back_at_once(rows: list[str]) -> None:
    called: list[int] = []
    TicketGroup({row: Ticket(0, durable=False) for row in rows}).add_done_callback(lambda: called.append(1))
    assert called == [1]


def test_what_was_there_before_is_ok_and_not_stored() -> None:
    ticket = Ticket(4, shards=2, durable=True)
    ticket.settle_present([1])
    ticket.settle([0, 2], [ResultCode.OK, ResultCode.NO_SPACE])
    assert ticket.object_results[:3].tolist() == [ResultCode.OK, ResultCode.OK, ResultCode.NO_SPACE]
    assert ticket.stored.tolist() == [True, False, False, False]
    assert ticket.levels.tolist()[:2] == [Level.IN_RING, Level.ON_MEDIUM]


def test_each_shard_may_have_its_own_code_and_damage_is_what_the_object_is() -> None:
    ticket = Ticket(2, shards=3, durable=False)
    codes = [[ResultCode.MISS, ResultCode.CORRUPT, ResultCode.MISS], [ResultCode.OK] * 3]
    ticket.settle([1, 0], codes)
    assert ticket.results.tolist() == codes[::-1]
    assert ticket.object_results.tolist() == [ResultCode.OK, ResultCode.CORRUPT]


class TestShardCallbacks:
    def test_it_is_called_once_every_object_has_its_code_of_the_shard(self) -> None:
        ticket, called = Ticket(2, 3, durable=False), []
        ticket.add_shard_callback(1, called.append)
        ticket.settle([0], ResultCode.OK)
        ticket.settle([1], ResultCode.MISS, shards=slice(0, 1))
        assert called == []
        ticket.settle([1], ResultCode.MISS, shards=slice(1, 2))
        assert called == [ticket]
        ticket.settle_rest(ResultCode.CANCELLED)
        assert called == [ticket]

    def test_what_is_known_already_is_told_at_once(self) -> None:
        ticket, called = Ticket(1, 2, durable=False), []
        ticket.settle([0], ResultCode.OK, shards=slice(1, 2))
        ticket.add_shard_callback(1, called.append)
        assert called == [ticket]

    def test_all_of_a_settlement_are_called_though_one_raises(self) -> None:
        def refuse(_: Ticket) -> None:
            raise OSError("no")

        ticket, called = Ticket(1, 2, durable=False), []
        for shard, callback in ((0, refuse), (0, called.append), (1, called.append)):
            ticket.add_shard_callback(shard, callback)
        ticket.settle_rest(ResultCode.OK)
        assert called == [ticket, ticket]
