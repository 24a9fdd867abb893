"""The block tables of all groups: which pages a request holds, and which it can no longer need.

One group per chain row and per snapshot row; a follower rides on the pages of its source. Pages of a window
that attention has left behind are given back, and the null page stands in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ucm_core.coordinator.coverage import coverage
from ucm_core.spec.table import SpecRow, SpecTable
from ucm_core.testing.engine.pages import PagePool
from ucm_core.testing.engine.request import Request
from ucm_core.testing.engine.work import Work

__all__ = ["BlockTables", "Pages"]

Pages = Mapping[str, Sequence[int]]
"""By group (the row's name) page numbers; the null page may be among them."""


class BlockTables:
    """Takes and frees pages of requests, all groups of one request at once. For one thread."""

    def __init__(self, table: SpecTable, *, pages: int, page_tokens: Mapping[str, int]) -> None:
        """``pages`` per group, the null page included; ``page_tokens`` by chain row, of all ranks."""
        self.table = table
        self.page_tokens = page_tokens
        self.pools = {row.name: PagePool(pages) for row in (*table.chain_rows, *table.snapshot_rows)}
        """Who has which page, by group."""

    @property
    def held_count(self) -> int:
        """Pages that requests hold, or copies still need."""
        return sum(pool.held_count for pool in self.pools.values())

    def resume(self, request: Request, at: int) -> bool:
        """Take the pages of ``[0, at)``, null pages before a window; False: there are not enough."""
        wanted = {row.name: self._needed(row, at) for row in self.table.chain_rows}
        wanted |= {row.name: [True] * (at > 0) for row in self.table.snapshot_rows}
        taken = self._take({group: sum(needed) for group, needed in wanted.items()})
        if taken is None:
            return False
        for row in self.table.chain_rows:
            left = iter(taken[row.name])
            request.tables[row.name] = [next(left) if needed else 0 for needed in wanted[row.name]]
        request.state_pages = {row.name: taken[row.name][0] for row in self.table.snapshot_rows if at}
        return True

    def grow(self, request: Request, end: int, *, states: int) -> Pages | None:
        """Take the pages of tokens up to ``end`` and of ``states`` states, returned; None: not enough."""
        missing = {
            row.name: max(0, -(-end // self.page_tokens[row.name]) - len(request.tables[row.name]))
            for row in self.table.chain_rows
        }
        taken = self._take(missing | {row.name: states for row in self.table.snapshot_rows})
        if taken is None:
            return None
        for row in self.table.chain_rows:
            request.tables[row.name] += taken[row.name]
        return {row.name: taken[row.name] for row in self.table.snapshot_rows}

    def leave_behind(self, request: Request) -> Pages:
        """Take away the saved pages that no later token looks back into; null pages replace them."""
        left: dict[str, list[int]] = {}
        for row in self.table.chain_rows:
            if row.window is None:
                continue
            first = max(0, request.computed - (row.window - 1 + row.extra))
            kept_from = min(first, request.saved[row.name] * row.block_tokens)
            pages = request.tables[row.name]
            count = kept_from // self.page_tokens[row.name]
            left[row.name] = pages[:count]
            pages[:count] = [0] * count
        return left

    def turn(self, request: Request, work: Work, accepted: int) -> Pages:
        """Go on from the state after ``accepted`` drafts; the pages of the other ones, and of the last."""
        left: dict[str, list[int]] = {}
        for row, pages in work.states_to.items():
            left[row] = [page for place, page in enumerate(pages) if place != accepted]
            left[row] += [request.state_pages[row]] if row in request.state_pages else []
            request.state_pages[row] = pages[accepted]
        return left

    def all_of(self, request: Request) -> Pages:
        """Every page that ``request`` holds."""
        held = {group: list(pages) for group, pages in request.tables.items()}
        return held | {group: [page] for group, page in request.state_pages.items()}

    def give_back(self, pages: Mapping[str, Iterable[int]]) -> None:
        """Free pages of any groups."""
        for group, numbers in pages.items():
            self.pools[group].give_back(numbers)

    def of_rows(self, request: Request) -> dict[str, Sequence[int]]:
        """The pages of every chain row and follower."""
        tables: dict[str, Sequence[int]] = {name: tuple(pages) for name, pages in request.tables.items()}
        return tables | {row.name: tables[row.follows or ""] for row in self.table.follower_rows}

    def _needed(self, row: SpecRow, at: int) -> list[bool]:
        """Which pages of ``[0, at)`` a request needs that resumes there."""
        blocks, size = coverage(row, at), self.page_tokens[row.name]
        pages = -(-at // size)
        return [blocks.start <= page * size // row.block_tokens < blocks.stop for page in range(pages)]

    def _take(self, wanted: Mapping[str, int]) -> Pages | None:
        if any(self.pools[group].free_count < count for group, count in wanted.items()):
            return None
        return {group: self.pools[group].take(count) or [] for group, count in wanted.items()}
