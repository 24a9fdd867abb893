"""`UCMLinker`: the external cache of SGLang's unified radix tree, without a host cache in between.

SGLang's scheduler thread calls it. The tree asks which lengths of a prefix could be restored, has one of them
loaded to slots that it allocated, layer by layer while the forward computes, and offers each of its nodes to
be kept. A load that fails aborts its requests: what is promised lies in UCM's ring, verified and leased.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from ucm_core.errors import LayoutError, UcmError
from ucm_core.ops import border
from ucm_core.ops.border import guarded
from ucm_sglang.device_pools import device_pools
from ucm_sglang.layer_loads import LayerCounter, LoadBatch, failed_batch
from ucm_sglang.layer_saves import LayerSaves
from ucm_sglang.linked_pages import LinkedPages
from ucm_sglang.offloads import NOT_KEPT, Offloads
from ucm_sglang.page_cache import KV_POOL, Pages
from ucm_sglang.start import Start, start_of_linker
from ucm_sglang.step_hooks import listen
from ucm_sglang.transfers import pages_at, pool_name, trailing_pages

__all__ = ["UCMLinker"]

STATE_POOL = "mamba"
"""The pool that has one slot per key, not one per token."""

RESET_WAIT_S = 8.0
"""How long a reset waits for offloads under way."""


class UCMLinker(UnifiedCacheLinker):
    """The linker; its settings are ``linker_extra_config`` in ``--unified-cache-external-linker-config``.

    ``{"linker": "UCMLinker", "linker_module_path": "ucm_sglang", "linker_extra_config": {}}``, with
    ``--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic``.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Collection[ComponentType],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Raise ConfigError, SpecError or LayoutError for an engine, settings or pools that cannot work."""
        border.join_log("sglang", adapter="ucm_sglang")
        self.forward_stream = forward_stream
        self._page_tokens = int(params.page_size)
        pools = device_pools(params, states=ComponentType.MAMBA in components)
        self.pools = {PoolName(name): pool for name, pool in pools.items()}
        self.layer_done_counter = LayerCounter(pools[KV_POOL].start_layer)
        self._queued: dict[str, Sequence[Pages]] = {}
        self._offloads = Offloads()
        self._pages: LinkedPages | None = None
        self._layer_saves: LayerSaves | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._unhook: Callable[[], None] = lambda: None
        storage = storage_config_of(params, extra_config, model_name=server_args.model_path)
        start = self._start(storage, server_args)
        if start is not None:
            self._begin(start, pools)
        if STATE_POOL in pools:  # SGLang itself registers it with the pool of tokens only
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)

    # -- lookups

    @guarded("lookup", list)
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every length in pages, ascending, whose bytes lie verified in the ring, leased to this request."""
        by_pool = {pool_name(transfer.name): transfer for transfer in transfers}
        kv = by_pool.pop(KV_POOL, None)
        if self._pages is None or kv is None:
            return []
        asked = {pool: trailing_pages(transfer) for pool, transfer in by_pool.items()}
        return list(self._pages.lookup(rid, kv.keys or (), side_pools=asked))

    # -- loads: each ends finished, failed or cancelled

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load. False, and on every rank alike: one is queued, or the transfers make no sense."""
        if rid in self._queued:
            return False
        pages = self._pages_of(transfers)
        if not pages:
            self._release(rid)
            return False
        self._queued[rid] = pages
        return True

    def start_layer_wise_loading(self) -> int:
        """Begin everything that is queued; the batch's number for the counter, -1 where nothing is."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        return self.layer_done_counter.begin(self._batch(queued))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Whether all of the batch came; nothing is written to the device any more when this returns."""
        came = self._finish_loading(counter_index)
        if not came and self._layer_saves is not None:
            self._layer_saves.load_failed()
        return came

    def cancel_queued_load(self, rid: str) -> bool:
        """Whether a load of the request was queued, and never begins now."""
        cancelled = self._queued.pop(rid, None) is not None
        self._release(rid if cancelled else None)
        return cancelled

    # -- offloads: each that is accepted is told of once, in order

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Begin to keep all pools of a node. False, and on every rank alike: the transfers make no sense."""
        del session_id
        pages = self._pages_of(transfers)
        if not pages:
            return False
        for event in self.record_offload_ready():
            event.synchronize()
        self._offloads.begin(NOT_KEPT if self._pages is None else self._pages.offload(pages))
        return True

    def num_completed_offloads(self) -> int:
        """How many of the oldest offloads are over."""
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        """Whether all of the oldest offload was kept; StoreError where it is not over."""
        oldest = self._offloads.pop()
        return self._pages is not None and self._pages.is_kept(oldest)

    # -- the end

    def reset(self) -> None:
        """Forget what is queued, end what has begun: SGLang's memory is neither read nor written any more."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self.layer_done_counter.reset()
        self._offloads.reset(RESET_WAIT_S)

    @guarded("close", lambda: None)
    def close(self) -> None:
        """`reset`, and let saves under way reach the medium, in bounded time. Idempotent."""
        self._unsubscribe()
        self._unhook()
        self.reset()
        if self._pages is not None:
            self._pages.close()

    # -- private

    def _start(self, storage_config: HiCacheStorageConfig, server_args: Any) -> Start | None:
        """Read the engine."""
        return start_of_linker(storage_config, server_args)

    def _begin(self, start: Start, pools: Mapping[str, Any]) -> None:
        memory = start.memory_of(pools)
        pages = LinkedPages(
            start.open_cache(), start.model, view=start.view, lookup_budget_s=start.lookup_budget_s
        )
        try:
            pages.register(memory)
            if start.layerwise_save:
                self._layer_saves = LayerSaves(pages, self._page_tokens)
                self._unhook = listen(self._layer_saves)
        except UcmError:
            pages.close()
            raise
        self._pages = pages
        self._unsubscribe = start.weights.subscribe(self._weights_changed)
        if start.weights.overtaken():  # by an update before this linker was made
            self._weights_changed(not start.weights.stale())

    @guarded("finish_load", lambda: False)
    def _finish_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def _batch(self, queued: Mapping[str, Sequence[Pages]]) -> LoadBatch:
        try:
            return failed_batch() if self._pages is None else self._pages.begin_loads(queued)
        except Exception as error:  # noqa: BLE001 (the border: these loads failed, the forward goes on)
            border.failed("load", error)
            for rid in queued:
                self._release(rid)
            return failed_batch()

    def _pages_of(self, transfers: Sequence[PoolTransfer]) -> list[Pages]:
        """Where pages lie; empty, with a complaint, where the transfers make no sense."""
        try:
            _refuse_pools([pool_name(transfer.name) for transfer in transfers], known=self.pools)
            found = [_pages(transfer, self._page_tokens) for transfer in transfers]
        except Exception as error:  # noqa: BLE001 (the border: nobody else hears of what is wrong here)
            border.failed("transfers", error)
            return []
        return [pages for pages in found if pages is not None]

    def _release(self, rid: str | None) -> None:
        if self._pages is not None and rid is not None:
            self._pages.release(rid)

    def _weights_changed(self, flushed: bool = False) -> None:
        if self._pages is not None:
            self._pages.weights_changed(flushed=flushed)


