"""Where a request may resume: boundary sets, one coverage function, one resolver.

Everything here is pure: spec rows and presence go in, positions come out. Positions are tokens of prefix; 0
is always a legal boundary and is never listed. Every row answers, for every candidate position (the multiples
of ``A`` up to the limit), whether it could serve it; answers are intersected first and only then is the
deepest taken. The smaller of the per-row deepest points may be a point where some row holds nothing.

``A`` is the lcm of the chain rows' block sizes and of the adapter's alignment. Uncertainty is always absence:
a block that nobody mentioned is missing, a row that nobody mentioned holds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import numpy as np
import numpy.typing as npt

from ucm_core.errors import SpecError
from ucm_core.spec.rows import MAX_NUMBER
from ucm_core.spec.table import RankRule, RowKind, SpecRow, SpecTable

__all__ = [
    "Ask",
    "Explanation",
    "Hit",
    "Presence",
    "alignment",
    "boundaries",
    "cached_rows",
    "candidate_positions",
    "clamp_followers",
    "combine_ranks",
    "combine_slices",
    "coverage",
    "coverage_bounds",
    "explain",
    "resolve_hit",
    "resolve_rows",
    "rewind",
    "served",
    "unite",
    "voter",
    "voters",
    "with_local",
]

Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Presence:
    """What one row holds of one prefix. Everything not mentioned is absent."""

    blocks: Mask | None = None
    """``bool[n]``: block ``i`` of a chain row or follower is whole; blocks from ``n`` on are absent."""
    positions: frozenset[int] = frozenset()
    """Positions (tokens) at which a snapshot row holds a state of *this* prefix."""


ABSENT = Presence()
"""A row that holds nothing."""

_NO_BLOCKS: Mask = np.zeros(0, dtype=np.bool_)


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
        numbers: tuple[object, ...] = (
            self.request_tokens,
            self.tail_tokens,
            self.local_tokens,
            self.align_tokens,
        )
        if not all(isinstance(number, Integral) and 0 <= int(number) <= MAX_NUMBER for number in numbers):
            raise SpecError(f"{self}: tokens are ints, at least 0 and at most {MAX_NUMBER}")
        if self.align_tokens < 1:
            raise SpecError(f"{self}: align_tokens is at least 1")

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


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one row allowed no more: data for people and tools."""

    row: str
    """Name of the row."""
    kind: RowKind
    """Kind of the row; followers are not asked."""
    boundary_tokens: int
    """The deepest boundary up to the limit that this row alone can serve."""
    missing_block: int | None
    """First absent block of what the next boundary needs; None for snapshots and when the limit is served."""
    missing_position: int | None
    """First position past ``boundary_tokens`` at which a state would have helped; None for chain rows and at
    the limit."""


def alignment(table: SpecTable, align_tokens: int = 1) -> int:
    """Return ``A``: the lcm of the chain rows' block sizes and the adapter's alignment, in tokens."""
    return math.lcm(table.alignment_tokens, align_tokens)


def coverage(row: SpecRow, boundary_tokens: int) -> range:
    """Return the blocks of ``row`` that resuming at ``boundary_tokens`` needs; see `coverage_bounds`.

    >>> from ucm_core.spec.table import Part
    >>> row = SpecRow("w", RowKind.CHAIN, 24, (0,), (Part("k", (8, 64), "bfloat16"),), window=50)
    >>> coverage(row, 72), coverage(row, 96)
    (range(0, 3), range(1, 4))
    """
    begin, end = coverage_bounds(row, np.array([boundary_tokens], dtype=np.int64))
    return range(int(begin[0]), int(end[0]))


