"""Questions that are answered, that fail, and that are never answered."""

import os
import threading

from counted import errors

from ucm_sglang.asker import Asker

WAIT_S = 120


def test_an_answer_is_the_answer_of_its_question():
    asker = Asker(wait_s=WAIT_S)
    assert [asker.ask(lambda number=number: number) for number in range(20)] == list(range(20))
    asker.close()


def test_a_question_that_fails_has_no_answer_and_the_next_has():
    asker = Asker(wait_s=WAIT_S)
    assert asker.ask(lambda: 1 // 0) is None
    assert asker.ask(lambda: 2) == 2
    asker.close()


def test_who_is_not_answered_waits_once_and_is_answered_again_when_that_is_over():
    asker, go, asked = Asker(wait_s=0.0), threading.Event(), []
    assert asker.ask(lambda: go.wait(WAIT_S)) is None
    asker._wait_s = WAIT_S  # whoever waited now would wait for two minutes
    assert asker.ask(lambda: asked.append("while it hangs")) is None
    go.set()
    assert asker._over.wait(WAIT_S)
    assert asker.ask(lambda: 3) == 3
    assert asked == []
    asker.close()


def test_every_question_without_an_answer_is_counted():
    asker, go, before = Asker(wait_s=0.0), threading.Event(), errors("ask")
    asker.ask(lambda: go.wait(WAIT_S))
    asker.ask(lambda: None)
    assert errors("ask") - before == 2
    go.set()
    assert asker._over.wait(WAIT_S)
    asker.close()


def test_after_close_nothing_is_asked_and_close_waits_for_no_answer():
    asker, go, asked = Asker(wait_s=0.0), threading.Event(), []
    asker.ask(lambda: go.wait(WAIT_S))
    asker.close()
    asker.close()
    go.set()
    assert asker._over.wait(WAIT_S)
    assert asker.ask(lambda: asked.append("closed")) is None
    assert asked == []


def test_in_a_forked_child_nothing_is_answered():
    asker = Asker(wait_s=WAIT_S)
    assert asker.ask(lambda: 1) == 1
    child = os.fork()
    if child == 0:
        os._exit(0 if asker.ask(lambda: 1) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    asker.close()
