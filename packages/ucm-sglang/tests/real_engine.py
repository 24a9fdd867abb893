"""SGLang's own classes where a whole engine is too heavy: a double of what they call, everything else real.

``import_doubles`` must have been installed before this is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.plugins.hook_registry import HookRegistry

from ucm_sglang.weight_updates import CHANGES, plugin


@contextmanager
def hooked() -> Iterator[None]:
    """UCM's hooks on SGLang's classes, by SGLang's own registry; as before afterwards."""
    updater = weight_updater.SchedulerWeightUpdaterManager
    before = {name: getattr(updater, name) for name in CHANGES}
    flush = Scheduler.flush_cache
    plugin()
    HookRegistry.apply_hooks()
    try:
        yield
    finally:
        HookRegistry.reset()
        Scheduler.flush_cache = flush
        for name, method in before.items():
            setattr(updater, name, method)


class NothingDouble:
    """Any part of a scheduler that a flush or an update calls: it takes every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_more: None


class SchedulerDouble(SimpleNamespace):
    """What `Scheduler.flush_cache` and the updater ask of a scheduler; its answers are the attributes."""

    def __init__(self, *, idle: bool = True, loads: bool = True) -> None:
        parts = ("tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator", "grammar_manager")
        super().__init__(
            **dict.fromkeys(parts, NothingDouble()),
            forward_ct=5,
            draft_worker=None,
            _engine_paused=False,
            metrics_reporter=SimpleNamespace(reset_metrics=lambda: None, is_stats_logging_rank=False),
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=[]),
            is_fully_idle=lambda **_: idle,
            record_weight_version_change=lambda **_: None,
        )
        loader = SimpleNamespace(update_weights_from_disk=lambda *_args, **_more: (loads, "from a double"))
        runner = SimpleNamespace(weight_updater=loader)
        self.updater = object.__new__(weight_updater.SchedulerWeightUpdaterManager)
        self.updater.scheduler = self
        self.updater.metrics_collector = None
        self.updater.draft_worker = None
        self.updater._session = None
        self.updater.tp_worker = SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
        self.updater.flush_cache = functools.partial(Scheduler.flush_cache, self)

    def update(self, *, flush_cache: bool) -> bool:
        """Update from disk, by SGLang's own code; whether that says it succeeded."""
        request = UpdateWeightFromDiskReqInput(model_path="elsewhere", flush_cache=flush_cache)
        return bool(self.updater.update_weights_from_disk(request).success)

    def flush(self) -> bool:
        """SGLang's own flush."""
        return bool(Scheduler.flush_cache(self, empty_cache=False))
