"""Which states are worth keeping: three triggers, and what to do with what an engine offers.

Pure policy over positions (tokens of prefix). All positions are multiples of ``lcm(grid, A)``: a state
elsewhere is no joint point and could never be resumed. The engine decides which positions exist; the policy
keeps or drops.

======================  ===================================================================================
trigger                 keeps
======================  ===================================================================================
request end             ``floor(prompt - tail)`` for the same prompt again, ``floor(computed)`` for the next
turn second sight            the boundary common with an earlier request that nobody could serve this one at
interval                every ``interval`` tokens of prompt and output ======================
===================================================================================

Nothing at or before the point where the request resumed is kept again: it was served from there.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ucm_core.errors import SpecError
from ucm_core.spec.keys import PrefixChain
from ucm_core.spec.table import SpecRow

__all__ = ["Progress", "Sightings", "SightingsStatistics", "keep", "positions", "retention_step"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one request has come, in tokens."""

    prompt_tokens: int
    """Length of the prompt."""
    computed_tokens: int
    """Prompt and output computed or loaded so far; the prompt's length at the end of prefill."""
    resume_tokens: int = 0
    """Where the request resumed: everything up to here was served."""
    tail_tokens: int = 1
    """Tokens at the end that the same prompt would have to compute again."""
    common_tokens: int = 0
    """Prefix shared with an earlier request, see `Sightings`; 0 = none seen."""

    def __post_init__(self) -> None:
        numbers = (self.prompt_tokens, self.computed_tokens, self.resume_tokens, self.tail_tokens)
        if min(*numbers, self.common_tokens) < 0:
            raise SpecError(f"{self}: tokens are at least 0")


def retention_step(row: SpecRow, alignment_tokens: int) -> int:
    """Return the distance of positions worth keeping: the lcm of the row's grid and ``A``, in tokens."""
    return math.lcm(row.block_tokens, alignment_tokens)


def positions(row: SpecRow, progress: Progress, *, alignment_tokens: int) -> tuple[int, ...]:
    """Return the positions of ``row`` that the triggers ask for at the end of a request, ascending.

    ``alignment_tokens`` is ``A``. Only positions past ``resume_tokens`` and up to ``computed_tokens``.

    >>> from ucm_core.spec.table import Part, RowKind
    >>> row = SpecRow("s", RowKind.SNAPSHOT, 64, (0,), (Part("ssm", (4, 4), "float32"),), interval=4096)
    >>> positions(row, Progress(10_000, 10_000), alignment_tokens=128)
    (4096, 8192, 9984)
    """
    step = retention_step(row, alignment_tokens)
    wanted = {*_at_request_end(progress), progress.common_tokens, *_at_intervals(row, progress)}
    aligned = {position // step * step for position in wanted}
    return tuple(sorted(p for p in aligned if progress.resume_tokens < p <= progress.computed_tokens))


def keep(
    row: SpecRow, offers: Sequence[Collection[int]], *, progress: Progress, alignment_tokens: int
) -> tuple[int, ...]:
    """Return which of the offered positions to keep, ascending.

    ``offers`` has one collection per engine group of ``row``, all of one step: a position counts only when
    every group offers it. Without an interval every offered joint position is kept, with one those of
    `positions`.
    """
    step = retention_step(row, alignment_tokens)
    offered = set.intersection(*map(set, offers)) if offers else set()
    joint = {position for position in offered if position > 0 and position % step == 0}
    if row.interval is not None:
        joint &= set(positions(row, progress, alignment_tokens=alignment_tokens))
    return tuple(sorted(joint))


def _at_request_end(progress: Progress) -> tuple[int, ...]:
    """Return the two ends; a request that computed nothing new has none (both lie in what was served)."""
    again = min(progress.prompt_tokens - progress.tail_tokens, progress.computed_tokens)
    return (max(again, 0), progress.computed_tokens)


def _at_intervals(row: SpecRow, progress: Progress) -> range:
    if row.interval is None:
        return range(0)
    return range(row.interval, progress.computed_tokens + 1, row.interval)


@dataclass(frozen=True, slots=True)
class SightingsStatistics:
    """What the memory of sights holds."""

    entries: int
    """Boundaries remembered."""
    capacity: int
    """The most that are remembered."""


class Sightings:
    """Which prefixes this process has seen before, bounded: the memory behind the second-sight trigger.

    Not thread-safe; one per scheduler process. It remembers digests, so other requests' salts, adapters and
    media never count as the same prefix. The oldest sights are forgotten first.
    """

    def __init__(self, *, step_tokens: int, capacity: int = 65_536) -> None:
        """Remember prefixes every ``step_tokens`` (see `retention_step`), at most ``capacity`` of them."""
        if step_tokens < 1 or capacity < 1:
            raise SpecError(f"step_tokens {step_tokens} and capacity {capacity} must be at least 1")
        self._step_tokens = step_tokens
        self._capacity = capacity
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def see(self, chain: PrefixChain) -> int:
        """Record one prompt and return the tokens it has in common with an earlier one, 0 if none."""
        digests = [digest.tobytes() for digest in chain.block_digests(self._step_tokens)]
        common = max((index + 1 for index, digest in enumerate(digests) if digest in self._seen), default=0)
        # Deepest first, so that the head of a prefix, which more requests share, is forgotten last.
        for digest in reversed(digests):
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return common * self._step_tokens

    def statistics(self) -> SightingsStatistics:
        """Return a snapshot of the counts."""
        return SightingsStatistics(len(self._seen), self._capacity)

    def check_integrity(self) -> None:
        """Raise SpecError when the bound does not hold."""
        if len(self._seen) > self._capacity:
            raise SpecError(
                f"{len(self._seen)} sights are remembered, above the capacity of {self._capacity}"
            )
