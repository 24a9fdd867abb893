"""How SGLang runs in the stories: arguments of `sglang.Engine`, and UCM with a host cache or without one."""

import json
from pathlib import Path
from typing import Any

from e2e.models import RING_BYTES

PAGE_TOKENS = 16
PREFETCH_TOKENS = 32
"""The rest of a prompt must be longer than this for SGLang to ask its storage; its own default is 256."""
LAYOUTS = ("page_first_direct", "layer_first")
"""How host pools lie in memory where the copies are those that the doubles stand for."""


def engine_arguments(checkpoint: Path, **more: Any) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: token ids in and out, float32, a small pool, chunks of 256 tokens."""
    common: dict[str, Any] = {"model_path": str(checkpoint), "skip_tokenizer_init": True, "device": "cpu"}
    common |= {"attention_backend": "torch_native", "dtype": "float32", "page_size": PAGE_TOKENS}
    # a fraction of the machine's free memory, of which the pool takes only what its tokens need
    common |= {"mem_fraction_static": 0.5, "max_total_tokens": 2048, "max_running_requests": 4}
    # an idle scheduler asks for work all the time, and takes a core from the engine beside it
    common |= {"sleep_on_idle": True}
    common |= {"disable_overlap_schedule": True, "disable_cuda_graph": True, "chunked_prefill_size": 256}
    return common | more


def ucm(root: Path, *, layout: str = LAYOUTS[0], **settings: Any) -> dict[str, Any]:
    """Engine arguments for a host cache with UCM behind it, its cache at `root` and a small ring."""
    named = {"backend_name": "ucm", "module_path": "ucm_sglang", "class_name": "UCMHiCache"}
    extra = named | {"interface_v1": 1, "root": str(root), "ring_bytes": RING_BYTES} | settings
    return storage("dynamic", layout=layout, **extra)


def linker(root: Path, *, offloads: bool = True, **settings: Any) -> dict[str, Any]:
    """Engine arguments for UCM at the radix tree, without a host cache; or one that takes no `offloads`."""
    extra = {"root": str(root), "ring_bytes": RING_BYTES} | settings
    name, module = ("UCMLinker", "ucm_sglang") if offloads else ("LayersOnly", "e2e.engine.layers_only")
    told = {"linker": name, "linker_module_path": module, "linker_extra_config": extra}
    named = {"unified_cache_external_linker_backend": "dynamic", "unified_cache_external_linker_config": told}
    return {"enable_unified_cache_external_linker": True, **named}


def storage(backend: str, *, layout: str = LAYOUTS[0], **extra: Any) -> dict[str, Any]:
    """Engine arguments for a host cache with a storage backend; `extra` is what that backend is told.

    A request waits for all that it is served, so that how much it is does not depend on time.
    """
    hicache: dict[str, Any] = {"hicache_ratio": 2.0, "hicache_io_backend": "direct"}
    hicache |= {"hicache_mem_layout": layout, "hicache_write_policy": "write_through"}
    hicache |= {"hicache_storage_backend": backend, "hicache_storage_prefetch_policy": "wait_complete"}
    told = json.dumps({"prefetch_threshold": PREFETCH_TOKENS} | extra)
    return {"enable_hierarchical_cache": True, **hicache, "hicache_storage_backend_extra_config": told}
