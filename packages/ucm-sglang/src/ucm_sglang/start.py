"""What a backend knows of its engine when it starts: settings, model, ranks, and who tells of new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ucm_core.coordinator.coordinator import needs_parents
from ucm_core.engine_cache import EngineCache
from ucm_core.errors import ConfigError, IdentityError
from ucm_core.ops import border
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.model import Model
from ucm_core.spec.segments import Parallelism, Share
from ucm_core.spec.table import SpecTable
from ucm_position_key import KeyView
from ucm_sglang import versions, weight_updates
from ucm_sglang.identity_from_engine import argument, engine_model, key_view, server_args_of_engine
from ucm_sglang.layout_from_engine import MappedPools
from ucm_sglang.page_cache import PoolMemory
from ucm_sglang.ranks_from_engine import partition_of, share_of
from ucm_sglang.refusals import refuse
from ucm_sglang.settings import LOOKUP_BUDGET_S, Settings, read_linker_settings, read_settings

__all__ = ["Start", "WeightUpdates", "start_of_engine", "start_of_linker"]


class WeightUpdates(Protocol):
    """Who tells of weights that change in the engine's memory (`ucm_sglang.weight_updates`)."""

    def installed(self) -> bool:
        """Whether changes are told."""

    def subscribe(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Call ``callback`` at each change, and whether SGLang's cache was flushed; returns how to end it."""

    def overtaken(self) -> bool:
        """Whether the weights are not those of the checkpoint any more."""

    def stale(self) -> bool:
        """Whether SGLang may hold pages of weights before the last change."""


@dataclass(frozen=True, slots=True)
class Start:
    """One engine, as its backend sees it."""

    model: Model
    """Table and identity."""
    config: CacheConfig
    """The settings."""
    share: Share
    """What of the model this rank has."""
    weights: WeightUpdates
    """Who tells of new weights."""
    read_pools: Callable[[Mapping[str, Any], SpecTable, Share], PoolMemory]
    """Reads registered pools; LayoutError or SpecError for what does not hold the table."""
    view: KeyView = KeyView.PLAIN
    """What a position of SGLang's keys is."""
    registers_pools: bool = True
    """SGLang says when all host pools are registered."""
    lookup_budget_s: float = LOOKUP_BUDGET_S
    """How long one lookup of a linker waits for what only files hold."""
    layerwise_save: bool = False
    """Whether a linker saves a prefill layer by layer, while it computes."""

    def open_cache(self) -> EngineCache:
        """Open the cache, in a namespace of the view."""
        identity = self.view.identity_of(self.model.identity)
        return EngineCache(replace(self.model, identity=identity), self.config, share=self.share)

    def memory_of(self, pools: Mapping[str, Any]) -> PoolMemory:
        """SGLang's pools, by name, as memory of the table's rows."""
        return self.read_pools(dict(pools), self.model.table, self.share)


def start_of_engine(storage_config: Any) -> Start | None:
    """Read the SGLang of this process; None, with one log line, where its model cannot be identified.

    Raises ConfigError or SpecError for what cannot work: settings, ranks, a family without a preset, and an
    engine of which nobody would tell that its weights have changed.
    """
    version, arguments = versions.probe(), server_args_of_engine()
    page_tokens = _page_tokens(arguments, storage_config.extra_config)
    settings = read_settings(storage_config.extra_config, page_tokens=page_tokens)
    return _start(storage_config, arguments, settings, registers_pools=version.registers_pools)


def start_of_linker(storage_config: Any, server_args: Any) -> Start | None:
    """As `start_of_engine`, for a linker; ConfigError too for an SGLang that loads none of others.

    ``storage_config`` says what SGLang would tell a storage backend of this rank.
    """
    versions.require_linker(versions.probe())
    page_tokens = _page_tokens(server_args, storage_config.extra_config)
    settings = read_linker_settings(storage_config.extra_config, page_tokens=page_tokens)
    start = _start(storage_config, server_args, settings, registers_pools=True)
    if start is not None and start.layerwise_save:
        refuse_layerwise(start, compiles=bool(argument(server_args, "enable_torch_compile")))
    return start


def refuse_layerwise(start: Start, *, compiles: bool) -> None:
    """ConfigError where nothing could be saved layer by layer; ``compiles``: the model is compiled."""
    reasons = {
        "the model runs on several ranks": start.share.parallel != Parallelism(),
        "EAGLE's keys are pairs of tokens": start.view is not KeyView.PLAIN,
        "no row keeps the whole prefix": not any(map(needs_parents, start.model.table.rows)),
        "a compiled model calls no hooks (--enable-torch-compile)": compiles,
    }
    for reason, holds in reasons.items():
        refuse(holds, ConfigError(f"layerwise_save is set, but {reason}: leave it out"))


def _start(
    storage_config: Any, arguments: Any | None, settings: Settings, *, registers_pools: bool
) -> Start | None:
    if not (weight_updates.installed() or settings.weights_are_static):
        raise ConfigError(
            "UCM's SGLang plugin is not loaded, so nobody would tell the cache of updated weights: install"
            " ucm-sglang in SGLang's environment (and name it in SGLANG_PLUGINS where that is set), or set"
            ' "weights_are_static": true if they are never updated'
        )
    try:
        model = engine_model(settings, storage_config=storage_config, server_args=arguments)
    except IdentityError as error:
        border.complaints.say("identity", f"the model cannot be identified, so nothing is cached: {error}")
        return None
    return Start(
        model=model,
        config=settings.cache,
        share=share_of(storage_config, model.table, partition=partition_of(storage_config, model.table)),
        weights=weight_updates,
        read_pools=lambda pools, table, share: MappedPools.of(pools, table, share=share),
        # SGLang keys by tokens where there are states, whatever drafts (`UnifiedTreeCore.is_eagle`)
        view=KeyView.PLAIN if model.table.snapshot_rows else key_view(arguments),
        registers_pools=registers_pools,
        lookup_budget_s=settings.lookup_budget_s,
        layerwise_save=settings.layerwise_save,
    )


def _page_tokens(arguments: Any | None, extra_config: Mapping[str, Any]) -> int:
    """SGLang's page size; the user names it where SGLang's arguments cannot be read."""
    named = extra_config.get("grain_tokens") if arguments is None else argument(arguments, "page_size")
    if not isinstance(named, int):
        raise ConfigError(
            "SGLang's arguments cannot be read: name its page size as grain_tokens in"
            " --hicache-storage-backend-extra-config"
        )
    return named
