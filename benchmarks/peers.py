"""What neighbours take to say what they hold of a prefix, where they are installed.

Each function returns a call that asks for every id in every group, one after the other and up to the first
that is absent: the loop that the neighbour runs itself. ImportError where it is not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.uint8]


def vllm_block_pool(digests: Digests, groups: int) -> Callable[[], int]:
    """The block pool of vLLM, its own prefix cache, with a block for every digest and group."""
    block_pool = importlib.import_module("vllm.v1.core.block_pool")
    name_of = importlib.import_module("vllm.v1.core.kv_cache_utils").make_block_hash_with_group_id
    hashes = [digest.tobytes() for digest in digests]
    pool: Any = block_pool.BlockPool(len(hashes) * groups + 1, enable_caching=True, hash_block_size=64)
    named = ((name, group) for group in range(groups) for name in hashes)
    for block, (name, group) in zip(pool.blocks[1:], named, strict=True):
        pool.cached_block_hash_to_block.insert(name_of(name, group), block)
    return lambda: sum(
        _leading(pool.get_cached_block(name, [group]) is not None for name in hashes)
        for group in range(groups)
    )


def lmcache_host_memory(digests: Digests, groups: int) -> Callable[[], int]:
    """The host memory backend of LMCache, with a key for every digest; one group, asked ``groups`` times."""
    torch = importlib.import_module("torch")
    config = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults()
    backend = importlib.import_module("lmcache.v1.storage_backend.local_cpu_backend").LocalCPUBackend
    make_key = importlib.import_module("lmcache.utils").CacheEngineKey
    held: Any = backend(config, memory_allocator=object())
    keys = [
        make_key("model", 1, 0, int.from_bytes(digest[:8].tobytes(), "little"), torch.bfloat16)
        for digest in digests
    ]
    held.hot_cache.update(dict.fromkeys(keys))
    return lambda: sum(_leading(held.contains(key) for key in keys) for _ in range(groups))


def _leading(found: Iterable[bool]) -> int:
    count = 0
    for present in found:
        if not present:
            break
        count += 1
    return count


PEERS = {"vLLM's block pool": vllm_block_pool, "LMCache's host memory": lmcache_host_memory}
"""What a benchmark calls them."""
