"""Pages between SGLang's device pools and the store: look up, load layer by layer, save. No SGLang, no torch.

A load that fails aborts its requests, so only what a load cannot fail for want of is promised: bytes that lie
in the ring, verified, and stay there under the request's lease. What only files hold is read into the ring
while a lookup waits, a bounded time; the rest of it goes on, so that a repeated lookup finds more. SGLang's
scheduler itself never asks a medium: one that does not answer makes lookups misses, not the engine hang.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.coordinator import needs_parents
from ucm_core.coordinator.leases import Lease
from ucm_core.coordinator.presence import Mask
from ucm_core.engine_cache import EngineCache
from ucm_core.flow.copy import EngineBlocks
from ucm_core.flow.handles import UnitLoad, UnitSave
from ucm_core.flow.layers import LayerShards
from ucm_core.flow.step import StepLoad
from ucm_core.ops import border
from ucm_core.spec.keys import Keys, following
from ucm_core.spec.model import Model
from ucm_position_key import KeyView
from ucm_sglang.asker import ASK_S, Asker
from ucm_sglang.layer_loads import LOADS_WAIT_S, LinkedLoad, LoadBatch, plan_of
from ucm_sglang.layer_saves import NOT_BEGUN, NOT_SAVED, LinkedSave
from ucm_sglang.offloads import NOT_KEPT, OFFLOAD_WAIT_S, Offload
from ucm_sglang.page_cache import KV_POOL, PageCache, Pages, PoolMemory, View, keys_before
from ucm_sglang.restorable import Demand, Restorable, needed_pages, restorable
from ucm_sglang.settings import LOOKUP_BUDGET_S

__all__ = ["LinkedPages"]


class LinkedPages(PageCache):
    """One cache behind SGLang's device pools; for its scheduler thread."""

    def __init__(
        self,
        cache: EngineCache,
        model: Model,
        *,
        view: KeyView = KeyView.PLAIN,
        lookup_budget_s: float = LOOKUP_BUDGET_S,
        ask_s: float = ASK_S,
    ) -> None:
        super().__init__(cache, model, view=view)
        self._budget_s = lookup_budget_s
        self._asker: Asker[Restorable] = Asker(wait_s=ask_s)
        self._plan: tuple[LayerShards, ...] = ()
        self._whole: Sequence[str] = ()
        self._layers: Mapping[int, LayerShards] = {}

    def register(self, memory: PoolMemory) -> None:
        """Move pages of this memory from now on; SpecError where its pools do not fit the table."""
        super().register(memory)
        self._plan = plan_of(memory.held)
        rows = memory.rows(KV_POOL)
        whole = [row for row in memory.held if row.name in rows and needs_parents(row)]
        self._whole = [row.name for row in whole]
        self._layers = {each.layer: each for each in plan_of(whole)}

    def lookup(
        self, request: str, hashes: Sequence[str], *, side_pools: Mapping[str, int | None]
    ) -> tuple[int, ...]:
        """Every legal length of these pages, ascending, all of whose bytes are leased to ``request``.

        ``side_pools``: which pools SGLang will read besides KV, and how many of the last pages of each; None:
        all of them. Ranks intersect their answers, so no length may depend on a deeper one.
        """
        view = self._open()
        if view is None or not hashes:
            return ()
        demands = [view.demand(KV_POOL, None), *(view.demand(*asked) for asked in side_pools.items())]
        keys = view.keys_of((row for demand in demands for row in demand.rows), hashes)
        answer = self._asker.ask(lambda: self._survey(view.space.coordinator, demands, keys))
        if answer is None or not answer.pages:
            return ()
        answer = self._leased(view, Attempt(request), demands, keys=keys, there=answer)
        if not answer.pages or not self._is_current(view):
            view.space.leases.release(Attempt(request))
            return ()
        return answer.lengths

    def begin_loads(self, requests: Mapping[str, Sequence[Pages]]) -> LoadBatch:
        """Begin the loads of one batch: by request, what of each pool goes where."""
        view = self._open()
        loads = [None if view is None else self._begun(view, *request) for request in requests.items()]
        for request, load in zip(requests, loads, strict=True):
            if load is None:
                self.release(request)
        return LoadBatch(loads, self._plan, is_current=self._is_current, wait_s=LOADS_WAIT_S)

    def release(self, request: str) -> None:
        """Nothing is loaded for ``request``."""
        cache = self._cache.current
        if cache is not None:
            cache.release(Attempt(request))

    def offload(self, pools: Sequence[Pages]) -> Offload:
        """Begin to keep all of one node; its memory is read until the offload is done."""
        view = self._open()
        if view is None:
            return NOT_KEPT
        rows = {}
        try:
            for pages in pools:
                for row in view.rows(pages.pool):
                    keys, source = view.keys(row, pages.hashes), view.blocks(row, pages)
                    parents = self._parents(view, row, pages, keys=keys)
                    store = view.space.stores[row]
                    rows[row] = keys, store.save(keys, source, gather_inline=False, parents=parents)
        except Exception as error:  # noqa: BLE001 (the border: what has begun must end before SGLang hears of it)
            border.failed("offload", error)
            return Offload(view, rows, whole=False, ends_s=0.0)
        return Offload(view, rows, whole=True, ends_s=time.monotonic() + OFFLOAD_WAIT_S)

    @property
    def layers(self) -> Mapping[int, LayerShards]:
        """By layer what `begin_save` keeps of it: no windows, and nothing outside of the pool of KV."""
        return self._layers

    def begin_save(self, requests: Sequence[Pages]) -> LinkedSave:
        """Begin to keep pages of KV that a step of these requests computes, layer by layer.

        They are computed because nothing had them, so the medium is not asked.
        """
        view = self._open()
        if view is None:
            return NOT_SAVED
        keys: dict[str, Keys] = {}
        handles: dict[str, UnitSave] = {}
        try:
            for row in self._whole:
                keys[row], source, parents = _joined(view, row, requests)
                store = view.space.stores[row]
                handles[row] = store.begin_save(keys[row], source, parents=parents, absent=True)
        except Exception as error:  # noqa: BLE001 (the border: this is not saved, the forward goes on)
            border.failed("save", error)
            LinkedSave(view, handles=handles, keys=keys).give_up()
            return NOT_BEGUN
        return LinkedSave(view, handles=handles, keys=keys)

    def is_current(self, view: View | None) -> bool:
        """Whether a view is of the weights that SGLang computes with."""
        return view is not None and self._is_current(view)

    def is_kept(self, offload: Offload) -> bool:
        """Whether all of an offload that is over was kept, under weights that are still SGLang's."""
        kept = offload.judge()
        return kept and offload.view is not None and self._is_current(offload.view)

    def close(self) -> None:
        """As `PageCache.close`."""
        self._asker.close()
        super().close()

    # -- private

    def _leased(
        self,
        view: View,
        attempt: Attempt,
        demands: Sequence[Demand],
        *,
        keys: Mapping[str, Keys],
        there: Restorable,
    ) -> Restorable:
        """What of the lengths that are ``there`` lies in the ring, kept there for ``attempt``."""
        needed = {row: self._needed(row, demand, there) for demand in demands for row in demand.rows}
        wanted = {row: _those(keys[row][: len(mask)], mask) for row, mask in needed.items()}
        lease = view.space.leases.take(attempt, wanted)
        if any(not _kept(lease, row, part).all() for row, part in wanted.items()):
            self._bring(view, keys, needed)
            lease = view.space.leases.take(attempt, wanted)
        found, whole = {}, True
        for row, mask in needed.items():
            kept = _kept(lease, row, wanted[row])
            view.space.stores[row].touch(_those(wanted[row], kept))
            found[row], whole = mask.copy(), whole and bool(kept.all())
            found[row][mask] = kept
        return there if whole else restorable(self._table, demands, found=found, pages=there.pages)

    def _needed(self, row: str, demand: Demand, there: Restorable) -> Mask:
        """Which pages any of the lengths needs of a row, ``bool[pages]``."""
        trailing = needed_pages(self._table, self._table.row(row), demand=demand)
        if trailing is None:
            return np.ones(there.pages, dtype=np.bool_)
        steps = np.zeros(there.pages + 1, dtype=np.int64)
        ends = np.asarray(there.lengths, dtype=np.int64)
        np.add.at(steps, np.maximum(ends - trailing, 0), 1)
        np.add.at(steps, ends, -1)
        mask: Mask = np.cumsum(steps)[:-1] > 0
        return mask

    def _bring(self, view: View, keys: Mapping[str, Keys], needed: Mapping[str, Mask]) -> None:
        """Read what is ``needed`` into the ring, and wait for it as long as a lookup may."""
        deadline_s = time.monotonic() + self._budget_s
        tickets = []
        for row, mask in needed.items():
            wanted = np.flatnonzero(mask)[: view.space.stores[row].slots]
            parents = following(keys[row])[wanted] if needs_parents(self._table.row(row)) else None
            tickets.append(view.space.stores[row].prefetch(keys[row][wanted], parents=parents))
        for ticket in tickets:
            ticket.wait(max(0.0, deadline_s - time.monotonic()))

    def _begun(self, view: View, request: str, pools: Sequence[Pages]) -> LinkedLoad | None:
        """Begin what one request loads; None, with nothing of it going on, where not all could begin."""
        keys: dict[str, Keys] = {}
        handles: dict[str, UnitLoad] = {}
        moment = view.space.coordinator.moment
        try:
            for pages in pools:
                for row in view.rows(pages.pool):
                    keys[row], target = view.keys(row, pages.hashes), view.blocks(row, pages)
                    parents = self._parents(view, row, pages, keys=keys[row])
                    handles[row] = view.space.stores[row].begin_load(keys[row], target, parents=parents)
        except Exception as error:  # noqa: BLE001 (the border: this load failed, the others go on)
            border.failed("load", error)
            for handle in handles.values():
                handle.cancel()
                handle.ticket.wait()
            return None
        return LinkedLoad(StepLoad(request, handles), keys, view, moment)


