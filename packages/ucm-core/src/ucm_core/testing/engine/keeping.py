"""What to load and to save of a request: keys, blocks and pages, for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ucm_core.coordinator.coordinator import Coordinator, Verdict, needs_parents
from ucm_core.coordinator.coverage import joint_step
from ucm_core.coordinator.retention import Progress, keep
from ucm_core.spec.keys import Keys, following
from ucm_core.testing.engine.request import Request
from ucm_core.testing.engine.tables import BlockTables, Pages
from ucm_core.testing.engine.work import Copy

__all__ = ["Keeper"]


class Keeper:
    """Names objects of requests. It moves the cursors of what was given to the cache, and nothing else."""

    def __init__(self, coordinator: Coordinator, tables: BlockTables) -> None:
        self._coordinator = coordinator
        self._tables = tables
        table = tables.table
        self._rows = (*table.chain_rows, *table.follower_rows)
        self._step = joint_step(table)

    def load(self, request: Request, verdict: Verdict) -> Copy:
        """Everything that ``verdict`` promises."""
        table = self._tables.table
        parents = {
            row: following(keys) if needs_parents(table.row(row)) else None
            for row, keys in verdict.keys.items()
        }
        states = {row: [page] for row, page in request.state_pages.items()}
        pages = self._tables.of_rows(request) | states
        return Copy(request.key, verdict.keys, parents, verdict.blocks, pages)

    def save(self, request: Request, end: int, *, states: Pages) -> Copy | None:
        """Blocks that ``[0, end)`` completes, and the states that are due; None = nothing.

        ``states`` has per snapshot row the page of the state at ``end``; without it that state is kept later.
        """
        blocks = self._blocks(request, end)
        pages = dict(self._tables.of_rows(request))
        at = {request.due_state: request.state_pages} if request.due_state else {}
        if states and self._kept(request, end):
            at[end] = {row: new[0] for row, new in states.items()}
            request.kept_state = end
        request.due_state = 0
        for row in self._tables.table.snapshot_rows if at else ():
            blocks[row.name] = tuple(position // row.block_tokens - 1 for position in at)
            pages[row.name] = [held[row.name] for held in at.values()]
        if not blocks:
            return None
        keys = {row: self._keys(request, row, span) for row, span in blocks.items()}
        parents = {row: self._parents(request, row, span) for row, span in blocks.items()}
        return Copy(request.key, keys, parents, blocks, pages)

    def owe(self, request: Request) -> None:
        """Note the state at ``request.computed`` as due, where it is worth keeping and was not kept."""
        at = request.computed
        request.due_state = at if at > request.kept_state and self._kept(request, at) else 0

    def _blocks(self, request: Request, end: int) -> dict[str, Sequence[int]]:
        blocks: dict[str, Sequence[int]] = {}
        for row in self._rows:
            span = range(request.saved[row.name], end // row.block_tokens)
            if span:
                blocks[row.name] = span
                request.saved[row.name] = span.stop
        return blocks

    def _kept(self, request: Request, position: int) -> bool:
        """Whether any snapshot row keeps its state at ``position``: then all do, only joint points count."""
        progress = Progress(request.prompt_tokens, position, request.resumed)
        return position > request.resumed and any(
            keep(row, [[position]], progress=progress, alignment_tokens=self._step)
            for row in self._tables.table.snapshot_rows
        )

    def _keys(self, request: Request, row: str, blocks: Sequence[int]) -> Keys:
        spans = [blocks] if isinstance(blocks, range) else [range(block, block + 1) for block in blocks]
        return np.concatenate(
            [
                self._coordinator.keys(request.chain, row, begin_block=span.start, end_block=span.stop)
                for span in spans
            ]
        )

    def _parents(self, request: Request, row: str, blocks: Sequence[int]) -> Keys | None:
        if not isinstance(blocks, range):  # states have none
            return None
        return self._coordinator.parents(request.chain, row, begin_block=blocks.start, end_block=blocks.stop)
