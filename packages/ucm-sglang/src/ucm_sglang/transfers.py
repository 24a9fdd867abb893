"""What SGLang's transfers say, for both seams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from ucm_core.errors import ConfigError
from ucm_sglang.page_cache import Pages

__all__ = ["pages_at", "pool_name", "trailing_pages"]


def pool_name(pool: Any) -> str:
    """The name of a pool, which SGLang gives as text or as an enumeration of texts."""
    return str(getattr(pool, "value", pool))


def trailing_pages(transfer: PoolTransfer) -> int | None:
    """How many of the last pages SGLang will read; None: all. At lookup the keys themselves say nothing."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return None
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return max(1, len(transfer.keys or ()))
    raise ConfigError(
        f"pool {pool_name(transfer.name)!r} asks by {pool_name(transfer.hit_policy)}, which UCM does not do"
    )


def pages_at(pool: str, keys: Sequence[str], *, indices: Any, before: str | None = None) -> Pages:
    """Pages of a pool, from SGLang's tensor of their indices."""
    return Pages(pool, keys, indices.cpu().numpy().astype("int64"), before)
