"""What is there of one prefix: masks of blocks and sets of positions, and how those of several combine.

Sets are combined, never numbers. Uncertainty is always absence: a block that nobody mentioned is missing, a
row that nobody mentioned holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator.coverage import cached_rows, voter
from ucm_core.errors import SpecError
from ucm_core.spec.rows import MAX_NUMBER
from ucm_core.spec.table import RankRule, RowKind, SpecRow, SpecTable

__all__ = ["ABSENT", "Mask", "Presence", "combine_ranks", "combine_slices", "unite", "without"]

Mask = npt.NDArray[np.bool_]
"""One truth value per block or candidate, ``bool[n]``."""

_NO_BLOCKS: Mask = np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Presence:
    """What one row holds of one prefix. Everything not mentioned is absent."""

    blocks: Mask | None = None
    """``bool[n]``: block ``i`` of a chain row or follower is whole; blocks from ``n`` on are absent."""
    positions: frozenset[int] = frozenset()
    """Positions (tokens) at which a snapshot row holds a state of *this* prefix."""

    def __post_init__(self) -> None:
        """Raise SpecError for what does not say yes or no per block, and for positions that are no tokens."""
        if self.blocks is not None:
            object.__setattr__(self, "blocks", _as_mask(self.blocks))
        if self.positions:
            object.__setattr__(self, "positions", _as_positions(self.positions))

    @property
    def mask(self) -> Mask:
        """``blocks``, empty where there are none."""
        return _NO_BLOCKS if self.blocks is None else self.blocks


ABSENT = Presence()
"""A row that holds nothing."""


def unite(*presences: Mapping[str, Presence]) -> dict[str, Presence]:
    """Return what any of the presences holds: the store's and, say, the engine's own blocks and states."""
    names = dict.fromkeys(name for presence in presences for name in presence)
    return {name: _any_of([presence.get(name, ABSENT) for presence in presences]) for name in names}


def combine_ranks(table: SpecTable, ranks: Sequence[Mapping[str, Presence]]) -> dict[str, Presence]:
    """Return what tensor-parallel ranks hold together, per block and per position.

    ``intersection`` rows need every rank's piece, ``all_union`` rows any rank's copy; a follower combines as
    its source does. A rank that does not mention a row holds nothing of it. The result speaks of every cached
    row and is the same on every rank.
    """
    return {
        row.name: _combined_by(voter(table, row).rank_rule)([rank.get(row.name, ABSENT) for rank in ranks])
        for row in cached_rows(table)
    }


def combine_slices(slices: Sequence[Mapping[str, Presence]]) -> dict[str, Presence]:
    """Return what pipeline stages or context-parallel coordinates hold together: always every slice's piece.

    A slice that does not mention a row has no layer of it and is not asked: one that holds nothing must say
    so, as `combine_ranks` does.
    """
    names = dict.fromkeys(name for piece in slices for name in piece)
    return {name: _all_of([piece[name] for piece in slices if name in piece]) for name in names}


def without(row: SpecRow, presence: Presence, *, units: Collection[int]) -> Presence:
    """Return ``presence`` less ``units``: positions of a snapshot row, blocks of any other."""
    if row.kind is RowKind.SNAPSHOT:
        return Presence(presence.blocks, presence.positions - frozenset(units))
    blocks = presence.mask.copy()
    blocks[[unit for unit in units if 0 <= unit < len(blocks)]] = False
    return Presence(blocks, presence.positions)


def _as_mask(given: object) -> Mask:
    blocks = np.asarray(given)
    if blocks.ndim != 1 or (len(blocks) and blocks.dtype.kind not in "biu"):
        raise SpecError(f"blocks are {blocks.dtype}{list(blocks.shape)}; need bool[blocks]")
    return blocks.astype(np.bool_, copy=False)


def _as_positions(given: Collection[int]) -> frozenset[int]:
    for kind in set(map(type, given)):
        if kind is bool or not issubclass(kind, Integral):
            raise SpecError(f"positions are ints, tokens of prefix; there is a {kind.__name__} among them")
    if not 0 <= min(given) <= max(given) <= MAX_NUMBER:
        raise SpecError(f"positions are {min(given)} to {max(given)}; need 0 to {MAX_NUMBER} tokens")
    return frozenset(given)


def _combined_by(rule: RankRule) -> Callable[[Sequence[Presence]], Presence]:
    return _any_of if rule is RankRule.ALL_UNION else _all_of


def _any_of(presences: Sequence[Presence]) -> Presence:
    positions = frozenset[int]().union(*(piece.positions for piece in presences))
    return Presence(np.logical_or.reduce(_padded(presences)), positions)


def _all_of(presences: Sequence[Presence]) -> Presence:
    if not presences:
        return ABSENT
    first, *others = (piece.positions for piece in presences)
    return Presence(np.logical_and.reduce(_padded(presences)), frozenset(first).intersection(*others))


def _padded(presences: Sequence[Presence]) -> Mask:
    """Return ``bool[len(presences), longest]``; what a shorter mask does not mention is absent."""
    padded = np.zeros(
        (len(presences), max((len(piece.mask) for piece in presences), default=0)), dtype=np.bool_
    )
    for line, piece in zip(padded, presences, strict=True):
        line[: len(piece.mask)] = piece.mask
    return padded
