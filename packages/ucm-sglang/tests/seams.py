"""The names of SGLang that UCM depends on, and how to write down what each looks like."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import pkgutil
import re
from typing import Any

SEAMS = {
    "sglang.srt.mem_cache.hicache_storage": (
        *("HiCacheStorageConfig", "HiCacheStorageExtraInfo", "PoolTransfer", "PoolTransferResult"),
        *("PoolName", "PoolHitPolicy", "STORAGE_BATCH_SIZE"),
        *(
            f"HiCacheStorage.{name}"
            for name in (
                *("register_mem_pool_host", "register_mem_host_pool_v2", "on_host_pools_registered"),
                *("exists", "batch_exists", "batch_exists_v2", "get", "batch_get", "batch_get_v1"),
                *("batch_get_v2", "set", "batch_set", "batch_set_v1", "batch_set_v2", "clear", "get_stats"),
            )
        ),
    ),
    "sglang.srt.mem_cache.utils": ("storage_namespace_seed", "get_storage_hash_str", "get_hash_str"),
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker": (
        *("LayerWiseLoadCounter", "UnifiedCacheLinker.record_offload_ready", "UnifiedCacheLinker.lookup"),
        *("UnifiedCacheLinker.load", "UnifiedCacheLinker.start_layer_wise_loading"),
        *("UnifiedCacheLinker.finish_layer_wise_loading", "UnifiedCacheLinker.cancel_queued_load"),
        *("UnifiedCacheLinker.offload", "UnifiedCacheLinker.num_completed_offloads"),
        *("UnifiedCacheLinker.pop_completed_offload", "UnifiedCacheLinker.reset", "UnifiedCacheLinker.close"),
    ),
    "sglang.srt.mem_cache.unified_cache.linker_config": ("UnifiedCacheLinkerConfig",),
    "sglang.srt.mem_cache.unified_cache.linker_factory": ("create_unified_cache_linker",),
    "sglang.srt.mem_cache.unified_cache.component_type": ("ComponentType",),
    "sglang.srt.mem_cache.cache_init_params": ("CacheInitParams",),
    "sglang.srt.mem_cache.memory_pool": (
        *("KVCache.register_layer_transfer_counter", "HybridReqToTokenPool.register_layer_transfer_counter"),
        *("MHATokenToKVPool", "MLATokenToKVPool", "HybridLinearKVPool", "MambaPool.State"),
    ),
    "sglang.srt.mem_cache.swa_memory_pool": ("SWAKVPool",),
    "sglang.srt.plugins.hook_registry": ("HookType", "HookRegistry.register", "HookRegistry.apply_hooks"),
    "sglang.srt.managers.scheduler_components.weight_updater": tuple(
        f"SchedulerWeightUpdaterManager.{name}"
        for name in (
            *("flush_cache_after_weight_update", "update_weights_from_disk", "update_weights_from_tensor"),
            *("update_weights_from_distributed", "update_weights_from_ipc", "begin_weight_update"),
            *("end_weight_update", "resume_memory_occupation", "release_memory_occupation"),
        )
    ),
    "sglang.srt.managers.scheduler": ("Scheduler.flush_cache", "Scheduler.run_batch"),
    "sglang.srt.layers.radix_attention": ("RadixAttention.forward", "AttentionType"),
    "sglang.srt.managers.schedule_batch": ("Req.__init__",),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardMode",),
    "sglang.srt.runtime_context": ("get_server_args",),
    "sglang.srt.arg_groups.overrides": ("resolution_result", "model_config_of"),
    "sglang.srt.configs.hybrid_arch": ("mambaish_config",),
}
"""By module; section 4.2 and 5 of the contract, the hooks, and what the identity is read by."""


def shapes() -> dict[str, str]:
    """What every seam of the installed SGLang looks like, in one line each."""
    names = [f"{module}:{name}" for module, members in SEAMS.items() for name in members]
    return {name: shape(name) for name in names}


def shape(name: str) -> str:
    """Signature, fields or members of one name; "missing" where it is not."""
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return "missing"
    if dataclasses.is_dataclass(found):
        return ", ".join(_field(field) for field in dataclasses.fields(found))
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return ", ".join(str(member.value) for member in found)
    return _without_modules(str(inspect.signature(found))) if callable(found) else repr(found)


def _field(field: dataclasses.Field[Any]) -> str:
    default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
    return f"{field.name}: {field.type}{default}"


def _without_modules(text: str) -> str:
    return re.sub(r"'|\b(?:\w+\.)+(?=\w)", "", text)
