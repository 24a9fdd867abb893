"""A lock that belongs to one process: in a forked child nobody waits for threads that only the parent has."""

from __future__ import annotations

import os
import threading
import time
import weakref
from _thread import RLock  # as a class: `threading.RLock` is a function
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ucm_core.errors import ClosedError

_Answer = TypeVar("_Answer")


class OwnCondition(RLock):  # type: ignore[misc] # it can be derived from
    """A condition that only the process that made it can enter; in a forked child that is a ClosedError.

    A thread of the parent may hold it while the child is forked, and would never let go of it there.
    What enters and leaves it is the interpreter's own lock, with no line of Python in between, so that a
    signal's handler that raises finds it held inside of ``with``, and nowhere else. Not to be entered twice.
    """

    foreign = False
    """Whether this is a forked child of the process that made it."""

    def __init__(self) -> None:
        super().__init__()
        self._waiters: deque[threading.Lock] = deque()
        _made_here.add(weakref.ref(self, _made_here.discard))

    def wait_for(self, predicate: Callable[[], _Answer], timeout: float | None = None) -> _Answer:
        """As `threading.Condition.wait_for`, with any number of seconds: NaN is none, infinity decades."""
        end = None if timeout is None else time.monotonic() + (timeout if timeout > 0 else 0.0)
        while not (answer := predicate()):
            left_s = -1.0 if end is None else min(end - time.monotonic(), threading.TIMEOUT_MAX)
            if end is not None and left_s <= 0:
                break
            self._wait(left_s)
        return answer

    def notify(self) -> None:
        """Wake one of those who wait. Say it before what it is about, which they see once this is left."""
        for waiter in self._waiters:
            if waiter.locked():
                waiter.release()  # it leaves the line by itself
                return

    def notify_all(self) -> None:
        """Wake all who wait; as `notify`."""
        for waiter in self._waiters:
            if waiter.locked():
                waiter.release()

    def _wait(self, timeout_s: float) -> None:
        """Let go of it until somebody notifies, or for ``timeout_s``; -1 = without end."""
        waiter = threading.Lock()
        waiter.acquire()
        raised: BaseException | None = None
        try:
            self._waiters.append(waiter)
            self.release()
            waiter.acquire(timeout=timeout_s)
        finally:
            # Who leaves must hold it, whatever a signal's handler raises meanwhile. No function of ours is
            # called here: its first step would be one more place for that.
            while True:
                try:
                    while not self._is_owned():  # type: ignore[attr-defined] # as `threading.Condition` asks
                        self.acquire()
                    break
                except BaseException as error:  # noqa: BLE001 - whatever it is
                    raised = error
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if raised is not None:
                raise raised


class _Foreign(OwnCondition):  # type: ignore[misc]
    """What it is in a forked child."""

    foreign = True

    def __enter__(self, blocking: bool = True, timeout: float = -1) -> bool:
        raise ClosedError("this is of the process that forked this one; open the cache anew here")


_made_here: set[weakref.ref[OwnCondition]] = set()


def _forget_in_child() -> None:
    """Everything that was made so far is the parent's."""
    for made in list(_made_here):
        condition = made()
        if condition is not None:
            condition.__class__ = _Foreign
    _made_here.clear()


os.register_at_fork(after_in_child=_forget_in_child)
