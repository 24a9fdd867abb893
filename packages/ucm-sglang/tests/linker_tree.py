"""SGLang's real radix tree with `UCMLinker`, as its registry attaches one."""

from __future__ import annotations

from array import array
from typing import Any

from tree_world import FULL, MAMBA, PAGES, SWA, PoolTree, until  # isort: skip (its doubles come first)
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.server_args import ServerArgs

from ucm_sglang.linker import UCMLinker


class TreeLinker(UCMLinker):
    """As SGLang loads it by name, of a model that has no checkpoint."""

    started: Any = None

    def _start(self, storage_config, server_args):
        return type(self).started


class LinkedTree(PoolTree):
    """A tree without a host cache, over the root of `TreeLinker.started`."""

    def __init__(self, cfg):
        super().__init__(cfg)
        params = self.cache.cache_init_params
        arguments = ServerArgs(model_path="dummy", page_size=cfg.page_size)
        self.linker = TreeLinker(
            arguments, params, components=set(self.cache.components), extra_config={}, forward_stream=None
        )
        self.cache.init_cache_linker(self.linker)
        self.kv.register_layer_transfer_counter(self.linker.layer_done_counter)

    def settle(self):
        """As the scheduler does in each of its steps, until all that was offered is over."""
        until(lambda: self.cache.check_hicache_events() or not self.cache.linker.pending_offloads)

    def store(self):
        """Everything was offered when it was inserted."""
        self.settle()

    def match(self, tokens=None, *, name="r0"):
        """A request for the prompt, and how much of it could be restored."""
        request = self._make_req(self.requests)
        request.rid = name
        key = RadixKey(array("q", tokens or self.tokens))
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        self._apply_match_to_req(request, match)
        return request

    def queue(self, request):
        """Queue what was found for a request; how many tokens."""
        count, _ = self.cache.init_load_back(
            InitLoadBackParams(request.best_match_node, request.host_hit_length, req=request)
        )
        return count

    def forward(self):
        """Begin what is queued, and read every layer as a forward does; the bytes of each component."""
        index = self.cache.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        return index

    def landed(self, request):
        """What lies where a request's load went to, per component; a window only its last page."""
        tail = self.cache.linker.private_load_indices[request.rid]
        slots = {FULL: tail}
        if self.cfg.has_swa:
            slots[SWA] = self.allocator.full_to_swa_index_mapping[tail[-self.cfg.page_size :]]
        if self.cfg.has_mamba:
            slots[MAMBA] = request.kv.mamba_pool_idx.unsqueeze(0)
        return {
            component: [buffer[slots[component]].clone() for buffer in buffers]
            for component, buffers in self.buffers().items()
        }

    def restorable(self):
        """How many tokens of the prompt could be restored."""
        return self.match().host_hit_length

    def resume(self):
        """Load the prompt to an empty tree; the bytes that came."""
        request = self.match()
        assert request.host_hit_length == PAGES * self.cfg.page_size
        assert self.queue(request) == request.host_hit_length
        self.forward()
        for layer in range(self.cfg.num_layers):
            self.linker.layer_done_counter.wait_until(layer)
        found = self.landed(request)
        assert self.cache.finish_external_linker_loads([request]) == []
        return found

    def close(self):
        self.cache.linker.close()
