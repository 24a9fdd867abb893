"""Completions: when everything that reads or writes an attempt's blocks has ended.

An engine that is promised "I will tell you when these blocks may be reused" waits for exactly one answer. The
ledger gives it: at the first poll after the attempt's last job has ended, whatever became of the jobs, also
when there were none. A set of ids would not do: a later job of the same attempt must hold the answer back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ucm_core.coordinator.attempts import Attempt
from ucm_core.errors import SpecError
from ucm_core.ops.quiet import quiet_logger

__all__ = ["CompletionStatistics", "Completions"]

_log = quiet_logger(__name__)


@dataclass(frozen=True, slots=True)
class CompletionStatistics:
    """A moment of a ledger; numbers without "now" only grow."""

    jobs: int
    """Jobs that have not ended now."""
    promised: int
    """Attempts that wait to be reported now."""
    reported: int
    """Attempts that were reported."""
    unknown_ends: int
    """Ends of jobs that were not known (any more)."""


class Completions:
    """Which attempts may be reported as finished. Thread-safe: jobs may end on any thread.

    An attempt is known while it has jobs or a promise, so the memory is bounded by what is under way.

    >>> ledger, r7 = Completions(), Attempt("r7")
    >>> ledger.submit(r7, "save"); ledger.promise(r7); ledger.poll()
    ()
    >>> ledger.end(r7, "save"); [str(attempt) for attempt in ledger.poll()], ledger.poll()
    (['r7#0'], ())
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._lock = threading.Lock()
        self._jobs: dict[Attempt, set[str]] = {}
        self._promised: dict[Attempt, None] = {}  # in the order of the promises
        self._reported = self._unknown_ends = 0

    def submit(self, attempt: Attempt, job: str) -> None:
        """A job of the attempt begins. SpecError when a job of this name is under way for it."""
        with self._lock:
            jobs = self._jobs.setdefault(attempt, set())
            if job in jobs:
                raise SpecError(
                    f"job {job!r} of {attempt} is under way; give jobs of one attempt other names"
                )
            jobs.add(job)

    def end(self, attempt: Attempt, job: str) -> None:
        """A job has ended, well or not. One that is not known is one log line and changes nothing."""
        with self._lock:
            jobs = self._jobs.get(attempt, set())
            known = job in jobs
            self._unknown_ends += not known
            jobs.discard(job)
            if not jobs:
                self._jobs.pop(attempt, None)
        if not known:
            _log.warning("the end of a job that is not known: %s", f"{job} of {attempt}")

    def promise(self, attempt: Attempt) -> None:
        """The engine waits to be told; repeating it before the report changes nothing. An abort promises too.

        The caller submits nothing for an attempt once it was reported, and promises nothing again.
        """
        with self._lock:
            self._promised[attempt] = None

    def poll(self) -> tuple[Attempt, ...]:
        """Return the promised attempts without jobs, in the order of the promises; each once."""
        with self._lock:
            done = tuple(attempt for attempt in self._promised if attempt not in self._jobs)
            for attempt in done:
                del self._promised[attempt]
            self._reported += len(done)
            return done

    def statistics(self) -> CompletionStatistics:
        """Return a moment of the ledger."""
        with self._lock:
            jobs = sum(map(len, self._jobs.values()))
            return CompletionStatistics(jobs, len(self._promised), self._reported, self._unknown_ends)

    def check_integrity(self) -> None:
        """Raise SpecError when an attempt without jobs is remembered."""
        with self._lock:
            empty = [str(attempt) for attempt, jobs in self._jobs.items() if not jobs]
        if empty:
            raise SpecError(f"attempts without jobs are remembered: {empty}")
