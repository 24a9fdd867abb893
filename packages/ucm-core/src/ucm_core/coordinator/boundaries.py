"""Boundary sets: at which positions a row could resume, and at which all of them could.

Answers are sets over the candidates (the multiples of ``A``). They are intersected first and only then is the
deepest taken: the smaller of two rows' deepest points may be a point where one of them holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ucm_core.coordinator.coverage import (
    Positions,
    candidate_positions,
    coverage_bounds,
    voter,
    voters,
)
from ucm_core.coordinator.presence import ABSENT, Mask, Presence
from ucm_core.errors import SpecError, shown
from ucm_core.spec.rows import MAX_NUMBER
from ucm_core.spec.table import RowKind, SpecRow, SpecTable

__all__ = ["boundaries", "deepest", "depth_of", "joint", "prefix_blocks", "reach", "served", "token_count"]


def boundaries(
    table: SpecTable, presence: Mapping[str, Presence], *, limit_tokens: int, align_tokens: int = 1
) -> frozenset[int]:
    """Return the joint boundaries: multiples of ``A`` in ``(0, limit_tokens]`` that every row can serve.

    For adapters that see page hashes and no request (they pass the tokens that the remaining hashes cover).
    Followers do not vote, and a table without chain and snapshot rows has no boundary. SpecError for a
    number that is negative, no int, or too large.
    """
    limit = token_count("limit_tokens", limit_tokens)
    align = token_count("align_tokens", align_tokens, least=1)
    rows = voters(table)
    depth = depth_of(table, presence, rows=rows, limit_tokens=limit)
    candidates = candidate_positions(table, depth, align_tokens=align)
    return frozenset(candidates[joint(table, presence, candidates=candidates, rows=rows)].tolist())


def joint(
    table: SpecTable, known: Mapping[str, Presence], *, candidates: Positions, rows: Iterable[SpecRow]
) -> Mask:
    """Return per candidate whether every row of ``rows`` serves it; all of them when there is no row."""
    legal = np.ones(len(candidates), dtype=np.bool_)
    for row in rows:
        legal &= served(voter(table, row), known.get(row.name, ABSENT), candidates=candidates)
    return legal


def served(row: SpecRow, presence: Presence, *, candidates: Positions) -> Mask:
    """Return per candidate position (ascending) whether ``row`` could serve it, ``bool[len(candidates)]``."""
    if row.kind is RowKind.SNAPSHOT:
        return _served_by_states(row, presence.positions, candidates)
    return _served_by_blocks(row, presence.mask, candidates)


def depth_of(
    table: SpecTable, known: Mapping[str, Presence], *, rows: Iterable[SpecRow], limit_tokens: int
) -> int:
    """Return a depth up to the limit past which ``rows`` serve nothing together; 0 when there is no row."""
    depths = (
        reach(voter(table, row), known.get(row.name, ABSENT), limit_tokens=limit_tokens) for row in rows
    )
    return min(limit_tokens, min(depths, default=0))


def reach(row: SpecRow, presence: Presence, *, limit_tokens: int) -> int:
    """Return a depth past which ``row`` serves nothing up to the limit, whatever holes it has before."""
    if row.kind is RowKind.SNAPSHOT:
        return max(presence.positions, default=0)
    looks_back = row.window is None or row.window - 1 + row.extra > 0
    return len(presence.mask) * row.block_tokens if looks_back else limit_tokens


def prefix_blocks(blocks: Mask) -> int:
    """Return the number of blocks before the first absent one."""
    # A search among bytes takes a tenth of what numpy takes for a mask of a thousand; -1, no hole, wraps.
    return blocks.tobytes().find(b"\0") % (len(blocks) + 1)


def deepest(candidates: Positions, legal: Mask) -> int:
    """Return the deepest legal candidate (``candidates`` ascend), 0 when there is none."""
    index = legal.tobytes().rfind(b"\1")
    return int(candidates[index]) if index >= 0 else 0


def token_count(name: str, number: object, *, least: int = 0) -> int:
    """Return ``number`` as an int; SpecError when it is no whole number of tokens from ``least`` on."""
    if isinstance(number, int | np.integer) and not isinstance(number, bool):
        count = int(number)
        if least <= count <= MAX_NUMBER:
            return count
    raise SpecError(f"{name} is {shown(number)}; tokens are ints, at least {least} and at most {MAX_NUMBER}")


def _served_by_states(row: SpecRow, positions: frozenset[int], candidates: Positions) -> Mask:
    held = np.fromiter(positions, dtype=np.int64, count=len(positions))
    held = held[held % row.block_tokens == 0]
    nearest = np.searchsorted(candidates, held)
    held, nearest = held[nearest < len(candidates)], nearest[nearest < len(candidates)]
    legal = np.zeros(len(candidates), dtype=np.bool_)
    legal[nearest[candidates[nearest] == held]] = True
    return legal


def _served_by_blocks(row: SpecRow, blocks: Mask, candidates: Positions) -> Mask:
    if row.window is None:  # coverage is [0, b) at every boundary: what lies before the first hole
        return candidates <= prefix_blocks(blocks) * row.block_tokens
    begin, end = coverage_bounds(row, candidates)
    # absent_before[i] counts the absent blocks of [0, i): a range is whole when it is equal at both ends.
    absent_before = np.concatenate(([0], np.cumsum(~blocks)))
    inside = end <= len(blocks)
    absent = absent_before[np.where(inside, end, 0)] - absent_before[np.where(inside, begin, 0)]
    whole: Mask = (inside & (absent == 0)) | (begin == end)
    return whole
