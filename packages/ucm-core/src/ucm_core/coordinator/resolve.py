"""Where a request may resume: the resolver, and what becomes of its answer when a load finds less.

Everything here is pure: spec rows and presence go in, positions come out. Positions are tokens of prefix; 0
is always a legal boundary and is never listed. What a boundary needs is in `ucm_core.coordinator.coverage`,
the sets that are intersected in `ucm_core.coordinator.boundaries`, why an answer is no deeper in
`ucm_core.coordinator.explain`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ucm_core.coordinator.boundaries import deepest, depth_of, joint, token_count
from ucm_core.coordinator.coverage import (
    alignment,
    cached_rows,
    candidate_positions,
    coverage,
    voter,
    voters,
)
from ucm_core.coordinator.presence import (
    ABSENT,
    Presence,
    unite,
    without,
)
from ucm_core.spec.table import RowKind, SpecRow, SpecTable

__all__ = ["Ask", "Hit", "clamp_followers", "resolve_hit", "resolve_rows", "rewind", "with_local"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One question to the resolver, in tokens; SpecError for numbers out of range or of another type."""

    request_tokens: int
    """Length of the request's prefix as far as it is known."""
    tail_tokens: int = 1
    """Tokens at the end that must be left to compute; 0 where the engine withholds the last one itself."""
    align_tokens: int = 1
    """The adapter's own alignment (an engine page, a chunk)."""
    local_tokens: int = 0
    """The engine holds ``[0, local_tokens)`` of every chain row itself."""

    def __post_init__(self) -> None:
        """Take every number as an int: one of a smaller type would wrap around when it is subtracted from."""
        for name in ("request_tokens", "tail_tokens", "local_tokens"):
            object.__setattr__(self, name, token_count(name, getattr(self, name)))
        align = token_count("align_tokens", self.align_tokens, least=1)
        object.__setattr__(self, "align_tokens", align)

    def limit_tokens(self, table: SpecTable) -> int:
        """Return the deepest position that may be answered: ``floor(request - tail, A)``, at least 0."""
        step = alignment(table, self.align_tokens)
        return max(0, self.request_tokens - self.tail_tokens) // step * step


@dataclass(frozen=True, slots=True)
class Hit:
    """A verdict in tokens. Nothing in it is negative or deeper than what was asked."""

    hit_tokens: int
    """``l``: the deepest boundary that all chain rows can serve (``resume_tokens`` if there is none)."""
    resume_tokens: int
    """``p*``: the deepest boundary that every row can serve; 0 means compute everything."""
    new_tokens: int
    """What the engine gains beyond what it holds: ``max(0, resume_tokens - local_tokens)``."""
    coverage: Mapping[str, range] = field(hash=False)
    """Per cached row the blocks that ``resume_tokens`` needs; for a snapshot row the index of its one state,
    counted so that state ``i`` lies at ``(i + 1) * block_tokens``."""
    ask: Ask = field(hash=False)
    """The question that was answered."""


def resolve_hit(
    table: SpecTable,
    presence: Mapping[str, Presence],
    *,
    request_tokens: int,
    tail_tokens: int = 1,
    align_tokens: int = 1,
    local_tokens: int = 0,
) -> Hit:
    """Return where a request resumes, given what each row holds of its prefix.

    Local blocks count as present. Raises SpecError for a number that is negative, no int, or too large;
    anything unknown is absent.

    >>> from ucm_core import Part, Presence, RowKind, SpecRow, SpecTable
    >>> row = SpecRow("full", RowKind.CHAIN, 16, (0,), (Part("k", (8, 64), "bfloat16"),))
    >>> stored = {"full": Presence(np.array([True, True, False]))}
    >>> resolve_hit(SpecTable((row,), 16), stored, request_tokens=100).resume_tokens
    32
    """
    ask = Ask(request_tokens, tail_tokens, align_tokens, local_tokens)
    return resolve_rows(table, with_local(table, presence, ask=ask), ask=ask, rows=voters(table))


