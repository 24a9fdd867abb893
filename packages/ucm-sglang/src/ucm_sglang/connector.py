"""`UCMHiCache`: SGLang's storage backend behind its host cache. It decides nothing itself.

SGLang calls it from three threads: lookups, reads, backups. Each call goes through one border that turns
whatever fails into a miss. Only what cannot work raises, at the start or when the host pools are registered:
a setting, a model whose pools do not hold the table, a memory layout that cannot be read for certain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from ucm_core.coordinator.presence import Mask
from ucm_core.errors import ConfigError, LayoutError, UcmError
from ucm_core.ops import border
from ucm_core.ops.border import guarded
from ucm_sglang.page_backend import PageBackend
from ucm_sglang.page_cache import KV_POOL, Pages
from ucm_sglang.restorable import NOTHING, Restorable
from ucm_sglang.start import Start, start_of_engine
from ucm_sglang.transfers import pages_at, pool_name, trailing_pages

__all__ = ["UCMHiCache"]


class UCMHiCache(HiCacheStorage):
    """The storage backend; its settings are keys of ``--hicache-storage-backend-extra-config``.

    ``{"backend_name": "ucm", "module_path": "ucm_sglang", "class_name": "UCMHiCache", "interface_v1": 1}``,
    with ``--hicache-storage-backend dynamic``.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: Mapping[str, Any] | None = None,
        *,
        start: Callable[[HiCacheStorageConfig], Start | None] = start_of_engine,
    ) -> None:
        """Raise ConfigError or SpecError for an engine or settings that cannot work.

        ``kwargs`` is SGLang's and not used; ``start`` reads the engine.
        """
        del kwargs
        border.join_log("sglang", adapter="ucm_sglang")
        self._lock = threading.Lock()
        self._pools: dict[str, Any] = {}
        self._mapped = self._refused = False
        self._start = start(storage_config)
        self._pages: PageBackend | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        if self._start is not None:
            self._begin(self._start)

    # -- host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of keys and values, which SGLang registers once more by name."""
        super().register_mem_pool_host(mem_pool_host)
        self._add_pool(KV_POOL, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """One more pool; a late one, after `on_host_pools_registered`, is checked at once."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add_pool(pool_name(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Raise LayoutError or SpecError, naming the pool, where the pools do not hold the model's table."""
        try:
            with self._lock:
                self._map_pools()
        except UcmError:
            self.close()  # SGLang does not, after an attach that failed this late
            raise

    # -- lookups

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    @guarded("exists", lambda: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the first pages are there, with everything that this rank has of them."""
        del extra_info
        return self._restorable(keys, {}).pages

    @guarded("exists", lambda: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Every length at which all pools have what SGLang will read of them."""
        del extra_info
        names = {pool_name(transfer.name): transfer.name for transfer in pool_transfers or ()}
        asked = {pool_name(transfer.name): trailing_pages(transfer) for transfer in pool_transfers or ()}
        answer = self._restorable(keys, asked)
        deepest = {names.get(pool, PoolName.KV): pages for pool, pages in answer.deepest.items() if pages}
        return PoolTransferResult(answer.pages, deepest, list(answer.lengths))

    # -- pages

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Bring pages of keys and values: True up to the first that did not come."""
        return _flags(keys, self._load(KV_POOL, keys, host_indices, extra_info))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Keep pages of keys and values."""
        return _flags(keys, self._save(KV_POOL, keys, host_indices, extra_info))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        """Bring pages, or states, of other pools."""
        return self._each(self._load, transfers, extra_info)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        """Keep pages, or states, of other pools: on the medium, or reported as failed, when this returns.

        SGLang saves the keys and values that belong to them next.
        """
        return self._each(self._save, transfers, extra_info)

    # -- the route without interface_v1, which is refused at the start

    def get(self, *_: Any, **__: Any) -> None:
        """Nothing: pages come by `batch_get_v1`."""
        self._refuse_route()

    def batch_get(self, keys: list[str], *_: Any, **__: Any) -> list[None]:
        """Nothing, for each."""
        self._refuse_route()
        return [None] * len(keys)

    def set(self, *_: Any, **__: Any) -> bool:
        """False: pages are kept by `batch_set_v1`."""
        self._refuse_route()
        return False

    def batch_set(self, *_: Any, **__: Any) -> bool:
        """False."""
        self._refuse_route()
        return False

    # -- the operator

    @guarded("clear", lambda: None)
    def clear(self) -> None:
        """Find nothing of what was stored so far, here and wherever this model is served from now on."""
        if self._pages is not None:
            self._pages.clear()

    @guarded("close", lambda: None)
    def close(self) -> None:
        """Let saves under way reach the medium, in bounded time. Idempotent; every call is a miss then."""
        self._unsubscribe()
        if self._pages is not None:
            self._pages.close()

    # -- private

    def _begin(self, start: Start) -> None:
        self._pages = PageBackend(start.open_cache(), start.model, view=start.view)
        self._unsubscribe = start.weights.subscribe(self._weights_changed)
        if start.weights.overtaken():  # by an update before this backend was attached
            self._weights_changed(not start.weights.stale())

    def _restorable(self, keys: Sequence[str], asked: Mapping[str, int | None]) -> Restorable:
        pages = self._settled()
        return NOTHING if pages is None else pages.restorable(keys, asked)

    @guarded("load", lambda: None)
    def _load(self, pool: str, keys: Sequence[str], host_indices: Any, extra: Any) -> Mask | None:
        pages = self._settled()
        return None if pages is None else pages.load(_pages(pool, keys, host_indices, extra))

    @guarded("save", lambda: None)
    def _save(self, pool: str, keys: Sequence[str], host_indices: Any, extra: Any) -> Mask | None:
        pages, batch = self._settled(), _pages(pool, keys, host_indices, extra)
        return None if pages is None else pages.save(batch, durably=pool != KV_POOL)

    def _each(
        self, move: Callable[..., Mask | None], transfers: Sequence[PoolTransfer], extra: Any
    ) -> dict[Any, list[bool]]:
        return {
            transfer.name: _flags(
                transfer.keys or (),
                move(pool_name(transfer.name), transfer.keys or (), transfer.host_indices, extra),
            )
            for transfer in transfers
        }

    def _add_pool(self, name: str, pool: Any) -> None:
        with self._lock:
            if self._pools.setdefault(name, pool) is not pool:
                raise LayoutError(f"pool {name!r} was registered with other memory before; attach anew")
            if self._mapped:
                self._map_pools()

    def _map_pools(self) -> None:
        """Check what is registered against the table; under the lock."""
        if self._pages is not None and self._start is not None:
            self._pages.register(self._start.memory_of(self._pools))
        self._mapped = True

    def _settled(self) -> PageBackend | None:
        """Where SGLang does not say when all pools are there (before 0.5.23), they are at the first call."""
        begun = self._start
        if begun is None or begun.registers_pools or self._mapped or self._refused:
            return self._pages
        with self._lock:
            try:
                self._map_pools()
            except UcmError as error:
                self._refused = True
                border.failed("register", error)
        return self._pages

    def _weights_changed(self, flushed: bool = False) -> None:
        if self._pages is not None:
            self._pages.weights_changed(flushed=flushed)

    def _refuse_route(self) -> None:
        border.failed("interface_v1", ConfigError("SGLang moves pages as tensors, which UCM does not"))


def _pages(pool: str, keys: Sequence[str], host_indices: Any, extra: Any) -> Pages:
    before = getattr(extra, "prefix_keys", None)
    return pages_at(pool, keys, indices=host_indices, before=before[-1] if before else None)


def _flags(keys: Sequence[str], done: Mask | None) -> list[bool]:
    return [False] * len(keys) if done is None else done.tolist()
