"""What neighbours take for the same question, where they are installed; None where they are not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


def vllm_block_pool(digests: npt.NDArray[np.uint8], groups: int) -> Callable[[], object] | None:
    """Ask vLLM's block pool (its own prefix cache) for every digest in every group, one after the other.

    The loop is the one of its managers: it stops at the first block that is absent.
    """
    try:
        block_pool = importlib.import_module("vllm.v1.core.block_pool")
        kv_cache_utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    except ImportError:
        return None
    hashes = [digest.tobytes() for digest in digests]
    pool: Any = block_pool.BlockPool(len(hashes) * groups + 1, enable_caching=True, hash_block_size=64)
    named = ((name, group) for group in range(groups) for name in hashes)
    for block, (name, group) in zip(pool.blocks[1:], named, strict=True):
        key = kv_cache_utils.make_block_hash_with_group_id(name, group)
        pool.cached_block_hash_to_block.insert(key, block)

    def ask() -> int:
        found = 0
        for group in range(groups):
            for name in hashes:
                if pool.get_cached_block(name, [group]) is None:
                    break
                found += 1
        return found

    assert ask() == len(hashes) * groups
    return ask
