"""Not yet: what a verdict could promise soon, because what limited it is on its way into a ring.

Asked first is only what stands in the way of the next boundary. Only when some of that is in flight is the
whole question asked again, with everything in flight taken for present. The answer promises nothing: who
waits for it asks for a new verdict, and does so a limited number of times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ucm_core.coordinator.coverage import Positions, alignment, coverage, voters
from ucm_core.coordinator.lookups import Lookup, RowLookup, Suspects
from ucm_core.coordinator.presence import Mask
from ucm_core.coordinator.resolve import Hit, resolve_rows, with_local
from ucm_core.coordinator.shelf import Shelf
from ucm_core.coordinator.survey import Survey
from ucm_core.spec.keys import Keys, PrefixChain
from ucm_core.spec.table import RowKind, SpecRow, SpecTable

__all__ = ["Soon"]

MAX_STATES = 16
"""States of a row that may be asked about at first: the deepest ones."""


@dataclass(frozen=True, slots=True)
class Soon:
    """Answers what is in flight; see `Soon.tokens`."""

    table: SpecTable
    """The rows."""
    shelves: Mapping[str, Shelf]
    """What is known and may be asked, per row."""
    in_flight: Mapping[str, Lookup]
    """Per row which keys are on their way, ``bool[n]``; a row that is not in it has none, followers are not
    asked."""

    def tokens(self, chain: PrefixChain, hit: Hit) -> int:
        """Return where the request of ``hit`` could resume once all is there that is in flight now.

        ``hit.resume_tokens`` when nothing is, or when a store fails.
        """
        limit = hit.ask.limit_tokens(self.table)
        if hit.resume_tokens == limit or not self._may_grow(chain, hit, limit):
            return hit.resume_tokens
        rows = voters(self.table)
        shelves = {row.name: self._expecting(row.name) for row in rows}
        found = Survey(self.table, shelves, chain, hit.ask).run(rows, limit, remembered=False)
        known = with_local(self.table, found, ask=hit.ask)
        return max(hit.resume_tokens, resolve_rows(self.table, known, ask=hit.ask, rows=rows).resume_tokens)

    def _may_grow(self, chain: PrefixChain, hit: Hit, limit: int) -> bool:
        """Whether anything that the next boundary lacks is in flight."""
        step = alignment(self.table, hit.ask.align_tokens)
        boundary = min(hit.hit_tokens + step, limit)
        for row in voters(self.table):
            ends = _ends(row, hit, boundary, step=step)
            ends = ends[ends <= chain.hashed_tokens]
            if len(ends) and self._lookup(row.name)(self.shelves[row.name].keys(chain, ends)).any():
                return True
        return False

    def _expecting(self, name: str) -> Shelf:
        """The row's shelf, holding what is in flight as well; without memory."""
        shelf, flying = self.shelves[name], self._lookup(name)
        either = RowLookup(name, lambda keys: shelf.lookup(keys) | flying(keys), _nobody())
        return replace(shelf, lookup=either, checkpoints=None)

    def _lookup(self, name: str) -> RowLookup:
        return RowLookup(name, self.in_flight.get(name, _none), _nobody())


def _ends(row: SpecRow, hit: Hit, boundary_tokens: int, *, step: int) -> Positions:
    """Return where the blocks or states end that ``boundary_tokens`` needs and ``hit`` may lack."""
    if row.kind is RowKind.SNAPSHOT:
        positions: Positions = np.arange(step, boundary_tokens + 1, step, dtype=np.int64)
        positions = positions[(positions > hit.resume_tokens) & (positions % row.block_tokens == 0)]
        return positions[-MAX_STATES:]
    needed = coverage(row, boundary_tokens)
    first = needed.start if row.window else max(needed.start, hit.hit_tokens // row.block_tokens)
    ends: Positions = np.arange(first + 1, needed.stop + 1, dtype=np.int64) * row.block_tokens
    return ends


def _none(keys: Keys) -> Mask:
    return np.zeros(len(keys), dtype=np.bool_)


def _nobody() -> Suspects:
    """Distrust nobody: what failed and is on its way again is expected like everything else."""
    return Suspects(limit_s=1.0, capacity=1, clock=time.monotonic)
