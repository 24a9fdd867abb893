"""SGLang's pools and radix tree of a checkpoint, without its model, as a process of its own.

For a model that SGLang computes on a GPU only: what it keeps of it is real, from its arguments on. Pools
have the shapes and types that SGLang gives them, its own registry makes the tree and attaches UCM, behind a
host cache or as a linker. Nothing is computed: keys, values and states come from the parent and go to it.

| command | fields | answer |
| --- | --- | --- |
| attach | arguments of `sglang.Engine`, conv_dtype | error: text of the exception chain, or null |
| restorable | prompt | tokens of it that could be loaded |
| load | prompt, path | tokens that were loaded; what came is at the path |
| save | prompt, path | tokens that were saved: as many as there are at the path |

A path is that of a file of tensors, which are as SGLang's pools have them: `k` and `v` `[layer, token, head,
element]`, and of the state behind the last token `conv` `[layer, channel, input]` and `ssm` `[layer, head,
element, element of the state]`.
"""

import os
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from e2e.checkpoints.safetensors import read_tensors, write_tensors
from e2e.engine.commands import Json, answer_commands, refusal

SETTLE_LIMIT_S = 60.0
POOL_TOKENS = 2048
STATES = 16
REQUESTS = 8
ONE_RANK = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_tp_rank": 0, "attn_tp_size": 1}
ONE_RANK |= {"attn_cp_rank": 0, "attn_cp_size": 1, "attn_dcp_size": 1}

Arrays = Mapping[str, Any]


class Runner:
    """The commands; one tree at a time."""

    def __init__(self) -> None:
        self._tree: Tree | None = None

    def attach(self, command: Json) -> Json:
        """Leave the tree before, make an empty one; a refusal is an answer."""
        self.close()
        os.environ["SGLANG_MAMBA_CONV_DTYPE"] = command["conv_dtype"]
        os.environ.pop("SGLANG_MAMBA_SSM_DTYPE", None)  # which SGLang sets by an argument, for good
        try:
            self._tree = Tree(command["arguments"])
        except Exception as error:  # noqa: BLE001  (an answer to the parent, whatever it is)
            return refusal(error)
        return {"error": None}

    def restorable(self, command: Json) -> Json:
        """Ask as for a request that is then not served."""
        return {"tokens": self._attached.find(command["prompt"]).host_hit_length}

    def load(self, command: Json) -> Json:
        """Load as for a request, and write down what came."""
        tree = self._attached
        slots, state = tree.load(tree.find(command["prompt"]))
        write_tensors(Path(command["path"]), tree.read(slots, state), dtype="F32")
        return {"tokens": len(slots)}

    def save(self, command: Json) -> Json:
        """Insert what is at the path, as after a request, and wait until it is kept."""
        values = read_tensors(Path(command["path"]))
        return {"tokens": self._attached.save(command["prompt"], values)}

    def close(self) -> None:
        """Leave the tree."""
        if self._tree is not None:
            self._tree.close()
            self._tree = None

    @property
    def _attached(self) -> "Tree":
        assert self._tree is not None, "nothing is attached"
        return self._tree


