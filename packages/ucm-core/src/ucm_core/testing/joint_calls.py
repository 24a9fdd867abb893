"""A double of an engine's collective operations, with a watchdog.

Ranks of a real engine compute together: each must make the same joint calls in the same order, or all of them
hang. UCM makes none itself, and must never let a rank leave one out because it has nothing to do: what a rank
does between two of them follows from the plan that all were handed, what differs by rank are results.
"""

from __future__ import annotations

import threading
import time

from ucm_core.errors import StoreError

__all__ = ["JointCalls"]


class JointCalls:
    """Joint calls of ``ranks`` threads; thread-safe. The first mismatch ends the wait of all of them."""

    def __init__(self, ranks: int, *, wait_s: float = 10.0) -> None:
        """No rank waits longer than ``wait_s`` for the others."""
        self._made: list[list[str]] = [[] for _ in range(ranks)]
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._mismatch: str | None = None

    def call(self, rank: int, name: str) -> None:
        """Return when every rank has made its next call too, and it was ``name`` on all.

        Raises `ucm_core.StoreError`, naming rank and step, on every rank: where another made another call,
        or none in time.
        """
        with self._changed:
            step = len(self._made[rank])
            self._made[rank].append(name)
            self._compare(step)
            self._changed.notify_all()
            deadline = time.monotonic() + self._wait_s
            while self._mismatch is None and (late := self._late(step)):
                if not self._changed.wait(deadline - time.monotonic()) and self._late(step):
                    self._end(f"rank {late[0]} did not make call {step} ({name!r}) within {self._wait_s} s")
            if self._mismatch is not None:
                raise StoreError(self._mismatch)

    def calls(self, rank: int) -> tuple[str, ...]:
        """What ``rank`` has called so far, in order."""
        with self._changed:
            return tuple(self._made[rank])

    # -- private, under the lock

    def _late(self, step: int) -> list[int]:
        return [rank for rank, made in enumerate(self._made) if len(made) <= step]

    def _compare(self, step: int) -> None:
        made = {rank: calls[step] for rank, calls in enumerate(self._made) if len(calls) > step}
        first, *others = made
        for rank in others:
            if made[rank] != made[first]:
                self._end(
                    f"call {step} of rank {rank} is {made[rank]!r}, that of rank {first} {made[first]!r}"
                )

    def _end(self, mismatch: str) -> None:
        self._mismatch = self._mismatch or mismatch
        self._changed.notify_all()