def with_local(table: SpecTable, presence: Mapping[str, Presence], *, ask: Ask) -> dict[str, Presence]:
    """Return ``presence`` with the blocks that the engine holds wholly in ``[0, local_tokens)`` added."""
    local = min(ask.local_tokens, ask.request_tokens)
    if not local:
        return dict(presence)
    held = {
        row.name: Presence(np.ones(local // row.block_tokens, dtype=np.bool_))
        for row in (*table.chain_rows, *table.follower_rows)
    }
    return unite(presence, held)


def clamp_followers(
    table: SpecTable, presence: Mapping[str, Presence], *, hit: Hit, at_load: Mapping[str, Presence]
) -> Hit:
    """Return ``hit`` cut to what the followers really hold when the load runs (``at_load``), before any use.

    The new boundary is one that every voting row can serve too; a follower that ``at_load`` does not mention
    holds nothing.
    """
    followers = {row.name: at_load.get(row.name, ABSENT) for row in table.follower_rows}
    known = with_local(table, {**presence, **followers}, ask=hit.ask)
    return resolve_rows(table, known, ask=hit.ask, rows=cached_rows(table), cap=hit)


def rewind(
    table: SpecTable, presence: Mapping[str, Presence], *, hit: Hit, failed: Mapping[str, Collection[int]]
) -> Hit:
    """Return where all rows resume together after a load of ``hit`` failed.

    ``failed`` names blocks of chain rows and followers, and positions of snapshot rows. The answer is the
    deepest boundary at or before ``hit`` that no failed unit is needed for and that every row can serve. A
    follower that ``presence`` does not mention counts as holding what ``hit`` promised of it. SpecError for a
    row or a unit that cannot be.
    """
    promised = {row.name: _promised(row, hit) for row in table.follower_rows}
    known = with_local(table, {**promised, **presence}, ask=hit.ask)
    for name, units in failed.items():
        gone = [token_count(f"failed unit of row {name!r}", unit) for unit in units]
        known[name] = without(table.row(name), known.get(name, ABSENT), units=gone)
    return resolve_rows(table, known, ask=hit.ask, rows=cached_rows(table), cap=hit)


def _promised(row: SpecRow, hit: Hit) -> Presence:
    """Return every block of a follower up to the end of what ``hit`` needs of it."""
    return Presence(np.ones(hit.coverage[row.name].stop, dtype=np.bool_))


def resolve_rows(
    table: SpecTable,
    known: Mapping[str, Presence],
    *,
    ask: Ask,
    rows: Iterable[SpecRow],
    cap: Hit | None = None,
) -> Hit:
    """Return the deepest boundaries that ``rows`` serve together, no deeper than ``cap``.

    The common core of verdicts, clamps and rewinds: ``rows`` may name followers as well, and ``known``
    already holds what the engine has (`with_local`).
    """
    chains, states = _parted(rows)
    limit = cap.hit_tokens if cap else ask.limit_tokens(table)
    # Nothing is asked past the shortest of what decides l, so the work follows what is there.
    depth = depth_of(table, known, rows=chains or states, limit_tokens=limit)
    candidates = candidate_positions(table, depth, align_tokens=ask.align_tokens)
    by_chains = joint(table, known, candidates=candidates, rows=chains)
    by_all = by_chains & joint(table, known, candidates=candidates, rows=states)
    if cap:
        by_all &= candidates <= cap.resume_tokens
    resume = deepest(candidates, by_all)
    return Hit(
        hit_tokens=deepest(candidates, by_chains) if chains else resume,
        resume_tokens=resume,
        new_tokens=max(0, resume - ask.local_tokens),
        coverage={row.name: coverage(voter(table, row), resume) for row in cached_rows(table)},
        ask=ask,
    )


def _parted(rows: Iterable[SpecRow]) -> tuple[list[SpecRow], list[SpecRow]]:
    """Return (rows with blocks, rows with states)."""
    parts: tuple[list[SpecRow], list[SpecRow]] = ([], [])
    for row in rows:
        parts[row.kind is RowKind.SNAPSHOT].append(row)
    return parts