class Tree:
    """A radix tree with the pools of a model, and UCM."""

    def __init__(self, arguments: Json) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

        server_args, model, config = _read(arguments)
        page, states = server_args.page_size, config.mamba2_cache_params
        self._requests = HybridReqToTokenPool(
            size=REQUESTS, mamba_size=STATES, mamba_spec_state_size=REQUESTS, max_context_len=POOL_TOKENS,
            device="cpu", enable_memory_saver=False, cache_params=states, mamba_layer_ids=states.layers,
            enable_mamba_extra_buffer=True,
        )  # fmt: skip
        self._kv = HybridLinearKVPool(
            size=POOL_TOKENS, dtype=model.dtype, page_size=page, head_num=model.get_num_kv_heads(1),
            head_dim=model.head_dim, full_attention_layer_ids=config.full_attention_layer_ids, device="cpu",
            enable_memory_saver=False, mamba_pool=self._requests.mamba_pool,
        )  # fmt: skip
        self._allocator = PagedTokenToKVPoolAllocator(
            POOL_TOKENS, page, dtype=model.dtype, device="cpu", kvcache=self._kv, need_sort=False
        )
        self._layers = model.num_hidden_layers
        self._names = (f"request {number}" for number in range(REQUESTS))
        self._cache = _tree_cache(server_args, model, requests=self._requests, allocator=self._allocator)

    def find(self, prompt: Json) -> Any:
        """A request that was matched with the tree and with what UCM has; it holds a slot for a state."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.sampling.sampling_params import SamplingParams

        request = Req(next(self._names), "", array("q"), SamplingParams(max_new_tokens=1))
        self._requests.alloc([request])
        if self._cache.linker is None:
            self._prefetch(request.rid, prompt)
        match = self._cache.match_prefix(MatchPrefixParams(key=_key(prompt), req=request))
        assert match.device_prefix_len == 0
        request.last_node, request.best_match_node = match.last_device_node, match.best_match_node
        request.host_hit_length = match.host_hit_length
        request.swa_host_hit_length = match.swa_host_hit_length
        request.mamba_host_hit_length = match.mamba_host_hit_length
        return request

    def load(self, request: Any) -> tuple[Any, Any]:
        """Load what was found for a request; the slots of its tokens, and that of its state."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        wanted = InitLoadBackParams(request.best_match_node, request.host_hit_length, req=request)
        count, node = self._cache.init_load_back(wanted)
        index = self._cache.ready_to_load_host_cache()
        if self._cache.linker is None:
            slots = self._cache.path_device_indices(node)
            self._cache.loading_check()
        else:
            slots = self._cache.linker.private_load_indices[request.rid]
            self._forward(index)
            assert self._cache.finish_external_linker_loads([request]) == []
        assert len(slots) == count
        return slots, request.kv.mamba_pool_idx

    def read(self, slots: Any, state: Any) -> Arrays:
        """What the pools have at these slots."""
        held = self._buffers()
        found = {name: [layer[slots].numpy() for layer in held[name]] for name in ("k", "v")}
        return {name: np.stack(layers) for name, layers in found.items()} | {
            name: held[name][:, state].float().numpy() for name in ("conv", "ssm")
        }

    def save(self, prompt: Json, values: Arrays) -> int:
        """Insert a prompt with these values, as far as there are any; returns when they are kept."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        held, count = self._buffers(), len(values["k"][0])
        slots, state = self._allocator.alloc(count), self._requests.mamba_allocator.alloc(1)
        for name in ("k", "v"):
            for layer, given in zip(held[name], values[name], strict=True):
                layer[slots] = torch.tensor(given)
        for name in ("conv", "ssm"):
            held[name][:, state[0]] = torch.tensor(values[name]).to(held[name].dtype)
        key = _key(prompt | {"tokens": prompt["tokens"][:count]})
        self._cache.insert(InsertParams(key=key, value=slots, mamba_value=state))
        self._settle()
        return count

    def close(self) -> None:
        """Let go of UCM, which brings what is saved to the files."""
        if self._cache.linker is not None:
            self._cache.linker.close()
        elif self._cache.cache_controller.enable_storage:
            self._cache.cache_controller.detach_storage_backend()

    def _buffers(self) -> Arrays:
        tokens, states = self._kv.full_kv_pool, self._requests.mamba_pool.mamba_cache
        (conv,) = states.conv
        return {"k": tokens.k_buffer, "v": tokens.v_buffer, "conv": conv, "ssm": states.temporal}

    def _prefetch(self, name: str, prompt: Json) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        cache, handle = self._cache, CacheRequestHandle(name, 0)
        tokens, root = array("q", prompt["tokens"]), cache.root_node_handle()
        cache.prefetch_from_storage(handle, root, tokens, cache_salt=prompt["salt"])
        _until(lambda: cache.check_hicache_events() or cache.check_prefetch_progress(handle))

    def _forward(self, index: int) -> None:
        """Wait for every layer, as a forward does before it computes one."""
        counter = self._cache.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(self._layers):
            counter.wait_until(layer)

    def _settle(self) -> None:
        """As the scheduler does in each of its steps, until all that was inserted is kept."""
        cache = self._cache
        if cache.linker is not None:
            _until(lambda: cache.check_hicache_events() or not cache.linker.pending_offloads)
        else:
            waiting = (cache.ongoing_write_through, cache.ongoing_backup)
            _until(lambda: cache.check_hicache_events() or not any(waiting))


def _read(arguments: Json) -> tuple[Any, Any, Any]:
    """SGLang's arguments, published for this process as for a scheduler; its model, and that one's states."""
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    # SGLang refuses pages of more than a token beside states where it cannot compute the states of their ends
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    server_args = ServerArgs(**arguments)
    set_global_server_args_for_scheduler(server_args)
    get_parallel().override_permanently(**ONE_RANK)
    model = model_config_of(server_args)
    return server_args, model, mambaish_config(model)


def _tree_cache(server_args: Any, model: Any, *, requests: Any, allocator: Any) -> Any:
    """What SGLang's registry makes of the arguments, with no model that would wait for layers."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache

    worker = SimpleNamespace(
        register_hicache_layer_transfer_counter=lambda counter: None,
        model_runner=SimpleNamespace(forward_stream=None),
    )
    params = CacheInitParams(
        disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=allocator,
        page_size=server_args.page_size, enable_mamba_extra_buffer=True,
    )  # fmt: skip
    context = TreeCacheBuildContext(
        server_args, params, is_hybrid_swa=False, is_hybrid_ssm=True,
        enable_hierarchical_cache=server_args.enable_hierarchical_cache, disable_radix_cache=False,
        tp_worker=worker, model_config=model, tp_size=1, tp_rank=0, tp_group=None,
    )  # fmt: skip
    return create_tree_cache(context)


def _key(prompt: Json) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", prompt["tokens"]), cache_salt=prompt["salt"])


def _until(done: Callable[[], Any]) -> None:
    """SGLang's scheduler looks at its queues once a step; nothing wakes it."""
    deadline, step = time.monotonic() + SETTLE_LIMIT_S, threading.Event()
    while not done():
        assert time.monotonic() < deadline, "SGLang did not come to an end with it"
        step.wait(0.01)


def main() -> None:
    """Import SGLang and its plugins, as its scheduler does; answer commands, leave the tree."""
    import sglang  # noqa: F401  (the long part of a start; the parent waits for the answer to it)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    runner = Runner()
    try:
        answer_commands(runner)
    finally:
        runner.close()


if __name__ == "__main__":
    main()
