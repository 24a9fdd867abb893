"""Which SGLang is supported, probed by attribute, and where supported versions differ.

Supported: 0.5.22 and 0.5.23. What a version must have, and why:

===================================  ===================================================================
``mem_cache.utils.storage_namespace_seed``  keys know salt and extra key: without, tenants collide (0.5.20)
``PoolHitPolicy.BLOCK_GROUPS``       the pools of hybrid models as they are asked for today (0.5.22)
===================================  ===================================================================
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from ucm_core.errors import ConfigError

SUPPORTED = "0.5.22 and 0.5.23"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """What the SGLang at hand is, and what it can do beyond what every supported one can."""

    text: str
    """Its version, as its package says."""
    registers_pools: bool
    """It says when all host pools are registered (0.5.23); else they are checked at first use."""
    restorable_sets: bool
    """Ranks intersect the lengths that each can restore (0.5.19), not only the deepest."""
    linker: bool
    """Its unified radix cache loads linkers of others (0.5.23)."""


def probe() -> EngineVersion:
    """The installed SGLang, with one log line; ConfigError, naming both, unless it is supported."""
    from sglang.srt.mem_cache import hicache_storage, utils  # noqa: PLC0415 (the engine, when it loads us)

    linker = find_spec("sglang.srt.mem_cache.unified_cache.linker_config") is not None
    found = version_of(version("sglang"), storage=hicache_storage, hashes=utils, linker=linker)
    _log.info("UCM: %s", found)
    return found


def require_linker(found: EngineVersion) -> None:
    """ConfigError, naming both versions, for an SGLang whose tree loads no linkers of others."""
    if not found.linker:
        raise ConfigError(
            f"SGLang {found.text} loads no linkers of others (mem_cache.unified_cache.linker_config): use"
            " 0.5.23, or UCM as its storage backend (--hicache-storage-backend dynamic)"
        )


def version_of(text: str, *, storage: Any, hashes: Any, linker: bool) -> EngineVersion:
    """What a version can do, from its modules ``mem_cache.hicache_storage`` and ``mem_cache.utils``."""
    if not hasattr(hashes, "storage_namespace_seed"):
        raise ConfigError(
            f"SGLang {text} names pages without salt and extra key (mem_cache.utils.storage_namespace_seed);"
            f" ucm-sglang supports SGLang {SUPPORTED}"
        )
    if not hasattr(storage.PoolHitPolicy, "BLOCK_GROUPS"):
        raise ConfigError(
            f"SGLang {text} is older than 0.5.22 (it has no PoolHitPolicy.BLOCK_GROUPS);"
            f" ucm-sglang supports SGLang {SUPPORTED}"
        )
    return EngineVersion(
        text=text,
        registers_pools=hasattr(storage.HiCacheStorage, "on_host_pools_registered"),
        restorable_sets="restorable_prefix_pages" in storage.PoolTransferResult.__dataclass_fields__,
        linker=linker,
    )
