"""Quiet loggers: the first of its kind is heard, repetitions are not, later ones are again."""

from __future__ import annotations

import logging

import pytest

from ucm_core.ops.quiet import MAX_REMEMBERED, OnceInAWhile, quiet_logger


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("name", logging.WARNING, __file__, 1, text, arguments, None)


def test_repetitions_are_heard_once_in_a_while() -> None:
    clock = Clock()
    quiet = OnceInAWhile(10.0, clock=clock)
    heard = []
    for now_s in (0.0, 1.0, 9.9, 10.0, 15.0, 20.1):
        clock.now_s = now_s
        if quiet.filter(record("row %s: failed", "full")):
            heard.append(now_s)
    assert heard == [0.0, 10.0, 20.1]


def test_names_tell_records_apart_and_numbers_do_not() -> None:
    quiet = OnceInAWhile(10.0, clock=Clock())
    assert quiet.filter(record("row %s: failed", "full"))
    assert quiet.filter(record("row %s: failed", "state"))
    assert quiet.filter(record("a batch of %d failed", 3))
    assert not quiet.filter(record("a batch of %d failed", 4))
    assert quiet.filter(record("no arguments"))
    assert not quiet.filter(record("no arguments"))


def test_what_is_remembered_is_bounded() -> None:
    quiet = OnceInAWhile(10.0, clock=Clock())
    for number in range(3 * MAX_REMEMBERED):
        assert quiet.filter(record("row %s", str(number)))
    assert len(quiet._passed) <= MAX_REMEMBERED


def test_a_quiet_logger_stays_one(caplog: pytest.LogCaptureFixture) -> None:
    logger = quiet_logger("ucm_core.test_quiet")
    assert quiet_logger("ucm_core.test_quiet") is logger
    assert len(logger.filters) == 1
    for _ in range(5):
        logger.warning("again")
    assert caplog.messages == ["again"]
