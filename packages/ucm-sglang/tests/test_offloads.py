"""Offloads: told of once each, in order, never before their memory is free; tickets settled by the tests."""

import random
import time

import numpy as np
import pytest
from counted import errors
from handle_doubles import KEYS, ViewDouble

from ucm_core.errors import StoreError
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_sglang.offloads import NOT_KEPT, Offload, Offloads


def offload(*rows, whole=True, lasts_s=60.0):
    tickets = {row: (KEYS, Ticket(len(KEYS), durable=True)) for row in rows}
    return Offload(ViewDouble(), tickets, whole, time.monotonic() + lasts_s)


def end(offload, code=ResultCode.OK, rows=None):
    for row in rows or offload.rows:
        offload.rows[row][1].settle(np.arange(len(KEYS)), code)


def test_all_rows_are_kept_or_it_is_not():
    kept, torn = offload("full", "state"), offload("full", "state")
    end(kept)
    end(torn, rows=["full"])
    assert not torn.done
    end(torn, ResultCode.NO_SPACE, rows=["state"])
    assert (kept.judge(), torn.judge()) == (True, False)


def test_what_was_kept_is_told_to_the_books():
    torn = offload("full", "state")
    end(torn, rows=["full"])
    end(torn, ResultCode.NO_SPACE, rows=["state"])
    torn.judge()
    assert torn.view.saved == [("full", 2), ("state", 0)]


def test_one_that_could_not_begin_whole_is_not_kept_though_all_that_began_was():
    torn = offload("full", whole=False)
    end(torn)
    assert torn.judge() is False


def test_what_keeps_nothing_is_over_at_once():
    offloads = Offloads()
    offloads.begin(NOT_KEPT)
    assert offloads.completed() == 1
    assert offloads.pop().judge() is False


def test_a_later_one_is_not_told_of_before_an_earlier_one():
    offloads, first, second = Offloads(), offload("full"), offload("full")
    offloads.begin(first)
    offloads.begin(second)
    end(second)
    assert offloads.completed() == 0
    end(first)
    assert offloads.completed() == 2
    assert [offloads.pop(), offloads.pop()] == [first, second]
    assert offloads.completed() == 0


@pytest.mark.parametrize("begun", [0, 1])
def test_none_that_is_not_over_can_be_taken(begun):
    offloads = Offloads()
    for _ in range(begun):
        offloads.begin(offload("full"))
    with pytest.raises(StoreError, match=f"none of {begun} offloads is over"):
        offloads.pop()
    offloads.reset(0.0)


def test_one_that_takes_too_long_has_failed_and_leaves_its_memory():
    offloads, hung = Offloads(), offload("full", lasts_s=0.0)
    offloads.begin(hung)
    assert offloads.completed() == 1
    assert offloads.pop().judge() is False
    assert hung.rows["full"][1].object_results.tolist() == [ResultCode.CANCELLED] * 2


def test_one_that_is_given_up_is_counted_and_one_that_ended_is_not():
    ended, hung, before = offload("full"), offload("full", "state"), errors("offload")
    end(ended)
    ended.give_up()
    assert errors("offload") == before
    hung.give_up()
    assert errors("offload") == before + 1


def test_a_reset_leaves_nothing_to_tell_and_nothing_that_reads():
    offloads, done, hung = Offloads(), offload("full"), offload("full")
    offloads.begin(done)
    offloads.begin(hung)
    end(done)
    offloads.reset(0.0)
    assert hung.done
    assert offloads.completed() == 0


@pytest.mark.parametrize("seed", range(20))
def test_in_whatever_order_they_end_each_is_told_of_once_and_in_order(seed):
    """The oracle is the list of what was begun."""
    rng, offloads, begun, told, running = random.Random(seed), Offloads(), [], [], []
    while len(told) < 30:
        deed = rng.choice(["begin", "end", "take"])
        if deed == "begin" and len(begun) < 30:
            begun.append(offload("full", "state"))
            running.append(begun[-1])
            offloads.begin(begun[-1])
        elif deed == "end" and running:
            end(running.pop(rng.randrange(len(running))), rng.choice([ResultCode.OK, ResultCode.MISS]))
        elif deed == "take" and offloads.completed():
            told.append(offloads.pop())
    assert told == begun
