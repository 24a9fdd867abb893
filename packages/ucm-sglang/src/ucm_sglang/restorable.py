"""Which lengths of a prefix SGLang could restore, given what is there of each pool. Pure.

Everything counts pages from the first page that is asked about: a page hash does not say how deep it lies.
SGLang says per pool what it will read for a length of n pages: all n, or the last few. UCM's own rule
(`ucm_core.coordinator.coverage`) says what a row needs at that boundary. A length is legal when both find
everything, in every pool; so the set has holes, and is neither an interval nor its maximum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ucm_core.coordinator.boundaries import served
from ucm_core.coordinator.coverage import Positions, coverage, voter
from ucm_core.coordinator.presence import Mask, Presence
from ucm_core.spec.rows import Part, RowKind, SpecRow
from ucm_core.spec.table import SpecTable

__all__ = ["Demand", "Restorable", "needed_pages", "restorable"]

_PAGE = (Part("page", (1,), "uint8"),)


@dataclass(frozen=True, slots=True)
class Demand:
    """What SGLang will read of one pool."""

    pool: str
    """The pool's name."""
    rows: tuple[str, ...]
    """The rows whose layers it holds."""
    trailing_pages: int | None = None
    """Only the last pages of a length (of a shorter one all), at least one; None: all of them."""


@dataclass(frozen=True, slots=True)
class Restorable:
    """The legal lengths."""

    lengths: tuple[int, ...]
    """Pages, ascending, none of them 0."""
    deepest: Mapping[str, int]
    """Per pool its own deepest legal length in pages, 0 when it has none."""

    @property
    def pages(self) -> int:
        """The deepest legal length of all pools together, 0 when there is none."""
        return self.lengths[-1] if self.lengths else 0


NOTHING = Restorable((), {})
"""No length at all."""


def restorable(
    table: SpecTable, demands: Sequence[Demand], *, found: Mapping[str, Mask], pages: int
) -> Restorable:
    """Return every length in ``1..pages`` at which all pools have what is needed.

    ``found`` has for rows of the demands which of the pages are there, ``bool[n]``; what it does not mention
    is absent. The table's blocks are pages (`ucm_position_key.PoolTable.check_page`).

    >>> from ucm_core import Part, RowKind, SpecRow, SpecTable
    >>> full = SpecRow("full", RowKind.CHAIN, 16, (0,), (Part("k", (8,), "float32"),))
    >>> state = SpecRow("state", RowKind.SNAPSHOT, 16, (1,), (Part("ssm", (8,), "float32"),))
    >>> demands = [Demand("kv", ("full",)), Demand("mamba", ("state",), trailing_pages=1)]
    >>> found = {"full": np.ones(5, np.bool_), "state": np.array([0, 1, 0, 1, 0], np.bool_)}
    >>> restorable(SpecTable((full, state), 16), demands, found=found, pages=5)
    Restorable(lengths=(2, 4), deepest={'kv': 5, 'mamba': 4})
    """
    legal = np.ones(pages, dtype=np.bool_)
    deepest = {}
    for demand in demands:
        serves = _lengths(table, demand, found, pages=pages)
        deepest[demand.pool] = _deepest(serves)
        legal &= serves
    return Restorable(tuple((np.flatnonzero(legal) + 1).tolist()), deepest)


def needed_pages(table: SpecTable, row: SpecRow, *, demand: Demand) -> int | None:
    """Return how many pages at the end of a length ``demand`` needs of ``row``; None: all of them.

    The larger of what SGLang reads and what UCM's coverage says; a state is one page.
    """
    decides = voter(table, row)
    if demand.trailing_pages is None or (decides.kind is RowKind.CHAIN and decides.window is None):
        return None
    deep = decides.block_tokens * (2 + ((decides.window or 0) + decides.extra) // decides.block_tokens)
    return max(1, demand.trailing_pages, len(coverage(decides, deep)))


def _lengths(table: SpecTable, demand: Demand, found: Mapping[str, Mask], *, pages: int) -> Mask:
    """Return per length from 1 on whether the pool serves it, ``bool[pages]``."""
    candidates: Positions = np.arange(1, pages + 1, dtype=np.int64)
    legal = np.ones(pages, dtype=np.bool_)
    for row in map(table.row, demand.rows):
        trailing = needed_pages(table, row, demand=demand)
        # a page is a block of one token here, so a window of n + 1 tokens is n pages
        asked = SpecRow(row.name, RowKind.CHAIN, 1, (0,), _PAGE, window=trailing and trailing + 1)
        legal &= served(asked, Presence(found.get(row.name)), candidates=candidates)
    return legal


def _deepest(serves: Mask) -> int:
    return len(serves) - int(serves[::-1].argmax()) if serves.any() else 0
