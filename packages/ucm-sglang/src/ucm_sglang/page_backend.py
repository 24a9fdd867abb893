"""Pages between SGLang's host pools and the store: look up, load, save. No SGLang, no torch.

Calls come from three threads at once. Each of them takes one `View` first: keys, stores and books of one
generation. So a change of weights in the midst of a call leaves it in the old generation, in which loads fail
and what is saved is found by nobody.

How long a call may wait for a medium: `ucm_sglang.moves`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.boundaries import prefix_blocks
from ucm_core.coordinator.coordinator import Coordinator, needs_parents
from ucm_core.coordinator.presence import Mask
from ucm_core.engine_cache import EngineCache
from ucm_core.errors import LayoutError
from ucm_core.flow.copy import EngineBlocks
from ucm_core.ops import border
from ucm_core.spaces import Space
from ucm_core.spec.keys import Keys, following
from ucm_core.spec.model import Model
from ucm_position_key import Component, KeyView, Pool, PoolTable, digests_of
from ucm_sglang.moves import Move
from ucm_sglang.restorable import NOTHING, Demand, Restorable, needed_pages, restorable

__all__ = ["KV_POOL", "HostMemory", "PageBackend", "Pages", "View", "leading"]

KV_POOL = "kv"
"""The pool that every length needs whole."""

_FIRST_PAGES = 128
_GROWTH = 8

Int64s = npt.NDArray[np.int64]


class HostMemory(Protocol):
    """The host pools that SGLang registered (`ucm_sglang.layout_from_engine.HostPools`)."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Which rows each pool holds."""

    def rows(self, pool_name: str) -> tuple[str, ...]:
        """The rows of a pool that have layers on this rank."""

    def blocks(self, pool_name: str, row_name: str, *, host_indices: Int64s) -> EngineBlocks:
        """The memory of pages: object ``i`` is the ``i``-th page of the indices, of a state one entry."""


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Pages of one pool, and where they lie in it."""

    pool: str
    """The pool's name."""
    hashes: Sequence[str]
    """One per page."""
    indices: Int64s
    """``int64[pages * entries]``: host indices, page after page."""
    before: str | None = None
    """Hash of the page before the first, where it is known."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What one call sees of the cache: all of one generation."""

    space: Space
    """Stores and books."""
    pools: PoolTable
    """Keys, and which pool holds which rows."""
    memory: HostMemory
    """Where the pools' pages lie."""

    def keys(self, row: str, hashes: Sequence[str]) -> Keys:
        """Keys of a row's objects that end where the pages do, ``uint8[n, 32]``."""
        return self.pools.keys(row, digests_of(hashes))

    def blocks(self, row: str, pages: Pages) -> EngineBlocks:
        """Where the pages lie; LayoutError where there are not as many indices as the hashes need."""
        state = self.pools.pool(pages.pool).component is Component.MAMBA
        need = len(pages.hashes) * (1 if state else self.pools.table.grain_tokens)
        if len(pages.indices) != need:  # a page without memory would count as loaded
            raise LayoutError(
                f"pool {pages.pool!r}: {len(pages.hashes)} pages need {need} host indices,"
                f" SGLang gave {len(pages.indices)}"
            )
        return self.memory.blocks(pages.pool, row, host_indices=pages.indices)

    def demand(self, pool: str, trailing_pages: int | None) -> Demand:
        """What SGLang will read of a pool; SpecError for one that is not registered."""
        return Demand(pool, self.rows(pool), trailing_pages)

    def rows(self, pool: str) -> tuple[str, ...]:
        """What this rank has of a pool; SpecError for one that is not registered."""
        return self.memory.rows(self.pools.pool(pool).name)


