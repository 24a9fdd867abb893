"""How a figure is taken: ours and a peer in turns, in one process, so that only their ratio counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the closing table."""

    name: str
    ours_s: float
    peer: str
    """What ours is held against: another way to do the same, or a time."""
    peer_s: float
    ratio: float
    """Ours over peer, the median of the rounds."""
    limit: float
    """The largest ratio that is good enough."""

    @property
    def reached(self) -> bool:
        """Whether the figure keeps its limit."""
        return self.ratio <= self.limit

    def line(self) -> str:
        """The figure as a row of the table."""
        times = f"{self.ours_s * 1e3:11.3f} ms {self.peer_s * 1e3:11.3f} ms"
        verdict = "ok" if self.reached else "TOO SLOW"
        return f"{self.name:<44} {times}  {self.ratio:6.2f}x  <= {self.limit:.2f}x  {verdict}  ({self.peer})"


def elapsed_s(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def side_by_side(
    name: str,
    ours: Callable[[], object],
    *,
    peer: str,
    peer_call: Callable[[], object],
    limit: float,
    rounds: int = 9,
) -> Figure:
    """Run both in turns, one unmeasured round first; the ratio is the median over rounds."""
    ours(), peer_call()
    pairs = [(elapsed_s(ours), elapsed_s(peer_call)) for _ in range(rounds)]
    ours_s, peer_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(own / other for own, other in pairs)
    return Figure(name, ours_s, peer, peer_s, ratio, limit)


def processor_s(call: Callable[[], object]) -> float:
    """Processor time of one call on this thread: what others do to the machine counts less."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def within(
    name: str,
    ours: Callable[[], object],
    *,
    limit_s: float,
    rounds: int = 9,
    clock: Callable[[Callable[[], object]], float] = elapsed_s,
) -> Figure:
    """Run ours alone against a time; the median over rounds."""
    ours()
    ours_s = statistics.median(clock(ours) for _ in range(rounds))
    return Figure(name, ours_s, "the time allowed", limit_s, ours_s / limit_s, 1.0)
