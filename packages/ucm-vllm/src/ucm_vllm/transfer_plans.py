"""Which objects a request loads or saves and where they lie in the engine: pure functions of tables and positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from ucm_core.coordinator.resolve import coverage
from ucm_core.spec.keys import PrefixChain
from ucm_core.spec.table import SpecRow

from ucm_vllm.block_tables import NULL_PAGE, block_pieces, held, of_payloads, state_pieces, whole
from ucm_vllm.metadata import Int64s, Keys, RowTransfer
from ucm_vllm.spec_from_engine import EngineSpec, RowGroup

Tables = Sequence[Sequence[int]]
"""Per engine group the engine blocks of one request, in order of tokens; 0 = not kept."""

RowKeys = Callable[[str, Keys], Keys]
"""(row name, digests ``uint8[n, 32]``) -> object keys of the same shape."""


class TransferPlanner:
    """Makes `RowTransfer` objects for one engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._block_rows = (*spec.table.chain_rows, *spec.table.follower_rows)

    def load(
        self, chain: PrefixChain, keys_of: RowKeys, *, local_tokens: int, resume_tokens: int, tables: Tables
    ) -> tuple[RowTransfer, ...] | None:
        """All that is needed to resume at ``resume_tokens`` past ``local_tokens``; None if the engine has no room for it.

        Blocks that the engine holds are left out, and so are the tokens of a block below ``local_tokens``.
        """
        transfers = []
        for row in self._block_rows:
            needed = coverage(self._voter(row), resume_tokens)
            begin = max(needed.start, local_tokens // row.block_tokens)
            blocks = np.arange(begin, needed.stop, dtype=np.int64)
            pieces = self._pieces(row, blocks, tables, from_token=local_tokens)
            keys = keys_of(row.name, chain.block_digests(row.block_tokens)[begin : needed.stop])
            transfers.append(
                RowTransfer(row.name, keys, tuple((group, held(rows)) for group, rows in pieces))
            )
        for row in self._spec.table.snapshot_rows:
            pages = self._state_pages(row, resume_tokens, tables)
            if NULL_PAGE in pages.values():
                return None
            transfers.append(self._states(row, chain, keys_of, position=resume_tokens, pages=pages))
        return tuple(transfers)

    def range_of(self, *, begin_tokens: int, end_tokens: int, tables: Tables) -> tuple[RowTransfer, ...]:
        """Every engine block of ``[begin, end)`` under no key: what to report when nothing there can be loaded."""
        transfers = []
        for row in self._block_rows:
            blocks = np.arange(
                begin_tokens // row.block_tokens, -(-end_tokens // row.block_tokens), dtype=np.int64
            )
            pieces = self._pieces(row, blocks, tables, from_token=begin_tokens)
            keys = np.zeros((len(blocks), 32), dtype=np.uint8)
            transfers.append(
                RowTransfer(row.name, keys, tuple((group, held(rows)) for group, rows in pieces))
            )
        return tuple(transfers)

    def save_blocks(self, row: SpecRow, blocks: Int64s, keys: Keys, tables: Tables) -> RowTransfer | None:
        """Those of ``blocks`` whose tokens the engine keeps in all groups of the row; None when there are none."""
        pieces = self._pieces(row, blocks, tables)
        complete = np.ones(len(blocks), dtype=np.bool_)
        for _, rows in pieces:
            complete &= whole(rows, len(blocks))
        if not complete.any():
            return None
        chosen = tuple((group, of_payloads(rows, complete)) for group, rows in pieces)
        return RowTransfer(row.name, keys[complete], chosen)

    def save_state(
        self, row: SpecRow, chain: PrefixChain, keys_of: RowKeys, *, position: int, pages: Mapping[int, int]
    ) -> RowTransfer | None:
        """The row's state at ``position``, if every group of the row offers it (``pages``: group -> engine block)."""
        groups = self._spec.rows[row.name]
        if not self.is_joint(row, position) or any(
            pages.get(g.index, NULL_PAGE) == NULL_PAGE for g in groups
        ):
            return None
        return self._states(row, chain, keys_of, position=position, pages=pages)

    def is_joint(self, row: SpecRow, position: int) -> bool:
        """Whether every row could resume at ``position``: only such states are worth keeping."""
        return position > 0 and position % self._spec.align_tokens == 0 and position % row.block_tokens == 0

    def _states(
        self, row: SpecRow, chain: PrefixChain, keys_of: RowKeys, *, position: int, pages: Mapping[int, int]
    ) -> RowTransfer:
        digest = np.frombuffer(chain.digest_at(position), dtype=np.uint8).reshape(1, 32)
        pieces = tuple(
            (group.index, state_pieces([pages[group.index]])) for group in self._spec.rows[row.name]
        )
        return RowTransfer(row.name, keys_of(row.name, digest), pieces)

    def _state_pages(self, row: SpecRow, position: int, tables: Tables) -> dict[int, int]:
        """Group -> the engine block whose state ends at ``position``."""
        return {group.index: _state_page(group, position, tables) for group in self._spec.rows[row.name]}

    def _pieces(
        self, row: SpecRow, blocks: Int64s, tables: Tables, *, from_token: int = 0
    ) -> list[tuple[int, Int64s]]:
        first_tokens = blocks * row.block_tokens
        return [
            (
                group.index,
                block_pieces(
                    first_tokens, row.block_tokens, table=tables[group.index], page_tokens=group.page_tokens,
                    from_token=from_token,
                ),
            )
            for group in self._spec.rows[row.name]
        ]  # fmt: skip

    def _voter(self, row: SpecRow) -> SpecRow:
        return row if row.follows is None else self._spec.table.row(row.follows)


def offers_by_position(offers: Collection[tuple[int, int, int]]) -> dict[int, dict[int, int]]:
    """vLLM's ``[(group, engine block, position)]`` as position -> group -> engine block."""
    by_position: dict[int, dict[int, int]] = {}
    for group, page, position in offers:
        by_position.setdefault(position, {})[group] = page
    return by_position


def _state_page(group: RowGroup, position: int, tables: Tables) -> int:
    index, rest = divmod(position, group.page_tokens)
    table = tables[group.index]
    return NULL_PAGE if rest or not 0 < index <= len(table) else table[index - 1]
