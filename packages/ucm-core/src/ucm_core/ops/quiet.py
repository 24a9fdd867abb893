"""Loggers that say the same thing once in a while only; counters hold how often it happened."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 60.0
MAX_REMEMBERED = 256


class OnceInAWhile(logging.Filter):
    """Passes a record unless one of the same text and first argument passed less than ``interval_s`` ago.

    Only text arguments (the name of a row, a path) tell records apart, so that numbers do not. Thread-safe: a
    race lets a record pass twice, nothing worse.
    """

    def __init__(
        self, interval_s: float = INTERVAL_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._interval_s, self._clock = interval_s, clock
        self._passed: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        first = record.args[0] if isinstance(record.args, tuple) and record.args else ""
        what = (str(record.msg), first if isinstance(first, str) else "")
        now = self._clock()
        if now - self._passed.get(what, -self._interval_s) < self._interval_s:
            return False
        if len(self._passed) >= MAX_REMEMBERED:
            self._passed.clear()
        self._passed[what] = now
        return True


def quiet_logger(name: str) -> logging.Logger:
    """The logger ``name``, quiet from now on."""
    logger = logging.getLogger(name)
    if not any(isinstance(known, OnceInAWhile) for known in logger.filters):
        logger.addFilter(OnceInAWhile())
    return logger
