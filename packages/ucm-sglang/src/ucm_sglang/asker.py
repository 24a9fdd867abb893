"""Questions to a medium that may never answer, asked on a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ucm_core.errors import StoreError
from ucm_core.ops import border
from ucm_core.store.pool import IoPool, Priority

__all__ = ["ASK_S", "Asker"]

ASK_S = 8.0
"""How long one question waits for its answer."""

T = TypeVar("T")


class Asker(Generic[T]):
    """Asks one question at a time; for one thread. In a forked child nothing is answered.

    >>> Asker[int](wait_s=60.0).ask(lambda: 7)
    7
    """

    def __init__(self, *, wait_s: float = ASK_S) -> None:
        self._pool = IoPool(1)
        self._wait_s = wait_s
        self._over = threading.Event()
        self._over.set()

    def ask(self, question: Callable[[], T]) -> T | None:
        """What ``question`` returns; None where it raised, or did not return in time.

        None at once while an earlier one still has not returned: whoever asks again and again waits once.
        """
        if not self._over.is_set():
            _unanswered()
            return None
        over, answers = threading.Event(), list[T]()

        def work() -> None:
            try:
                answers.append(question())
            except Exception as error:  # noqa: BLE001 (the border: no answer)
                border.failed("ask", error)
            finally:
                over.set()

        if self._pool.submit(Priority.LOAD, work):
            self._over = over
            if not over.wait(self._wait_s):
                _unanswered()
        return answers[0] if answers else None

    def close(self) -> None:
        """Ask nothing any more; does not wait for an answer. Idempotent."""
        self._pool.close(0.0)


def _unanswered() -> None:
    border.failed("ask", StoreError("the medium does not say what it has: all is a miss until it does"))
