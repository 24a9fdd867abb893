"""Asking the stores no further than it can matter for one verdict.

Full rows are asked first, from the head of the prefix, and stop at the first hole; each bounds the next.
Window rows and states are then asked only near the boundaries that are left, from deep to shallow, until one
of them is joint. What was not asked is absent in the result. Therefore the result resolves to the same answer
as complete knowledge: everything deeper than the joint boundary was asked, and nothing shallower can be
chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ucm_core.coordinator.boundaries import prefix_blocks, served
from ucm_core.coordinator.coverage import Positions, candidate_positions, coverage_bounds, voter
from ucm_core.coordinator.presence import Mask, Presence
from ucm_core.coordinator.resolve import Ask
from ucm_core.coordinator.shelf import Shelf
from ucm_core.spec.keys import PrefixChain
from ucm_core.spec.table import RowKind, SpecRow, SpecTable

__all__ = ["Survey"]

# Sizes of the first batch; later ones grow by _GROWTH: a cold prompt costs one small batch, a warm one few
# calls.
_FIRST_BLOCKS = 128
_FIRST_CANDIDATES = 16
_GROWTH = 8


class Survey:
    """What the stores were found to hold of one request's prefix; made for one verdict and thrown away."""

    def __init__(self, table: SpecTable, shelves: Mapping[str, Shelf], chain: PrefixChain, ask: Ask) -> None:
        """Know nothing yet but the blocks that the engine holds itself."""
        self._table = table
        self._shelves = shelves
        self._chain = chain
        self._ask = ask
        self._known_tokens = chain.hashed_tokens
        self._local_tokens = min(ask.local_tokens, ask.request_tokens)
        self._found: dict[str, Mask] = {}
        self._asked: dict[str, Mask] = {}
        self._states: dict[str, set[int]] = {}

    def run(self, rows: Sequence[SpecRow], limit_tokens: int, *, remembered: bool) -> dict[str, Presence]:
        """Ask about ``rows`` up to ``limit_tokens`` and return what is there.

        ``remembered`` lets the directories of checkpoints answer for the stores.
        """
        # Nothing is there behind the last digest but what the engine holds: a longer request costs no more.
        limit_tokens = min(limit_tokens, max(self._known_tokens, self._local_tokens))
        full, windows, states = self._sorted_out(rows)
        for place, row in enumerate(full):
            # The first row finds out how far it is worth asking; the others are asked all of that at once.
            first_blocks = _FIRST_BLOCKS if place == 0 else limit_tokens // row.block_tokens
            limit_tokens = min(limit_tokens, self._prefix_tokens(row, limit_tokens, first_blocks))
        candidates = candidate_positions(self._table, limit_tokens, align_tokens=self._ask.align_tokens)
        self._prepare(windows, states, limit_tokens)
        for batch in _from_deep(candidates):
            if len(self._joint(windows, states, batch, remembered)):
                break
        return self._result()

    def _sorted_out(self, rows: Iterable[SpecRow]) -> tuple[list[SpecRow], list[SpecRow], list[SpecRow]]:
        """Return (full rows, those with the fewest keys first; window rows; snapshot rows)."""
        parts: tuple[list[SpecRow], list[SpecRow], list[SpecRow]] = ([], [], [])
        for row in rows:
            if row.kind is RowKind.SNAPSHOT:
                parts[2].append(row)
            else:
                parts[voter(self._table, row).window is not None].append(row)
        parts[0].sort(key=lambda row: -row.block_tokens)
        return parts

    def _prefix_tokens(self, row: SpecRow, limit_tokens: int, first_blocks: int) -> int:
        """Ask a full row from its head to its first hole and return the tokens before that.

        Blocks ``[0, begin)`` are always found: those that the engine holds, then those that the store said.
        """
        found = self._start(row, limit_tokens)
        begin = min(self._local_tokens // row.block_tokens, len(found))
        end = min(len(found), self._known_tokens // row.block_tokens)
        shelf, size = self._shelves[row.name], first_blocks
        while begin < end:
            stop = min(begin + size, end)
            found[begin:stop] = shelf.lookup(shelf.block_keys(self._chain, begin=begin, end=stop))
            begin, size = prefix_blocks(found), size * _GROWTH
            if begin < stop:
                break
        return begin * row.block_tokens

    def _prepare(self, windows: Iterable[SpecRow], states: Iterable[SpecRow], limit_tokens: int) -> None:
        for row in windows:
            # Local blocks are found and need no question; nor does what has no digest.
            asked = self._start(row, limit_tokens).copy()
            asked[self._known_tokens // row.block_tokens :] = True
            self._asked[row.name] = asked
        for row in states:
            self._states[row.name] = set()

    def _start(self, row: SpecRow, limit_tokens: int) -> Mask:
        """Return the row's mask up to ``limit_tokens`` with the local blocks found, kept for the result."""
        found = np.zeros(limit_tokens // row.block_tokens, dtype=np.bool_)
        found[: self._local_tokens // row.block_tokens] = True
        self._found[row.name] = found
        return found

    def _joint(
        self, windows: Iterable[SpecRow], states: Iterable[SpecRow], batch: Positions, remembered: bool
    ) -> Positions:
        """Ask about ``batch`` and return the positions in it that every row serves; each row thins it."""
        for row in windows:
            self._ask_window(row, batch)
            batch = batch[served(voter(self._table, row), Presence(self._found[row.name]), candidates=batch)]
        for row in states:
            batch = self._ask_states(row, batch, remembered)
        return batch

    def _ask_window(self, row: SpecRow, batch: Positions) -> None:
        """Ask for the blocks that the boundaries of ``batch`` need and nobody asked for yet."""
        asked, found = self._asked[row.name], self._found[row.name]
        begin, end = coverage_bounds(voter(self._table, row), batch)
        # +1 where a needed range begins and -1 where it ends: the running sum counts the ranges over a block.
        steps = np.zeros(len(found) + 1, dtype=np.int64)
        np.add.at(steps, begin, 1)
        np.add.at(steps, end, -1)
        indices = np.flatnonzero((np.cumsum(steps)[:-1] > 0) & ~asked)
        found[indices] = self._present(row, indices)
        asked[indices] = True

    def _ask_states(self, row: SpecRow, batch: Positions, remembered: bool) -> Positions:
        points = batch[(batch % row.block_tokens == 0) & (batch <= self._known_tokens)]
        shelf = self._shelves[row.name]
        held: Positions = points[shelf.states(shelf.keys(self._chain, points), remembered=remembered)]
        self._states[row.name].update(held.tolist())
        return held

    def _present(self, row: SpecRow, indices: Positions) -> Mask:
        shelf = self._shelves[row.name]
        return shelf.lookup(shelf.keys(self._chain, shelf.ends(indices)))

    def _result(self) -> dict[str, Presence]:
        blocks = {name: Presence(found) for name, found in self._found.items()}
        states = {name: Presence(positions=frozenset(held)) for name, held in self._states.items()}
        return blocks | states


def _from_deep(candidates: Positions) -> Iterator[Positions]:
    """Yield ``candidates`` (ascending) in growing batches, the deepest first."""
    end, size = len(candidates), _FIRST_CANDIDATES
    while end > 0:
        yield candidates[max(0, end - size) : end]
        end, size = end - size, size * _GROWTH
