"""What a boundary needs: one coverage function, and the positions that can be boundaries at all.

Pure arithmetic over spec rows. ``A``, the distance of possible boundaries, is the lcm of the chain rows'
block sizes and of the adapter's alignment.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ucm_core.spec.table import RowKind, SpecRow, SpecTable, alignment_of

__all__ = [
    "Positions",
    "alignment",
    "cached_rows",
    "candidate_positions",
    "coverage",
    "coverage_bounds",
    "joint_step",
    "voter",
    "voters",
]

Positions = npt.NDArray[np.int64]
"""Tokens of prefix, or block numbers, ``int64[n]``."""


def voters(table: SpecTable) -> tuple[SpecRow, ...]:
    """Return the rows that decide where to resume: chain rows and snapshot rows."""
    return (*table.chain_rows, *table.snapshot_rows)


def cached_rows(table: SpecTable) -> tuple[SpecRow, ...]:
    """Return the rows that hold anything: chain rows, snapshot rows, followers."""
    return (*voters(table), *table.follower_rows)


def voter(table: SpecTable, row: SpecRow) -> SpecRow:
    """Return the row that decides about ``row``: a follower's source, else the row itself."""
    return row if row.follows is None else table.row(row.follows)


def alignment(table: SpecTable, align_tokens: int = 1) -> int:
    """Return ``A`` in tokens; SpecError when it is above the limit, with the numbers."""
    return alignment_of((table.alignment_tokens, align_tokens))


def joint_step(table: SpecTable, align_tokens: int = 1) -> int:
    """Return the distance of points that all rows share: the lcm of ``A`` and of the snapshot rows' grids.

    It is the ``A`` to give to retention when a table has snapshot rows of several grids: a state between
    those points has no partner.
    """
    return math.lcm(alignment(table, align_tokens), *(row.block_tokens for row in table.snapshot_rows))


def candidate_positions(table: SpecTable, limit_tokens: int, *, align_tokens: int = 1) -> Positions:
    """Return the multiples of ``A`` in ``(0, limit_tokens]``, ascending, as ``int64[n]``."""
    step = alignment(table, align_tokens)
    return np.arange(step, limit_tokens + 1, step, dtype=np.int64)


def coverage(row: SpecRow, boundary_tokens: int) -> range:
    """Return the blocks of ``row`` that resuming at ``boundary_tokens`` needs.

    Of a full row all blocks that overlap ``[0, boundary_tokens)``, of a window row those that overlap what
    attention past the boundary still sees, of a snapshot row the one state that ends there. For a follower
    ask about the row it follows.

    >>> from ucm_core import Part, RowKind, SpecRow
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
    if row.window is None:
        return np.zeros_like(end), end
    # The first token that attention past the boundary can still see.
    first = np.maximum(boundaries - (row.window - 1 + row.extra), 0)
    return np.where(first < boundaries, first // row.block_tokens, end), end
