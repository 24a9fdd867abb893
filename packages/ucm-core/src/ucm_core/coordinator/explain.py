"""Why a request resumes where it does, and no deeper: what each row has and lacks, for people and tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ucm_core.coordinator.boundaries import deepest, reach, served
from ucm_core.coordinator.coverage import (
    Positions,
    cached_rows,
    candidate_positions,
    coverage,
    joint_step,
    voter,
    voters,
)
from ucm_core.coordinator.presence import ABSENT, Mask, Presence
from ucm_core.coordinator.resolve import Ask, Hit, resolve_rows, with_local
from ucm_core.spec.table import RowKind, SpecRow, SpecTable

__all__ = ["Explanation", "RowExplanation", "explain"]


@dataclass(frozen=True, slots=True)
class RowExplanation:
    """What one row allowed and what it lacked."""

    row: str
    """Name of the row."""
    kind: RowKind
    """Kind of the row. Followers have no vote in the verdict and are asked when a load begins."""
    boundary_tokens: int
    """The deepest boundary up to the limit that this row alone can serve."""
    refused_tokens: int | None
    """A joint boundary past the resume point (a multiple of ``A`` and of every snapshot row's grid) that this
    row cannot serve: of a row that limits the first at which it does, of any other the first of all. None
    when it serves all of them up to the limit."""
    missing_block: int | None
    """First absent block of what ``refused_tokens`` needs; None for snapshot rows, which lack its state."""
    limits: bool
    """This row is one of those that held the request back, see `Explanation`."""

    def __str__(self) -> str:
        text = f"{self.row} ({self.kind.value}) serves up to {self.boundary_tokens}"
        if self.refused_tokens is not None:
            lacks = "the state" if self.missing_block is None else f"block {self.missing_block}"
            text += f", lacks {lacks} for {self.refused_tokens}"
        return text


@dataclass(frozen=True, slots=True)
class Explanation:
    """An answer with its reasons. ``str()`` is a text for people, one line per row.

    The rows that limit are those that lack a deeper joint boundary which the fewest rows lack: had they held
    it, the request would resume deeper.
    """

    hit: Hit
    """The verdict from complete knowledge."""
    resume_tokens: int
    """Where a load now would let it resume: ``hit.resume_tokens``, or less where a follower is short."""
    limit_tokens: int
    """The deepest joint boundary that may be answered, however much is stored."""
    rows: tuple[RowExplanation, ...]
    """One per cached row."""

    @property
    def limiting(self) -> tuple[str, ...]:
        """Names of the rows that held the request back; empty when it resumes at the limit."""
        return tuple(row.row for row in self.rows if row.limits)

    def __str__(self) -> str:
        head = f"resumes at {self.resume_tokens} of at most {self.limit_tokens} tokens"
        if self.resume_tokens < self.hit.resume_tokens:
            head += f", {self.hit.resume_tokens} were promised"
        if self.limiting:
            head += f", held back by {', '.join(self.limiting)}"
        return "\n  ".join([head, *map(str, self.rows)])


def explain(table: SpecTable, presence: Mapping[str, Presence], *, ask: Ask) -> Explanation:
    """Return where ``ask`` resumes with ``presence`` (followers included) and why no deeper."""
    known = with_local(table, presence, ask=ask)
    rows = [(row, voter(table, row), known.get(row.name, ABSENT)) for row in cached_rows(table)]
    hit = resolve_rows(table, known, ask=ask, rows=voters(table))
    resume = resolve_rows(table, known, ask=ask, rows=cached_rows(table), cap=hit).resume_tokens
    step, limit = joint_step(table, ask.align_tokens), ask.limit_tokens(table)
    # As deep as any row reaches, and on to the next joint boundary: past that nothing new can be said.
    depth = max((reach(source, held, limit_tokens=limit) for _, source, held in rows), default=0) + step
    candidates = candidate_positions(table, min(limit, depth), align_tokens=ask.align_tokens)
    serve = [served(source, held, candidates=candidates) for _, source, held in rows]
    deeper = (candidates > resume) & (candidates % step == 0)
    closest = _closest([serves[deeper] for serves in serve])
    said = [
        RowExplanation(
            row.name,
            row.kind,
            boundary_tokens=deepest(candidates, serves),
            **_lack(source, held, candidates[deeper][near if near.any() else ~serves[deeper]]),
            limits=bool(near.any()),
        )
        for (row, source, held), serves, near in zip(rows, serve, closest, strict=True)
    ]
    return Explanation(hit, resume, limit // step * step, tuple(said))


def _closest(serve: list[Mask]) -> list[Mask]:
    """Return per row which boundaries it lacks of those that the fewest rows lack."""
    lacks = ~np.array(serve, dtype=np.bool_)
    counts = lacks.sum(axis=0)
    return list(lacks & (counts == counts.min(initial=len(serve))))


def _lack(row: SpecRow, presence: Presence, refused: Positions) -> dict[str, int | None]:
    """Return ``refused_tokens`` and ``missing_block`` of a row that cannot serve ``refused`` (ascending)."""
    first = int(refused[0]) if len(refused) else None
    if first is None or row.kind is RowKind.SNAPSHOT:
        return {"refused_tokens": first, "missing_block": None}
    there = set(np.flatnonzero(presence.mask).tolist())
    return {
        "refused_tokens": first,
        "missing_block": next(block for block in coverage(row, first) if block not in there),
    }
