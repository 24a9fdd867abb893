"""Which objects a request loads or saves and where they lie: pure functions of tables and positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ucm_core.coordinator.coordinator import Verdict
from ucm_core.spec.keys import Keys
from ucm_core.spec.layout import block_pieces
from ucm_core.spec.table import RowKind, SpecRow
from ucm_vllm.block_tables import NULL_PAGE, PAGE, PAYLOAD, held, of_payloads, state_pieces, whole
from ucm_vllm.metadata import Int64s, RowTransfer
from ucm_vllm.spec_from_engine import EngineSpec, RowGroup

Tables = Sequence[Sequence[int]]
"""Per engine group the engine blocks of one request, in order of tokens; 0 = not kept."""


class TransferPlanner:
    """Makes `RowTransfer` objects for one engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self.block_rows = (*spec.table.chain_rows, *spec.table.follower_rows)
        """Rows that hold blocks of tokens."""

    def load(
        self, verdict: Verdict, tables: Tables, *, parents: Mapping[str, Keys | None]
    ) -> tuple[RowTransfer, ...] | None:
        """All that the verdict lists; None if the engine has no place for some of it.

        ``parents``: per row those of its blocks, see `RowTransfer.parents`.

        Nothing is written over what the engine holds, not even in a block that it holds in part.
        """
        local, resume = verdict.hit.ask.local_tokens, verdict.hit.resume_tokens
        transfers = []
        for row in self.block_rows:
            span = verdict.blocks[row.name]
            pieces = self._pieces(row, np.arange(span.start, span.stop), tables, from_token=local)
            if not all(_has_place(row, part, len(span)) for _, part in pieces):
                return None
            found = tuple((group, held(rows)) for group, rows in pieces)
            transfers.append(RowTransfer(row.name, verdict.keys[row.name], found, parents.get(row.name)))
        for row in self._spec.table.snapshot_rows:
            pages = {group.index: _state_page(group, resume, tables) for group in self._spec.rows[row.name]}
            if NULL_PAGE in pages.values():
                return None
            transfers.append(self.state(row, verdict.keys[row.name], pages=pages))
        return tuple(transfers)

    def range_of(self, *, begin_tokens: int, end_tokens: int, tables: Tables) -> tuple[RowTransfer, ...]:
        """Every engine block of ``[begin, end)``, as one object of each row under no key.

        What to report when nothing can be loaded; so plain that it still works when `load` did not.
        """
        return tuple(
            RowTransfer(
                row.name,
                np.zeros((1, 32), dtype=np.uint8),
                tuple(
                    (group.index, _one_object(_pages_of(group, begin_tokens, end_tokens, tables)))
                    for group in self._spec.rows[row.name]
                ),
            )
            for row in self.block_rows
        )

    def save_blocks(
        self, row: SpecRow, blocks: Int64s, *, keys: Keys, parents: Keys | None, tables: Tables
    ) -> RowTransfer | None:
        """Those of ``blocks`` whose tokens all groups of the row still keep; None when there are none."""
        pieces = self._pieces(row, blocks, tables)
        complete = np.ones(len(blocks), dtype=np.bool_)
        for _, rows in pieces:
            complete &= whole(rows, len(blocks))
        if not complete.any():
            return None
        chosen = tuple((group, of_payloads(rows, complete)) for group, rows in pieces)
        return RowTransfer(row.name, keys[complete], chosen, None if parents is None else parents[complete])

    def state(self, row: SpecRow, key: Keys, *, pages: Mapping[int, int]) -> RowTransfer:
        """The row's state under ``key``, which all its groups hold (``pages``: group -> engine block)."""
        groups = self._spec.rows[row.name]
        return RowTransfer(
            row.name, key, tuple((group.index, state_pieces([pages[group.index]])) for group in groups)
        )

    def _pieces(
        self, row: SpecRow, blocks: Int64s, tables: Tables, *, from_token: int = 0
    ) -> list[tuple[int, Int64s]]:
        first, size = blocks * row.block_tokens, row.block_tokens
        return [
            (group.index, block_pieces(first, size, page_ids=tables[group.index],
                                       page_tokens=group.page_tokens, from_token=from_token))
            for group in self._spec.rows[row.name]
        ]  # fmt: skip


def offers_by_position(offers: Collection[tuple[int, int, int]]) -> dict[int, dict[int, int]]:
    """Return ``[(group, engine block, position)]`` as position -> group -> engine block."""
    by_position: dict[int, dict[int, int]] = {}
    for group, page, position in offers:
        by_position.setdefault(position, {})[group] = page
    return by_position


def _state_page(group: RowGroup, position: int, tables: Tables) -> int:
    index, rest = divmod(position, group.page_tokens)
    table = tables[group.index]
    return NULL_PAGE if rest or not 0 < index <= len(table) else table[index - 1]


def _has_place(row: SpecRow, pieces: Int64s, count: int) -> bool:
    """Whether the engine keeps all of ``count`` blocks; a window may begin inside the first of them."""
    kept = whole(pieces, count)
    if row.kind is not RowKind.CHAIN or row.window is not None:
        kept[:1] = (pieces[pieces[:, PAYLOAD] == 0, PAGE] != NULL_PAGE).any()
    return bool(kept.all())


def _pages_of(group: RowGroup, begin_tokens: int, end_tokens: int, tables: Tables) -> list[int]:
    held_pages = tables[group.index][begin_tokens // group.page_tokens : -(-end_tokens // group.page_tokens)]
    return [page for page in held_pages if page != NULL_PAGE]


def _one_object(pages: Sequence[int]) -> Int64s:
    pieces = state_pieces(pages)
    pieces[:, PAYLOAD] = 0
    return pieces