def _joined(view: View, row: str, requests: Sequence[Pages]) -> tuple[Keys, EngineBlocks, Keys]:
    """Pages of several requests as one save of a row: keys, memory, and the key before each."""
    keys = [view.keys(row, pages.hashes) for pages in requests]
    pairs = zip(requests, keys, strict=True)
    parents = [keys_before(view, row, pages=pages, keys=each) for pages, each in pairs]
    hashes = [text for pages in requests for text in pages.hashes]
    indices = np.concatenate([pages.indices for pages in requests])
    source = view.blocks(row, Pages(KV_POOL, hashes, indices))
    return np.concatenate(keys), source, np.concatenate(parents)


def _those(keys: Keys, mask: Mask) -> Keys:
    """The keys that the mask has; no copy where that is all of them."""
    return keys if mask.all() else keys[mask]


def _kept(lease: Lease, row: str, keys: Keys) -> Mask:
    """Which of ``keys`` (``uint8[n, 32]``) the lease keeps, ``bool[n]``."""
    pins = lease.pins.get(row)
    if pins is None:
        return np.zeros(len(keys), dtype=np.bool_)
    if len(pins.keys) == len(keys):
        return np.ones(len(keys), dtype=np.bool_)
    kept = set(map(bytes, pins.keys))
    return np.fromiter((bytes(key) in kept for key in keys), np.bool_, len(keys))
