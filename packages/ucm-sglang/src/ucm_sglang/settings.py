"""What a user of SGLang sets: the cache's settings, and what SGLang cannot say itself.

All of it stands in ``--hicache-storage-backend-extra-config`` (or in the file that it names with an ``@``),
beside SGLang's own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ucm_core.errors import ConfigError, shown
from ucm_core.ops.config import CacheConfig

ENGINE_KEYS = frozenset(
    {
        *("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "allocator"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        "hicache_storage_pass_prefix_keys",
    }
)
"""Keys of the extra config that SGLang itself reads; most of them it keeps back."""

OWN_KEYS = ("model_path", "compute_dtype", "weights_are_static")
"""Ours, beyond those of `CacheConfig`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One backend's settings."""

    cache: CacheConfig
    """Of the cache; grain and block are SGLang's page."""
    model_path: str | None
    """The checkpoint, where SGLang's arguments cannot be read."""
    compute_dtype: str | None
    """The type of the computation, likewise."""
    weights_are_static: bool
    """Nobody ever updates the weights, so that nobody has to tell."""


def read_settings(extra_config: Mapping[str, Any] | None, *, page_tokens: int) -> Settings:
    """Settings from the extra config of a backend whose host pages have ``page_tokens`` tokens.

    ConfigError for what `CacheConfig` refuses, for unknown keys, and for a grain or block of another size:
    SGLang hands out the hashes of its pages, never tokens, so that its page is the grain.
    """
    _refuse_a_slow_route(extra_config)
    given = {key: value for key, value in dict(extra_config or {}).items() if key not in ENGINE_KEYS}
    own = {key: given.pop(key, None) for key in OWN_KEYS}
    cache = CacheConfig.load({"grain_tokens": page_tokens} | given)
    _require_page("grain_tokens", cache.grain_tokens, page_tokens=page_tokens)
    _require_page("block_tokens", cache.block_tokens, page_tokens=page_tokens)
    return Settings(
        cache=cache.model_copy(update={"block_tokens": None}),
        model_path=_typed(own, "model_path", kind=str),
        compute_dtype=_typed(own, "compute_dtype", kind=str),
        weights_are_static=bool(_typed(own, "weights_are_static", kind=bool)),
    )


def _refuse_a_slow_route(extra_config: Mapping[str, Any] | None) -> None:
    if not (extra_config or {}).get("interface_v1"):
        raise ConfigError(
            'interface_v1 is not set, so SGLang would copy each page once more: put "interface_v1": 1 into'
            " --hicache-storage-backend-extra-config"
        )


def _require_page(name: str, value: int | None, *, page_tokens: int) -> None:
    if value not in (None, page_tokens):
        raise ConfigError(
            f"{name} = {value}, but SGLang's page size is {page_tokens}, and only whole pages have keys:"
            f" leave {name} out, or start SGLang with --page-size {value}"
        )


def _typed(own: Mapping[str, Any], name: str, *, kind: type) -> Any:
    """One of our settings; ConfigError for one that is no ``kind``."""
    value = own[name]
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"setting {name!r} = {shown(value)}: give a value of type {kind.__name__}")
    return value
