"""Pages between SGLang's host pools and the store: look up, load, save. No SGLang, no torch.

Calls come from three threads at once; how long one of them may wait for a medium: `ucm_sglang.moves`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.boundaries import prefix_blocks
from ucm_core.coordinator.presence import Mask
from ucm_core.spec.keys import Keys
from ucm_sglang.moves import Move
from ucm_sglang.page_cache import KV_POOL, PageCache, Pages, View
from ucm_sglang.restorable import NOTHING, Demand, Restorable, needed_pages

__all__ = ["PageBackend", "leading"]


class PageBackend(PageCache):
    """One cache behind SGLang's host pools."""

    def restorable(self, hashes: Sequence[str], side_pools: Mapping[str, int | None]) -> Restorable:
        """Every legal length of these pages, and a promise for a minute of what the deepest needs.

        ``side_pools``: which pools SGLang will read besides KV, and how many of the last pages of each; None:
        all of them. SpecError for a pool that is not registered.
        """
        view = self._open()
        if view is None or not hashes:
            return NOTHING
        demands = [view.demand(KV_POOL, None), *(view.demand(*asked) for asked in side_pools.items())]
        keys = view.keys_of((row for demand in demands for row in demand.rows), hashes)
        answer = self._survey(view.space.coordinator, demands, keys)
        if not self._is_current(view):
            return NOTHING
        for demand in demands if answer.pages else ():
            self._promise(view, demand, keys, end=hashes[: answer.pages])
        return answer

    def load(self, pages: Pages) -> Mask:
        """Bring pages to the host pool; True up to the first that did not come whole, ``bool[n]``."""
        view = self._open()
        if view is None or not pages.hashes:
            return _none(pages)
        moment = view.space.coordinator.moment
        with Move("load") as move:
            for row in view.rows(pages.pool):
                keys, target = view.keys(row, pages.hashes), view.blocks(row, pages)
                parents = self._parents(view, row, pages, keys=keys)
                ticket = view.space.stores[row].load(keys, target, parents=parents)
                move.begin(row, keys, ticket=ticket)
            move.wait()
        for row, keys in move.failed():
            view.space.coordinator.failed(row, keys, moment=moment)
        view.space.leases.release(_attempt(pages.pool, pages.hashes[-1]))
        return leading(move.kept()) if self._is_current(view) else _none(pages)

    def save(self, pages: Pages, *, durably: bool = False) -> Mask:
        """Keep pages of the host pool; where they are kept, ``bool[n]``. ``durably``: on the medium, too.

        The pool's memory is not read any more when this returns.
        """
        view = self._open()
        if view is None or not pages.hashes:
            return _none(pages)
        with Move("save") as move:
            for row in view.rows(pages.pool):
                keys, source = view.keys(row, pages.hashes), view.blocks(row, pages)
                parents = self._parents(view, row, pages, keys=keys)
                ticket = view.space.stores[row].save(keys, source, parents=parents)
                move.begin(row, keys, ticket=ticket)
            move.wait()
        for row, keys in move.stored():  # before anybody hears that it was kept, and asks for it
            view.space.coordinator.saved(row, keys)
        if durably and self._cache.config.disk_bytes != 0:  # else there is no medium to wait for
            return move.on_medium()
        return move.kept()

    # -- private

    def _promise(self, view: View, demand: Demand, keys: Mapping[str, Keys], *, end: Sequence[str]) -> None:
        """Keep in the ring, and mark as used, what a length of ``end`` pages needs of one pool."""
        promised = {}
        for row in demand.rows:
            needed = needed_pages(self._table, self._table.row(row), demand=demand)
            begin = 0 if needed is None else max(0, len(end) - needed)
            promised[row] = keys[row][begin : len(end)]
            view.space.stores[row].touch(promised[row])
        view.space.leases.take(_attempt(demand.pool, end[-1]), promised)


def leading(came: Mask) -> Mask:
    """Only what comes before the first False.

    >>> leading(np.array([True, False, True])).tolist()
    [True, False, False]
    """
    kept: Mask = np.arange(len(came)) < prefix_blocks(came)
    return kept


def _none(pages: Pages) -> Mask:
    return np.zeros(len(pages.hashes), dtype=np.bool_)


def _attempt(pool: str, last_hash: str) -> Attempt:
    """Whose lease it is: nobody tells us for which request a page is asked about."""
    return Attempt(f"{pool}:{last_hash}")
