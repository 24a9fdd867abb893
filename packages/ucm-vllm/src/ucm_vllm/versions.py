"""Which vLLM is supported, probed by attribute, and the few places where supported versions differ.

Supported: 0.30 to 0.32. What a version must have, and why:

=====================================  ===========================================================
``KVConnectorTransferResults``         a failed asynchronous load is told by request (0.30)
``KVConnectorBlockState.get_block_ids``  the block tables of a step are given, not reconstructed (0.30)
``KVCacheTensor.block_stride``         tensors are 4-D views and a state is one int8 tensor (0.29)
=====================================  ===========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ucm_core.errors import ConfigError

SUPPORTED = "0.30 to 0.32"


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the vLLM at hand can do."""

    version: str
    tells_failed_requests: bool
    gives_block_tables: bool

    def require(self) -> None:
        """Raise ConfigError, naming the version and what it lacks, unless it is supported."""
        if not self.tells_failed_requests:
            raise ConfigError(
                f"vLLM {self.version} cannot tell a failed load by request (KVConnectorTransferResults);"
                f" ucm-vllm supports vLLM {SUPPORTED}"
            )
        if not self.gives_block_tables:
            raise ConfigError(
                f"vLLM {self.version} does not hand out block tables (KVConnectorBlockState.get_block_ids);"
                f" ucm-vllm supports vLLM {SUPPORTED}"
            )


def probe(version: str, *, base: Any, output: Any) -> Abilities:
    """The abilities of a vLLM from its modules ``kv_connector.v1.base`` and ``v1.core.sched.output``."""
    block_state = getattr(output, "KVConnectorBlockState", None)
    return Abilities(
        version=version,
        tells_failed_requests=hasattr(base, "KVConnectorTransferResults"),
        gives_block_tables=hasattr(block_state, "get_block_ids"),
    )


def alignment_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """The granularity of hits in tokens: on KVCacheConfig since 0.32, by vLLM's own function before."""
    known = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    if known is not None:
        return int(known)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # noqa: PLC0415 (engine, only up to 0.31)

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[0])
