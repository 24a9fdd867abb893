"""How far ahead of the engine loads are submitted, and which are next: arithmetic, no effects."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ucm_core.errors import ConfigError, shown
from ucm_core.spec.rows import is_count

__all__ = ["LEAST_DEPTH", "MOST_DEPTH", "Backlog", "LookAhead", "due", "joined", "reach_of"]

LEAST_DEPTH = 2
"""The next layer's load runs while the one after it waits behind it: the medium never idles between two."""
MOST_DEPTH = 16
SAMPLES = 32
"""Of each time; the depth follows their medians."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Which positions of one load were submitted and which are to be, as half-open ranges side by side."""

    begin: int
    """Submitted: ``[0, begin)``."""
    urgent: int
    """Waited for: ``[begin, urgent)``."""
    end: int
    """Next: ``[urgent, end)``."""
    together: int = 1
    """So many of these at most are one group."""


def due(backlogs: Sequence[Backlog], *, room: int) -> list[tuple[int, int]]:
    """Return the (position, load) to submit now, in order: the nearest position of every load first.

    What is waited for is always due; what comes next is while there is ``room`` (a number of entries).

    >>> due([Backlog(1, 1, 3), Backlog(0, 1, 3)], room=2)
    [(0, 1), (1, 0), (1, 1)]
    """
    entries: list[tuple[int, int]] = []
    first = min((backlog.begin for backlog in backlogs), default=0)
    for position in range(first, max((max(backlog.urgent, backlog.end) for backlog in backlogs), default=0)):
        for load, backlog in enumerate(backlogs):
            ahead = backlog.urgent <= position < backlog.end and room > 0
            if position >= backlog.begin and (position < backlog.urgent or ahead):
                room -= position >= backlog.urgent
                entries.append((position, load))
    return entries


def group(begin: int, together: int) -> int:
    """How many positions from ``begin`` on are one call: the first is alone, as nothing hides it."""
    return together if begin else 1


def reach_of(begin: int, least: int, *, together: int) -> int:
    """The end of the whole groups from ``begin`` on that reach ``least``.

    >>> reach_of(2, 3, together=8), reach_of(4, 3, together=8)
    (10, 4)
    """
    while begin < least:
        begin += group(begin, together)
    return begin


def joined(backlogs: Sequence[Backlog], entries: Sequence[tuple[int, int]]) -> list[tuple[range, int]]:
    """Join what is `due` to (positions, load), in order of their first; what is waited for stays alone.

    >>> backlogs = [Backlog(1, 2, 4, together=8), Backlog(1, 2, 4)]
    >>> joined(backlogs, due(backlogs, room=9))
    [(range(1, 2), 0), (range(1, 2), 1), (range(2, 4), 0), (range(2, 3), 1), (range(3, 4), 1)]
    """
    groups: list[tuple[range, int]] = []
    open_: dict[int, int] = {}  # by load, which group is not full
    for position, load in entries:
        urgent, together = backlogs[load].urgent, backlogs[load].together
        place = open_.pop(load, len(groups))
        begin = groups[place][0].start if place < len(groups) else position
        groups[place : place + 1] = [(range(begin, position + 1), load)]
        if urgent <= begin and position + 1 - begin < group(begin, together):
            open_[load] = place
    return groups


class LookAhead:
    """The number of layers that are submitted beyond the one that the engine comes to.

    A load is submitted ``depth`` layers before it is needed, so it lands in time when ``depth`` layers take
    as long to compute as one takes to load: ``depth = ceil(load / compute)``, of the medians of the last
    samples, never below `LEAST_DEPTH` and never above `MOST_DEPTH`. A ``fixed`` depth stays.

    >>> ahead = LookAhead()
    >>> ahead.loaded(0.050)
    >>> ahead.computed(0.010)
    >>> ahead.depth
    5
    """

    def __init__(self, fixed: int | None = None) -> None:
        if fixed is not None and not is_count(fixed):
            raise ConfigError(
                f"a look-ahead of {shown(fixed)} layers; give at least 1 (an int), or None to let it adapt"
            )
        self._fixed = fixed
        self._load_s: deque[float] = deque(maxlen=SAMPLES)
        self._compute_s: deque[float] = deque(maxlen=SAMPLES)

    def loaded(self, seconds: float) -> None:
        """One layer's load took so long, from submission to landing."""
        self._load_s.append(seconds)

    def computed(self, seconds: float) -> None:
        """One layer took so long to compute."""
        self._compute_s.append(seconds)

    @property
    def depth(self) -> int:
        """Layers."""
        if self._fixed is not None:
            return self._fixed
        if not self._load_s or not self._compute_s:
            return LEAST_DEPTH
        # A list of a deque is made in one operation: loads land on other threads.
        load_s, compute_s = statistics.median(list(self._load_s)), statistics.median(self._compute_s)
        if load_s >= compute_s * MOST_DEPTH:
            return MOST_DEPTH
        return max(LEAST_DEPTH, math.ceil(load_s / compute_s))
