"""One call's tickets: bounded waits, and nothing that touches SGLang's memory after the call."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_sglang import moves
from ucm_sglang.moves import Move

KEYS = np.arange(3, dtype=np.uint8)[:, None].repeat(32, axis=1)


def ticket(*codes):
    made = Ticket(3, 2, durable=True)
    for place, code in enumerate(codes):
        made.settle([place], code)
    return made


def test_a_page_is_kept_when_every_row_has_it():
    with Move("load") as move:
        move.begin("full", KEYS, ticket=ticket(ResultCode.OK, ResultCode.OK, ResultCode.MISS))
        move.begin("window", KEYS, ticket=ticket(ResultCode.OK, ResultCode.CORRUPT, ResultCode.OK))
        move.wait()
    assert move.kept().tolist() == [True, False, False]


def test_what_failed_is_told_row_by_row():
    with Move("load") as move:
        move.begin("full", KEYS, ticket=ticket(ResultCode.OK, ResultCode.OK, ResultCode.OK))
        move.begin("window", KEYS, ticket=ticket(ResultCode.OK, ResultCode.CORRUPT, ResultCode.OK))
    assert [(row, keys.tolist()) for row, keys in move.failed()] == [("window", KEYS[1:2].tolist())]


def test_a_medium_that_hangs_is_given_up_and_what_came_is_kept():
    hung = ticket(ResultCode.OK)
    with Move("load", wait_s=0.01) as move:
        move.begin("full", KEYS, ticket=hung)
        move.wait()
    assert move.kept().tolist() == [True, False, False]
    assert hung.object_results.tolist() == [ResultCode.OK, ResultCode.CANCELLED, ResultCode.CANCELLED]


class HungTicket(Ticket):
    """A double of the ticket of a hung medium, on a clock of its own: waiting takes all the time there is."""

    now_s = 0.0

    def wait(self, timeout_s=None):
        if timeout_s is None:
            return super().wait()
        HungTicket.now_s += timeout_s
        return False


def test_rows_share_one_bound(monkeypatch):
    monkeypatch.setattr(moves, "time", SimpleNamespace(monotonic=lambda: HungTicket.now_s))
    with Move("load", wait_s=8.0) as move:
        for row in range(20):
            move.begin(str(row), KEYS, ticket=HungTicket(3, 2, durable=True))
        move.wait()
        assert HungTicket.now_s == 8.0
    assert not move.kept().any()


def test_after_it_nothing_is_copied_any_more():
    """A copy that runs when the wait ends is over when the call is; one that has not begun never does."""
    hung, copying, go_on, seen = ticket(), threading.Event(), threading.Event(), []

    def copy():
        with hung.copying() as wanted:
            copying.set()
            go_on.wait(60)
            seen.append(wanted)

    thread = threading.Thread(target=copy)
    with Move("load", wait_s=0.01) as move:
        move.begin("full", KEYS, ticket=hung)
        thread.start()
        assert copying.wait(60)
        move.wait()
        threading.Timer(0.05, go_on.set).start()
    assert seen == [True]
    with hung.copying() as wanted:
        assert not wanted
    thread.join(60)


def test_it_ends_its_tickets_when_the_call_raises():
    begun = ticket()

    def call():
        with Move("load") as move:
            move.begin("full", KEYS, ticket=begun)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        call()
    assert begun.done


def test_what_is_not_on_the_medium_in_time_is_not_durable():
    saved = ticket(ResultCode.OK, ResultCode.OK, ResultCode.NO_SPACE)
    saved.settle_durable([0], ResultCode.OK)
    with Move("save", wait_s=0.01) as move:
        move.begin("state", KEYS, ticket=saved)
        move.wait()
    assert move.on_medium().tolist() == [True, False, False]
    assert move.kept().tolist() == [True, True, False]