def storage_config_of(
    params: Any, extra_config: Mapping[str, Any] | None, *, model_name: str
) -> HiCacheStorageConfig:
    """What SGLang would tell a storage backend of this rank.

    No rank writes for others here, so that ``is_mla_model`` says nothing.
    """
    parallel, group = get_parallel(), params.attn_tp_cache_group or params.tp_cache_group
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return HiCacheStorageConfig(
        tp_rank=torch.distributed.get_rank(group=group) if together else 0,
        tp_size=torch.distributed.get_world_size(group=group) if together else parallel.tp_size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=model_name,
        extra_config=dict(extra_config or {}),
        dcp_size=parallel.attn_dcp_size,
    )


def _refuse_pools(names: Sequence[str], *, known: Collection[PoolName]) -> None:
    """LayoutError for a pool that the engine does not have, and for one that is named twice.

    Of two transfers of one pool only one would be moved, and both would count as moved.
    """
    here = [pool_name(name) for name in known]
    wrong = [name for at, name in enumerate(names) if name not in here or name in names[:at]]
    if wrong:
        raise LayoutError(
            f"transfers of pools {', '.join(names)}: {wrong[0]!r} is there twice or none of {', '.join(here)}"
        )


def _pages(transfer: PoolTransfer, page_tokens: int) -> Pages | None:
    """The pages of a transfer, None: it has none; LayoutError unless it says where each of them lies."""
    pool, keys = pool_name(transfer.name), transfer.keys or ()
    need = len(keys) * (1 if pool == STATE_POOL else page_tokens)
    given = 0 if transfer.device_indices is None else len(transfer.device_indices)
    if given != need:
        raise LayoutError(f"pool {pool!r}: {len(keys)} pages need {need} device indices, SGLang gave {given}")
    return pages_at(pool, keys, indices=transfer.device_indices) if keys else None
