"""SGLang's storage backend at its real radix tree: host pools, storage threads, for tests of either seam."""

import atexit
import json
from array import array

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from tree_world import PAGES, PoolTree, until

from ucm_sglang.connector import UCMHiCache


class TreeBackend(UCMHiCache):
    """As SGLang loads it by name, of a model that has no checkpoint."""

    started = None

    def __init__(self, storage_config, kwargs):
        super().__init__(storage_config, kwargs, start=lambda _: type(self).started)


class HostTree(PoolTree):
    """A tree behind SGLang's host cache, attached to the root of `TreeBackend.started`."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self._attach()

    def _attach(self):
        extra = {"backend_name": "ucm", "module_path": __name__, "class_name": "TreeBackend"}
        arguments = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct" if self.cfg.has_mamba else "layer_first",
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(
                extra | {"interface_v1": 1, "prefetch_threshold": 1}
            ),
        )
        arguments._mamba_cache_chunk_size = max(64, self.cfg.page_size)
        set_global_server_args_for_scheduler(arguments)
        self.cache.init_hicache(arguments, self.cache.cache_init_params)
        atexit.unregister(self.cache.shutdown)
        self.cache.write_through_threshold, self.cache.load_back_threshold = 1 << 30, 0
        controller = self.cache.cache_controller
        controller.prefetch_capacity_limit = max(
            controller.prefetch_capacity_limit, controller.mem_pool_host.size
        )

    def store(self):
        """Back everything up, to the host and to the storage."""
        self._backup_tree(self.cache)
        match = fixtures.match_prefix(self.cache, self.tokens)
        for node in self._path_chain(self.cache, match.last_device_node):
            self.cache.write_backup_storage(node)
        until(lambda: self.cache.drain_storage_control_queues() or not self.cache.ongoing_backup)

    def prefetch(self):
        """How many tokens of the prompt the host has after a prefetch."""
        handle = CacheRequestHandle("r1", 0)
        self.cache.prefetch_from_storage(handle, self.cache.root_node_handle(), array("q", self.tokens))
        until(lambda: self.cache.check_hicache_events() or self.cache.check_prefetch_progress(handle))
        match = fixtures.match_prefix(self.cache, self.tokens)
        return match, match.host_hit_length

    def restorable(self):
        """How many tokens of the prompt could be restored."""
        return self.prefetch()[1]

    def resume(self):
        """Bring the prompt from the storage to the device; the bytes that came."""
        match, tokens = self.prefetch()
        assert tokens == PAGES * self.cfg.page_size
        assert self.cache.load_back(
            match.last_host_node or match.best_match_node, req=self._make_req(self.requests)
        )
        self.cache.ready_to_load_host_cache()
        self.cache.loading_check()
        return self.held()

    def close(self):
        if self.cache.cache_controller.enable_storage:
            self.cache.cache_controller.detach_storage_backend()
