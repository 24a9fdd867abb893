"""What both seams of SGLang have in common: pages by their hashes, in the cache of one generation at a time.

Each call takes one `View` first: keys, stores and books of one generation. So a change of weights in the
midst of a call leaves it in the old generation, in which loads fail and what is saved is found by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

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
from ucm_core.spec.rows import SpecRow
from ucm_position_key import Component, KeyView, Pool, PoolTable, digests_of
from ucm_sglang.restorable import Demand, Restorable, needed_pages, restorable

__all__ = ["KV_POOL", "PageCache", "Pages", "PoolMemory", "View"]

KV_POOL = "kv"
"""The pool that every length needs whole."""

_FIRST_PAGES = 128
_GROWTH = 8

Int64s = npt.NDArray[np.int64]


class PoolMemory(Protocol):
    """SGLang's pools (`ucm_sglang.layout_from_engine.MappedPools`)."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Which rows each pool holds."""

    @property
    def held(self) -> tuple[SpecRow, ...]:
        """The rows with the layers and heads that this rank has of them."""

    def rows(self, pool_name: str) -> tuple[str, ...]:
        """The rows of a pool that have layers on this rank."""

    def blocks(self, pool_name: str, row_name: str, *, indices: Int64s) -> EngineBlocks:
        """The memory of pages: object ``i`` is the ``i``-th page of the indices, of a state one entry."""


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Pages of one pool, and where they lie in it."""

    pool: str
    """The pool's name."""
    hashes: Sequence[str]
    """One per page."""
    indices: Int64s
    """``int64[pages * entries]``: indices into the pool, page after page."""
    before: str | None = None
    """Hash of the page before the first, where it is known."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What one call sees of the cache: all of one generation."""

    space: Space
    """Stores and books."""
    pools: PoolTable
    """Keys, and which pool holds which rows."""
    memory: PoolMemory
    """Where the pools' pages lie."""

    def keys(self, row: str, hashes: Sequence[str]) -> Keys:
        """Keys of a row's objects that end where the pages do, ``uint8[n, 32]``."""
        return self.keys_of([row], hashes)[row]

    def keys_of(self, rows: Iterable[str], hashes: Sequence[str]) -> dict[str, Keys]:
        """`keys` of each of several rows."""
        digests = digests_of(hashes)
        return {row: self.pools.keys(row, digests) for row in rows}

    def blocks(self, row: str, pages: Pages) -> EngineBlocks:
        """Where the pages lie; LayoutError where there are not as many indices as the hashes need."""
        state = self.pools.pool(pages.pool).component is Component.MAMBA
        need = len(pages.hashes) * (1 if state else self.pools.table.grain_tokens)
        if len(pages.indices) != need:  # a page without memory would count as loaded
            raise LayoutError(
                f"pool {pages.pool!r}: {len(pages.hashes)} pages need {need} indices,"
                f" SGLang gave {len(pages.indices)}"
            )
        return self.memory.blocks(pages.pool, row, indices=pages.indices)

    def demand(self, pool: str, trailing_pages: int | None) -> Demand:
        """What SGLang will read of a pool; SpecError for one that is not registered."""
        return Demand(pool, self.rows(pool), trailing_pages)

    def rows(self, pool: str) -> tuple[str, ...]:
        """What this rank has of a pool; SpecError for one that is not registered."""
        return self.memory.rows(self.pools.pool(pool).name)


class PageCache:
    """One cache of SGLang's pages. Thread-safe; what a medium does is a miss, never an error."""

    def __init__(self, cache: EngineCache, model: Model, *, view: KeyView = KeyView.PLAIN) -> None:
        self._cache, self._model, self._key_view = cache, model, view
        self._table = model.table
        self._memory: PoolMemory | None = None
        self._view: View | None = None
        self._stale = False

    # -- once

    def register(self, memory: PoolMemory) -> None:
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

    # -- for the seams

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

    def _parents(self, view: View, row: str, pages: Pages, *, keys: Keys) -> Keys | None:
        """The page before each, as far as it is known, so that the ring gives up the tail first."""
        return keys_before(view, row, pages=pages, keys=keys) if needs_parents(self._table.row(row)) else None


def keys_before(view: View, row: str, *, pages: Pages, keys: Keys) -> Keys:
    """Keys of the page before each, zeros where it is not known; ``keys`` are those of the pages."""
    parents = following(keys)
    if pages.before is not None:
        parents[0] = view.keys(row, [pages.before])
    return parents


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
