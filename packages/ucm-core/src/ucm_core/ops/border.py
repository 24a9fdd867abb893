"""The border to an engine's loop: whatever fails behind it is a miss, counted and logged, never raised.

What is logged goes where the engine's own lines go.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from ucm_core.ops import metrics

P = ParamSpec("P")
R = TypeVar("R")

LOG_INTERVAL_S = 60.0

_log = logging.getLogger(__name__)


def join_log(engine: str, *, adapter: str) -> None:
    """Let the core's and an adapter's loggers write where the logger ``engine`` does, unless set up."""
    theirs = logging.getLogger(engine)
    for name in ("ucm_core", adapter):
        ours = logging.getLogger(name)
        if not ours.hasHandlers():
            ours.setLevel(theirs.getEffectiveLevel())
            for handler in theirs.handlers:
                ours.addHandler(handler)


class Complaints:
    """Logs each kind of complaint at most once per interval, and says how many were kept back in between."""

    def __init__(
        self, interval_s: float = LOG_INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}

    def say(self, kind: str, message: str, *, error: BaseException | None = None) -> bool:
        """Log ``message`` unless ``kind`` was logged within the interval; True when it was logged."""
        now = self._clock()
        with self._lock:
            logged_at, kept_back = self._last.get(kind, (-self._interval_s, 0))
            if now - logged_at < self._interval_s:
                self._last[kind] = (logged_at, kept_back + 1)
                return False
            self._last[kind] = (now, 0)
        suffix = f" ({kept_back} more of this kind since the last line)" if kept_back else ""
        _log.warning("UCM: %s%s", message, suffix, exc_info=error)
        return True


complaints = Complaints()


def failed(where: str, error: BaseException) -> None:
    """Count ``error`` under ``where`` and log it, rate-limited: a miss follows, the engine goes on."""
    metrics.ERRORS.labels(where=where).inc()
    complaints.say(
        where, f"{where} failed, which counts as a miss: {type(error).__name__}: {error}", error=error
    )


def guarded(where: str, fallback: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate an engine hook: an exception becomes ``fallback()``, a count and a rate-limited log line."""

    def decorate(hook: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(hook)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 (the engine's loop must not end because a cache failed)
                failed(where, error)
                return cast(R, fallback())

        return wrapper

    return decorate