class PageBackend:
    """One cache behind SGLang's host pools. Thread-safe; what a medium does is a miss, never an error."""

    def __init__(self, cache: EngineCache, model: Model, *, view: KeyView = KeyView.PLAIN) -> None:
        self._cache, self._model, self._key_view = cache, model, view
        self._table = model.table
        self._memory: HostMemory | None = None
        self._view: View | None = None
        self._stale = False

    # -- once

    def register(self, memory: HostMemory) -> None:
        """Move pages of this memory from now on; SpecError where its pools do not fit the table."""
        anybody = replace(self._model.identity, weights="00" * 32)  # the weights may not be known yet
        pools = PoolTable(self._table, memory.pools, model=anybody, view=self._key_view)
        pools.check_page(self._table.grain_tokens)
        self._memory = memory

    def weights_changed(self, *, flushed: bool) -> None:
        """Find nothing of before. Not ``flushed``: SGLang still holds pages of the old weights.

        It may save those at any time, under hashes that do not tell; so nothing is found or saved until it is
        flushed.
        """
        self._stale = True
        self._cache.weights_changed()
        self._stale = not flushed
        if not flushed:
            border.complaints.say(
                "stale", "the weights changed and SGLang was not flushed: nothing is cached until it is"
            )

    def clear(self) -> None:
        """Find nothing of what was stored so far; StoreError where others could not be told."""
        cache = self._cache.current
        if cache is not None:
            cache.reset()

    def close(self) -> None:
        """Let saves under way reach the medium, in bounded time. Idempotent; all calls are misses then."""
        self._cache.close()

    # -- at any time, on any thread

    def restorable(self, hashes: Sequence[str], side_pools: Mapping[str, int | None]) -> Restorable:
        """Every legal length of these pages, and a promise for a minute of what the deepest needs.

        ``side_pools``: which pools SGLang will read besides KV, and how many of the last pages of each; None:
        all of them. SpecError for a pool that is not registered.
        """
        view = self._open()
        if view is None or not hashes:
            return NOTHING
        demands = [view.demand(KV_POOL, None), *(view.demand(*asked) for asked in side_pools.items())]
        keys = {row: view.keys(row, hashes) for demand in demands for row in demand.rows}
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

    def _open(self) -> View | None:
        """What a call may use; None: it is a miss."""
        cache, memory, seen = self._cache.current, self._memory, self._view
        if cache is None or memory is None or self._stale:
            return None
        space = cache.space
        if seen is None or seen.space is not space or seen.memory is not memory:
            pools = PoolTable(self._table, memory.pools, model=space.identity, view=self._key_view)
            seen = self._view = View(space, pools, memory)
        return seen

    def _is_current(self, view: View) -> bool:
        """Whether what was found is still of the weights that SGLang computes with."""
        cache = self._cache.current
        return not self._stale and cache is not None and cache.space is view.space

    def _survey(
        self, coordinator: Coordinator, demands: Sequence[Demand], keys: Mapping[str, Keys]
    ) -> Restorable:
        """Ask the stores: for KV from the head to the first hole, for the rest no further than that."""
        found: dict[str, Mask] = {}
        pages = max((len(each) for each in keys.values()), default=0)
        for demand in demands:
            for row in demand.rows:
                whole = needed_pages(self._table, self._table.row(row), demand=demand) is None
                ask = _held_head if whole else _held
                found[row] = ask(partial(coordinator.held, row), keys[row][:pages])
                if demand.pool == KV_POOL:
                    pages = min(pages, prefix_blocks(found[row]))
        return restorable(self._table, demands, found=found, pages=pages)

    def _promise(self, view: View, demand: Demand, keys: Mapping[str, Keys], *, end: Sequence[str]) -> None:
        """Keep in the ring, and mark as used, what a length of ``end`` pages needs of one pool."""
        promised = {}
        for row in demand.rows:
            needed = needed_pages(self._table, self._table.row(row), demand=demand)
            begin = 0 if needed is None else max(0, len(end) - needed)
            promised[row] = keys[row][begin : len(end)]
            view.space.stores[row].touch(promised[row])
        view.space.leases.take(_attempt(demand.pool, end[-1]), promised)

    def _parents(self, view: View, row: str, pages: Pages, *, keys: Keys) -> Keys | None:
        """The page before each, as far as it is known, so that the ring gives up the tail first."""
        if not needs_parents(self._table.row(row)):
            return None
        parents = following(keys)
        if pages.before is not None:
            parents[0] = view.keys(row, [pages.before])
        return parents


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


def _held(ask: Callable[[Keys], Mask], keys: Keys) -> Mask:
    return ask(keys)


def _held_head(ask: Callable[[Keys], Mask], keys: Keys) -> Mask:
    """As `_held`, in growing steps that end at the first hole; what is behind it is not asked about."""
    found, begin, size = np.zeros(len(keys), dtype=np.bool_), 0, _FIRST_PAGES
    while begin < len(keys):
        end = min(begin + size, len(keys))
        found[begin:end] = ask(keys[begin:end])
        if not found[begin:end].all():
            break
        begin, size = end, size * _GROWTH
    return found
