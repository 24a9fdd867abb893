"""Which states are worth keeping: three triggers, and what to do with what an engine offers.

Pure policy over positions (tokens of prefix). All positions are multiples of ``lcm(grid, A)``: a state
elsewhere is no joint point and could never be resumed. The engine decides which positions exist; the policy
keeps or drops.

============  ========================================================================================
trigger       keeps
============  ========================================================================================
request end   ``floor(prompt - tail)`` for the same prompt again, ``floor(computed)`` for the next turn
second sight  the deepest boundary that an earlier request lacked too (`ucm_core.coordinator.sightings`)
interval      every ``interval`` tokens of prompt and output
============  ========================================================================================

Nothing at or before the point where the request resumed is kept again: it was served from there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral

from ucm_core.errors import SpecError
from ucm_core.spec.rows import MAX_NUMBER, is_count
from ucm_core.spec.table import SpecRow

__all__ = ["Progress", "RetentionPolicy", "keep", "positions", "retention_step"]


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The knobs of one snapshot row; SpecError for numbers out of range."""

    request_end: bool = True
    """Keep the two ends of a request that computed something new."""
    second_sight: bool = True
    """Keep the boundary at which a second request could not be served."""
    interval_tokens: int | None = None
    """Tokens between states kept of prompt and output; 0 = none; None = the row's own interval, and where it
    has none, whatever the engine offers."""
    budget_bytes: int | None = None
    """Bytes of states that one process keeps, the most valuable first (`ucm_core.coordinator.density`);
    None = no bound but the cache's."""
    half_life_s: float = 3600.0
    """Time without a sight after which a state counts half."""

    def __post_init__(self) -> None:
        if self.interval_tokens not in (None, 0) and not is_count(self.interval_tokens):
            raise SpecError(
                f"interval_tokens is {self.interval_tokens!r}; give an int from 0 to {MAX_NUMBER}"
            )
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise SpecError(f"budget_bytes is {self.budget_bytes}, must be at least 1")
        if not 0 < self.half_life_s < math.inf:
            raise SpecError(f"half_life_s is {self.half_life_s}, must be above 0 and finite")

    def interval(self, row: SpecRow) -> int | None:
        """Return the tokens between states kept of ``row``; 0 = none; None = whatever is offered."""
        return row.interval if self.interval_tokens is None else self.interval_tokens


DEFAULT = RetentionPolicy()
"""All triggers, the row's own interval, no budget."""


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
    """Where an earlier request could not be served either, see `Sightings.see`; 0 = nowhere."""

    def __post_init__(self) -> None:
        numbers: tuple[object, ...] = (
            self.prompt_tokens,
            self.computed_tokens,
            self.resume_tokens,
            self.tail_tokens,
            self.common_tokens,
        )
        if not all(isinstance(number, Integral) and 0 <= int(number) <= MAX_NUMBER for number in numbers):
            raise SpecError(f"{self}: tokens are ints, at least 0 and at most {MAX_NUMBER}")

    @property
    def again_tokens(self) -> int:
        """Where the same prompt could resume at most: it computes its tail itself."""
        return max(self.prompt_tokens - self.tail_tokens, 0)


def retention_step(row: SpecRow, alignment_tokens: int) -> int:
    """Return the distance of positions worth keeping: the lcm of the row's grid and ``A``, in tokens."""
    return math.lcm(row.block_tokens, alignment_tokens)


def positions(
    row: SpecRow, progress: Progress, *, alignment_tokens: int, policy: RetentionPolicy = DEFAULT
) -> tuple[int, ...]:
    """Return the positions of ``row`` that the triggers ask for at the end of a request, ascending.

    ``alignment_tokens`` is ``A``. Only positions past ``resume_tokens`` and up to ``computed_tokens``.

    >>> from ucm_core.spec.table import Part, RowKind
    >>> row = SpecRow("s", RowKind.SNAPSHOT, 64, (0,), (Part("ssm", (4, 4), "float32"),), interval=4096)
    >>> positions(row, Progress(10_000, 10_000), alignment_tokens=128)
    (4096, 8192, 9984)
    """
    step = retention_step(row, alignment_tokens)
    wanted: set[int] = set()
    if policy.request_end:
        wanted |= {min(progress.again_tokens, progress.computed_tokens), progress.computed_tokens}
    if policy.second_sight:
        wanted.add(progress.common_tokens)
    if every := policy.interval(row):
        stride = max(every, step)
        wanted.update(range(stride, progress.computed_tokens + step, stride))
    aligned = {position // step * step for position in wanted}
    return tuple(sorted(p for p in aligned if progress.resume_tokens < p <= progress.computed_tokens))


def keep(
    row: SpecRow,
    offers: Sequence[Collection[int]],
    *,
    progress: Progress,
    alignment_tokens: int,
    policy: RetentionPolicy = DEFAULT,
) -> tuple[int, ...]:
    """Return which of the positions that are offered while a request runs to keep, ascending.

    ``offers`` has one collection per engine group of ``row``, all of one step: a position counts only when
    every group offers it. Where there is no interval at all every offered joint position is kept. Otherwise
    those that a trigger asks for; where the request will end nobody knows, so from ``floor(prompt - tail)``
    on every offer may be the last one and is kept.
    """
    step = retention_step(row, alignment_tokens)
    joint = [p for p in _offered_by_all(offers) if 0 < p <= progress.computed_tokens and p % step == 0]
    every = policy.interval(row)
    if every is None:
        return tuple(joint)
    end = progress.again_tokens // step * step if policy.request_end else math.inf
    common = progress.common_tokens // step * step if policy.second_sight else 0
    return tuple(p for p in joint if p >= end or p == common or _at_interval(p, every, step))


def _offered_by_all(offers: Sequence[Collection[int]]) -> list[int]:
    """Return what every engine group offers, ascending."""
    return sorted(set.intersection(*map(set, offers))) if offers else []


def _at_interval(position: int, every: int, step: int) -> bool:
    """Return whether a multiple of ``every``, floored to ``step``, is ``position``."""
    return every > 0 and -(-position // every) * every < position + step