def coverage_bounds(row: SpecRow, boundaries: Positions) -> tuple[Positions, Positions]:
    """Return per boundary the needed blocks ``[begin, end)``, both ``int64[len(boundaries)]``.

    The only place that says which blocks a boundary ``b`` needs. A full row needs the blocks that overlap
    tokens ``[0, b)``; a window row those that overlap ``[max(0, b - (window - 1 + extra)), b)``, which is
    nothing at ``b = 0`` or when the window is the token itself; a snapshot row the one state that ends at
    ``b``. For a follower ask about its source (`voter`), whose block ids it shares.
    """
    if row.kind is RowKind.NONE:
        return np.zeros_like(boundaries), np.zeros_like(boundaries)
    if row.kind is RowKind.SNAPSHOT:
        end = boundaries // row.block_tokens
        return np.where(boundaries % row.block_tokens == 0, np.maximum(end - 1, 0), end), end
    end = -(-boundaries // row.block_tokens)
    first = _first_tokens(row, boundaries)
    return np.where(first < boundaries, first // row.block_tokens, end), end


def _first_tokens(row: SpecRow, boundaries: Positions) -> Positions:
    """Return per boundary the first token that attention past it can still see."""
    if row.window is None:
        return np.zeros_like(boundaries)
    return np.maximum(boundaries - (row.window - 1 + row.extra), 0)


def served(row: SpecRow, presence: Presence, *, candidates: Positions) -> Mask:
    """Return per candidate position (ascending) whether ``row`` could serve it, ``bool[len(candidates)]``."""
    if row.kind is RowKind.SNAPSHOT:
        return _served_by_states(row, presence.positions, candidates)
    return _served_by_blocks(row, _blocks(presence), candidates)


def _served_by_states(row: SpecRow, positions: frozenset[int], candidates: Positions) -> Mask:
    held = np.fromiter(positions, dtype=np.int64, count=len(positions))
    held = held[held % row.block_tokens == 0]
    nearest = np.searchsorted(candidates, held)
    held, nearest = held[nearest < len(candidates)], nearest[nearest < len(candidates)]
    legal = np.zeros(len(candidates), dtype=np.bool_)
    legal[nearest[candidates[nearest] == held]] = True
    return legal


def _served_by_blocks(row: SpecRow, blocks: Mask, candidates: Positions) -> Mask:
    begin, end = coverage_bounds(row, candidates)
    # absent_before[i] counts the absent blocks of [0, i): a range is whole when it is equal at both ends.
    absent_before = np.concatenate(([0], np.cumsum(~blocks)))
    inside = end <= len(blocks)
    absent = absent_before[np.where(inside, end, 0)] - absent_before[np.where(inside, begin, 0)]
    whole: Mask = (inside & (absent == 0)) | (begin == end)
    return whole


def boundaries(
    table: SpecTable, presence: Mapping[str, Presence], *, limit_tokens: int, align_tokens: int = 1
) -> frozenset[int]:
    """Return the joint boundaries: multiples of ``A`` in ``(0, limit_tokens]`` that every row can serve.

    For adapters that see page hashes and no request (they pass the tokens that the remaining hashes cover).
    Followers do not vote, and a table without chain and snapshot rows has no boundary.
    """
    candidates = candidate_positions(table, limit_tokens, align_tokens=align_tokens)
    return frozenset(candidates[_joint(table, presence, candidates, voters(table))].tolist())


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

    Local blocks count as present. Raises SpecError for a negative number; anything unknown is absent.

    >>> from ucm_core.spec.table import Part, SpecRow, SpecTable, RowKind
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
    held = {
        row.name: Presence(np.ones(local // row.block_tokens, dtype=np.bool_))
        for row in (*table.chain_rows, *table.follower_rows)
    }
    return unite(presence, held) if local else dict(presence)


def unite(*presences: Mapping[str, Presence]) -> dict[str, Presence]:
    """Return what any of the presences holds: the store's and, say, the engine's own blocks and states."""
    names = dict.fromkeys(name for presence in presences for name in presence)
    return {name: _any_of([presence.get(name, ABSENT) for presence in presences]) for name in names}


def combine_ranks(table: SpecTable, ranks: Sequence[Mapping[str, Presence]]) -> dict[str, Presence]:
    """Return what tensor-parallel ranks hold together, per block and per position.

    ``intersection`` rows need every rank's piece, ``all_union`` rows any rank's copy; a follower combines as
    its source does. A rank that does not mention a row holds nothing of it. The result is the same on every
    rank.
    """
    combined = {}
    for row in cached_rows(table):
        pieces = [rank.get(row.name, ABSENT) for rank in ranks]
        rule = voter(table, row).rank_rule
        combined[row.name] = (_any_of if rule is RankRule.ALL_UNION else _all_of)(pieces)
    return combined


def combine_slices(slices: Sequence[Mapping[str, Presence]]) -> dict[str, Presence]:
    """Return what pipeline stages or context-parallel coordinates hold together: always every slice's piece.

    A slice that does not mention a row has no layer of it and is not asked.
    """
    names = dict.fromkeys(name for piece in slices for name in piece)
    return {name: _all_of([piece[name] for piece in slices if name in piece]) for name in names}


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
    deepest boundary at or before ``hit`` that no failed unit is needed for and that every row can serve.
    """
    followers = {row.name: _covering(hit.coverage[row.name]) for row in table.follower_rows}
    known = with_local(table, {**followers, **presence}, ask=hit.ask)
    for name, units in failed.items():
        known[name] = _without(table.row(name), known.get(name, ABSENT), units)
    rows = (*voters(table), *(row for row in table.follower_rows if row.name in failed))
    return resolve_rows(table, known, ask=hit.ask, rows=rows, cap=hit)


def explain(table: SpecTable, presence: Mapping[str, Presence], *, hit: Hit) -> tuple[Explanation, ...]:
    """Return per voting row how far it alone would have gone, and what it lacked to go further."""
    step = alignment(table, hit.ask.align_tokens)
    candidates = candidate_positions(table, hit.ask.limit_tokens(table), align_tokens=step)
    known = with_local(table, presence, ask=hit.ask)
    return tuple(_explain_row(row, known.get(row.name, ABSENT), candidates, step) for row in voters(table))


def _explain_row(row: SpecRow, presence: Presence, candidates: Positions, step: int) -> Explanation:
    allowed = _deepest(candidates, served(row, presence, candidates=candidates))
    wanted = candidates[candidates > allowed]
    if row.kind is RowKind.SNAPSHOT:
        helpful = wanted[wanted % row.block_tokens == 0]
        return Explanation(row.name, row.kind, allowed, None, int(helpful[0]) if len(helpful) else None)
    needed = coverage(row, allowed + step) if len(wanted) else range(0)
    missing = next((block for block in needed if not _holds(presence, block)), None)
    return Explanation(row.name, row.kind, allowed, missing, None)


def cached_rows(table: SpecTable) -> tuple[SpecRow, ...]:
    """Return the rows that hold anything: chain rows, snapshot rows, followers."""
    return (*voters(table), *table.follower_rows)


def voter(table: SpecTable, row: SpecRow) -> SpecRow:
    """Return the row that decides about ``row``: a follower's source, else the row itself."""
    return row if row.follows is None else table.row(row.follows)


def candidate_positions(table: SpecTable, limit_tokens: int, *, align_tokens: int = 1) -> Positions:
    """Return the multiples of ``A`` in ``(0, limit_tokens]``, ascending, as ``int64[n]``."""
    step = alignment(table, align_tokens)
    return np.arange(step, limit_tokens + 1, step, dtype=np.int64)


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
    candidates = candidate_positions(table, limit, align_tokens=ask.align_tokens)
    by_chains = _joint(table, known, candidates, chains)
    by_all = by_chains if chains else np.full(len(candidates), bool(states))
    if states:
        by_all = by_all & _joint(table, known, candidates, states)
    if cap:
        by_all = by_all & (candidates <= cap.resume_tokens)
    resume = _deepest(candidates, by_all)
    return Hit(
        hit_tokens=_deepest(candidates, by_chains) if chains else resume,
        resume_tokens=resume,
        new_tokens=max(0, resume - ask.local_tokens),
        coverage={row.name: coverage(voter(table, row), resume) for row in cached_rows(table)},
        ask=ask,
    )


def _joint(
    table: SpecTable, known: Mapping[str, Presence], candidates: Positions, rows: Sequence[SpecRow]
) -> Mask:
    """Return the candidates that every row of ``rows`` serves; none at all when there is no row to ask."""
    joint = np.full(len(candidates), bool(rows))
    for row in rows:
        joint &= served(voter(table, row), known.get(row.name, ABSENT), candidates=candidates)
    return joint


def voters(table: SpecTable) -> tuple[SpecRow, ...]:
    """Return the rows that decide where to resume: chain rows and snapshot rows."""
    return (*table.chain_rows, *table.snapshot_rows)


def _parted(rows: Iterable[SpecRow]) -> tuple[list[SpecRow], list[SpecRow]]:
    """Return (rows with blocks, rows with states)."""
    parts: tuple[list[SpecRow], list[SpecRow]] = ([], [])
    for row in rows:
        parts[row.kind is RowKind.SNAPSHOT].append(row)
    return parts


def _deepest(candidates: Positions, legal: Mask) -> int:
    """Return the deepest legal candidate (``candidates`` ascend), 0 when there is none."""
    indices = np.flatnonzero(legal)
    return int(candidates[indices[-1]]) if len(indices) else 0


def _blocks(presence: Presence) -> Mask:
    return _NO_BLOCKS if presence.blocks is None else np.asarray(presence.blocks, dtype=np.bool_)


def _holds(presence: Presence, block: int) -> bool:
    blocks = _blocks(presence)
    return block < len(blocks) and bool(blocks[block])


def _covering(blocks: range) -> Presence:
    """Return a presence that holds every block up to the end of ``blocks``."""
    return Presence(np.ones(blocks.stop, dtype=np.bool_))


def _without(row: SpecRow, presence: Presence, units: Collection[int]) -> Presence:
    """Return ``presence`` less the failed units: positions of a snapshot row, blocks of any other."""
    if row.kind is RowKind.SNAPSHOT:
        return Presence(presence.blocks, presence.positions - frozenset(units))
    blocks = _blocks(presence).copy()
    blocks[[unit for unit in units if 0 <= unit < len(blocks)]] = False
    return Presence(blocks, presence.positions)


def _any_of(presences: Sequence[Presence]) -> Presence:
    positions = frozenset[int]().union(*(piece.positions for piece in presences))
    return Presence(np.logical_or.reduce(_padded(presences)), positions)


def _all_of(presences: Sequence[Presence]) -> Presence:
    if not presences:
        return ABSENT
    positions = frozenset.intersection(*(piece.positions for piece in presences))
    return Presence(np.logical_and.reduce(_padded(presences)), positions)


def _padded(presences: Sequence[Presence]) -> Mask:
    """Return ``bool[len(presences), longest]``; what a shorter mask does not mention is absent."""
    masks = [_blocks(piece) for piece in presences]
    padded = np.zeros((len(masks), max(map(len, masks), default=0)), dtype=np.bool_)
    for line, mask in zip(padded, masks, strict=True):
        line[: len(mask)] = mask
    return padded
