"""What each step saves: blocks that it completes and that the store lacks, and states worth keeping."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ucm_core.cache import Cache
from ucm_core.coordinator.origins import Origins
from ucm_core.coordinator.retention import Progress
from ucm_core.spec.keys import Keys, PrefixChain
from ucm_core.spec.table import SpecRow
from ucm_vllm.metadata import RowTransfer
from ucm_vllm.request_records import RequestRecord
from ucm_vllm.state_retention import StateRetention
from ucm_vllm.transfer_plans import Tables, TransferPlanner, offers_by_position


class SavePlanner:
    """Decides what is saved of one request in one step; one for each generation of weights.

    ``origins`` remembers where what is saved comes from, where somebody follows the events.
    """

    def __init__(
        self,
        planner: TransferPlanner,
        retention: StateRetention,
        *,
        state_rows: tuple[SpecRow, ...],
        tail_tokens: int,
        origins: Origins | None = None,
    ) -> None:
        self._planner, self.retention = planner, retention
        self._state_rows, self._tail_tokens = state_rows, tail_tokens
        self._origins = origins

    def blocks(
        self, cache: Cache, record: RequestRecord, *, tables: Tables, end_tokens: int
    ) -> tuple[RowTransfer, ...]:
        """Whole blocks before ``end_tokens`` of every row of blocks."""
        chain = record.chain_to(end_tokens) if record.trusted and not record.loading else None
        if chain is None:
            return ()
        found = (
            self._blocks_of(cache, record, row, tables=tables, end_tokens=end_tokens)
            for row in self._planner.block_rows
        )
        return tuple(transfer for transfer in found if transfer is not None)

    def states(
        self, cache: Cache, record: RequestRecord, *, offers: Collection[tuple[int, int, int]]
    ) -> tuple[RowTransfer, ...]:
        """Of each row the states that are worth keeping among those that vLLM offers in this step."""
        by_position = offers_by_position(offers)
        chain = record.chain_to(max(by_position, default=0)) if record.trusted else None
        if chain is None:
            return ()
        progress = Progress(
            record.request.num_prompt_tokens,
            chain.token_count,
            tail_tokens=self._tail_tokens,
            common_tokens=record.common_tokens or 0,
        )
        states = (
            self._state(cache, chain, row, position=position, pages=by_position[position])
            for row in self._state_rows
            for position in self.retention.kept(row, by_position, progress=progress)
        )
        return tuple(state for state in states if state is not None)

    def has_room(self, cache: Cache, row: SpecRow, *, key: Keys) -> bool:
        """Count the state under ``key`` (``uint8[1, 32]``) as seen; what is worth too little is dropped."""
        fallen = self.retention.sight(row, key)
        itself = (fallen == key).all(axis=1)
        if len(fallen[~itself]):
            cache.stores[row.name].drop(fallen[~itself])
        return not itself.any()

    def _blocks_of(
        self, cache: Cache, record: RequestRecord, row: SpecRow, *, tables: Tables, end_tokens: int
    ) -> RowTransfer | None:
        """Blocks ``[cursor, end)`` that the store lacks; the cursor begins at 0, so that holes are filled."""
        begin, end = record.cursors.get(row.name, 0), end_tokens // row.block_tokens
        chain = record.chain
        if begin >= end or chain is None:
            return None
        record.cursors[row.name] = end
        missing = cache.coordinator.missing(chain, row.name, begin_block=begin, end_block=end)
        keys = cache.coordinator.keys(chain, row.name, begin_block=begin, end_block=end)
        parents = cache.coordinator.parents(chain, row.name, begin_block=begin, end_block=end)
        if self._origins is not None and missing.any():
            self._origins.remember(chain, row, keys=keys, begin_block=begin)
        return self._planner.save_blocks(
            row,
            np.flatnonzero(missing) + begin,
            keys=keys[missing],
            parents=None if parents is None else parents[missing],
            tables=tables,
        )

    def _state(
        self, cache: Cache, chain: PrefixChain, row: SpecRow, *, position: int, pages: Mapping[int, int]
    ) -> RowTransfer | None:
        """The state, unless it is stored already or others are worth more."""
        block = position // row.block_tokens - 1
        key = cache.coordinator.keys(chain, row.name, begin_block=block, end_block=block + 1)
        if not self.has_room(cache, row, key=key):
            return None
        missing = cache.coordinator.missing(chain, row.name, begin_block=block, end_block=block + 1)
        if self._origins is not None and missing.any():
            self._origins.remember(chain, row, keys=key, begin_block=block)
        return self._planner.state(row, key, pages=pages) if missing.any() else None
