"""Test doubles of what SGLang 0.5.23 has for CUDA only, put in place by SGLang's own plugin entry point.

They stand for kernels and for pinned memory, not for the cache: trees, pools, queues and threads are those of
SGLang.

| double | stands for |
| --- | --- |
| `transfer_kv_*` | the kernels that copy between device and host slots with `--hicache-io-backend direct` |
| unpinned host pools | memory that CUDA registers, so that a device reaches it |
| MLA on `torch_native` | the attention backends that know latent entries on a GPU |
| slots of windows | the attention backends that know SGLang's window pools on a GPU |
| `ucm_sglang_new_queries` | the attention backends that compute new queries only; where it is asked for |

`torch_native` writes the entries of window layers to translated slots and reads them at untranslated ones:
cold runs look right while both agree, a reload gives wrong tokens. The last double translates for reads too.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import ucm_sglang_new_queries  # type: ignore[import-not-found] # beside this file, where SGLang finds both

POOL_HOSTS = ("mha", "mla", "mamba", "dsa", "base", "unified", "qsa", "page_unified")
"""The modules of `sglang.srt.mem_cache.pool_host` that look the kernels up among their globals."""

Tensor = Any


def install() -> None:
    """The entry point: does nothing where SGLang finds CUDA."""
    import torch
    from sglang.srt.utils import is_cuda

    if is_cuda():
        return
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None
    _copy_in_torch()
    _leave_memory_unpinned()
    _attend_to_latents()
    ucm_sglang_new_queries.install()
    _attend_to_windows()


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy slots between buffers of the same layout, `[slot, ...]` each, layer by layer."""
    source, target = _indices(src_indices), _indices(dst_indices)
    for taken, given in zip(src_layers, dst_layers, strict=True):
        given[target] = taken[source]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer from host `[page, layer, slot in the page, ...]` to device `[slot, ...]`."""
    source, target = _indices(src_indices), _indices(dst_indices)
    for taken, given in zip(src_ptrs, dst_ptrs, strict=True):
        given[target] = taken[source // page_size, layer_id, source % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy all layers from device `[slot, ...]` to host `[page, layer, slot in the page, ...]`.

    The device's buffers come one after the other, all layers of the first host buffer first.
    """
    source, target = _indices(src_indices), _indices(dst_indices)
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, taken in enumerate(src_ptrs):
        buffer, layer = divmod(number, layers)
        dst_ptrs[buffer][target // page_size, layer, target % page_size] = taken[source]


def _indices(indices: Tensor) -> Tensor:
    return indices.cpu().long()


def _copy_in_torch() -> None:
    copies = (
        transfer_kv_direct,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
    )
    for module in map(_pool_host, POOL_HOSTS):
        for copy in copies:
            vars(module).setdefault(copy.__name__, copy)


def _pool_host(name: str) -> ModuleType:
    return importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")


def _leave_memory_unpinned() -> None:
    from sglang.srt.mem_cache.pool_host import base, mamba

    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        for module in map(_pool_host, ("common", *POOL_HOSTS)):
            if hasattr(module, name):
                setattr(module, name, lambda *arguments, **named: None)
    for pool in (base.HostKVCache, mamba.MambaPoolHost):
        pool.__init__ = _unpinned(pool.__init__)


def _unpinned(make: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_unpinned(self: Any, *arguments: Any, **named: Any) -> None:
        bound = signature.bind(self, *arguments, **named)
        if "pin_memory" in signature.parameters:
            bound.arguments["pin_memory"] = False
        make(*bound.args, **bound.kwargs)

    return make_unpinned


def _attend_to_latents() -> None:
    """Let `torch_native` take latent entries as such; SGLang's fallback reads them as heads in a prefill."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register(
        "torch_native", lambda attention, batch: handlers.AttnForwardMethod.MLA
    )


def _attend_to_windows() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(Backend, name, _translating(getattr(Backend, name)))


def _translating(attend: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attend)
    def translated(
        self: Any, query: Tensor, output: Tensor, k_cache: Tensor, *arguments: Any, **named: Any
    ) -> Any:
        v_cache, req_to_token, *others = arguments
        pool = self.token_to_kv_pool
        if self.use_sliding_window_kv_pool and _is_one_of(k_cache, pool.swa_kv_pool.k_buffer):
            req_to_token = pool.translate_loc_from_full_to_swa(req_to_token.long()).clamp_min(0)
        return attend(self, query, output, k_cache, v_cache, req_to_token, *others, **named)

    return translated


def _is_one_of(tensor: Tensor, buffers: Sequence[Tensor]) -> bool:
    return any(tensor.data_ptr() == buffer.data_ptr() for buffer in buffers)
