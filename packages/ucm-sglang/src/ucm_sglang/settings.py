"""What a user of SGLang sets: the cache's settings, and what SGLang cannot say itself.

Of the storage backend it stands in ``--hicache-storage-backend-extra-config`` (or in the file that it names
with an ``@``), beside SGLang's own keys; of the linker as ``linker_extra_config`` in
``--unified-cache-external-linker-config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ucm_core.errors import ConfigError, shown
from ucm_core.ops.config import CacheConfig
from ucm_sglang.refusals import refuse

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

LAYERWISE = "layerwise_save"
"""A linker's own: SGLang's host cache copies a page when all layers of it are there."""

LOOKUP_BUDGET_S = 1.0
"""How long one lookup of a linker waits for what only files hold, unless ``lookup_budget_s`` says it."""

LINKER_DEFAULTS: Mapping[str, Any] = {"lookup_budget_s": LOOKUP_BUDGET_S, LAYERWISE: False}
"""What only a linker has."""


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
    lookup_budget_s: float = LOOKUP_BUDGET_S
    """How long one lookup of a linker waits for what only files hold."""
    layerwise_save: bool = False
    """Whether a linker saves a prefill layer by layer, while it computes."""


def read_settings(extra_config: Mapping[str, Any] | None, *, page_tokens: int) -> Settings:
    """Settings of a storage backend whose host pages have ``page_tokens`` tokens.

    ConfigError for what `CacheConfig` refuses, for unknown keys, and for a grain or block of another size:
    SGLang hands out the hashes of its pages, never tokens, so that its page is the grain.
    """
    _refuse_a_slow_route(extra_config)
    refuse(
        LAYERWISE in (extra_config or {}),
        ConfigError(
            f"setting {LAYERWISE!r} is UCMLinker's: SGLang's host cache copies whole pages, so that a storage"
            " backend has no layers to save"
        ),
    )
    given = {key: value for key, value in dict(extra_config or {}).items() if key not in ENGINE_KEYS}
    return _settings(given, page_tokens)


def read_linker_settings(extra_config: Mapping[str, Any] | None, *, page_tokens: int) -> Settings:
    """Settings of a linker whose device pages have ``page_tokens`` tokens.

    ConfigError as for `read_settings`, for a cache without a ring, since only what lies in one is promised,
    and for what cannot be saved layer by layer though it is asked for.
    """
    given = dict(extra_config or {})
    own = {name: given.pop(name, default) for name, default in LINKER_DEFAULTS.items()}
    found = replace(
        _settings(given, page_tokens),
        lookup_budget_s=_seconds(own, "lookup_budget_s"),
        layerwise_save=bool(_typed(own, LAYERWISE, kind=bool)),
    )
    refuse(
        found.cache.ring_bytes == 0,
        ConfigError(
            "ring_bytes = 0, but SGLang aborts a request whose load fails, so its linker promises only what"
            " lies in the ring: leave ring_bytes out"
        ),
    )
    refuse(
        found.layerwise_save and found.cache.sync,
        ConfigError(
            "layerwise_save and sync are both set, but with sync the medium is asked before each save, and no"
            " layer waits for it: leave one of them out"
        ),
    )
    return found


def _settings(given: dict[str, Any], page_tokens: int) -> Settings:
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


def _seconds(own: Mapping[str, Any], name: str) -> float:
    """One of our settings; ConfigError unless it is a short time."""
    value = own[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 60:
        raise ConfigError(f"setting {name!r} = {shown(value)}: give seconds from 0 to 60")
    return float(value)


def _typed(own: Mapping[str, Any], name: str, *, kind: type) -> Any:
    """One of our settings; ConfigError for one that is no ``kind``."""
    value = own[name]
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"setting {name!r} = {shown(value)}: give a value of type {kind.__name__}")
    return value
