"""A lock that belongs to one process: in a forked child nobody waits for threads that only the parent has."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from ucm_core.errors import ClosedError

_Answer = TypeVar("_Answer")


class OwnCondition(threading.Condition):
    """A condition that only the process that made it can enter; in a forked child that is a ClosedError.

    A thread of the parent may hold it while the child is forked, and would never let go of it there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child of the process that made it."""
        return os.getpid() != self._pid

    def __enter__(self) -> bool:
        if self.foreign:
            raise ClosedError("this is of the process that forked this one; open the cache anew here")
        return super().__enter__()

    def wait_for(self, predicate: Callable[[], _Answer], timeout: float | None = None) -> _Answer:
        """As `threading.Condition.wait_for`, with any number of seconds: NaN is none, infinity decades."""
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX) if timeout > 0 else 0.0
        return super().wait_for(predicate, timeout)
