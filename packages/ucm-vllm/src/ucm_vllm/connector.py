"""`UCMConnector`: vLLM's V1 KV connector. The only module with engine class names; it decides nothing itself.

Each hook goes to the scheduler half or the worker half, through one border that turns whatever fails into a
miss. Only start-up invariants raise: a setting that cannot work, a model whose layers the table does not
cover, a tensor that cannot be read for certain, two halves that run different models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import vllm
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base as engine_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.sched import output as engine_output
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from ucm_core.engine_cache import EngineCache, refuse_root
from ucm_core.errors import ConfigError, IdentityError
from ucm_core.ops import border
from ucm_core.ops.border import guarded
from ucm_core.ops.config import CacheConfig
from ucm_vllm import process_counters, versions
from ucm_vllm.identity_from_engine import engine_model
from ucm_vllm.kv_events import StoredObject
from ucm_vllm.layout_from_engine import Backend
from ucm_vllm.metadata import Handshake, StepPlan, WorkerReport
from ucm_vllm.ranks_from_engine import RankPart, RankView, parallelism_of, rank_view
from ucm_vllm.scheduler_half import SchedulerHalf
from ucm_vllm.spec_from_engine import EngineSpec, engine_spec
from ucm_vllm.worker_half import NO_STEP, WorkerHalf

__all__ = ["UCMConnector"]


@dataclass(frozen=True, slots=True)
class UCMStep(KVConnectorMetadata):
    """A step's plan in vLLM's envelope."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class UCMReport(KVConnectorWorkerMetadata):
    """A worker's report in vLLM's envelope."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> UCMReport:
        """Both workers' reports as one."""
        return UCMReport(self.report.merged(other.report))


@dataclass(frozen=True, slots=True)
class UCMHandshake(KVConnectorHandshakeMetadata):
    """A worker's identity in vLLM's envelope."""

    handshake: Handshake


class UCMStats(KVConnectorStats):
    """What the counters of UCM's processes gained (`ucm_vllm.process_counters.Gains`), in vLLM's envelope."""

    def aggregate(self, other: KVConnectorStats) -> UCMStats:
        """Both together."""
        return UCMStats(data=process_counters.together(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Sums for vLLM's log line."""
        return dict(process_counters.totals(self.data))

    def reset(self) -> None:
        """Begin at zero."""
        self.data: process_counters.Gains = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class UCMPromMetrics(KVConnectorPromMetrics):
    """Adds what engines counted to the same counters of the process that serves ``/metrics``."""

    @guarded("statistics", lambda: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See `ucm_vllm.process_counters.add`; the counters do not tell engines apart."""
        del engine_idx
        process_counters.add(transfer_stats_data)


class UCMConnector(KVConnectorBase_V1, SupportsHMA):
    """UCM's connector; its settings are the keys of ``kv_connector_extra_config``.

    ``kv_connector="UCMConnector"``, ``kv_connector_module_path="ucm_vllm"``, ``kv_role="kv_both"`` and
    ``kv_load_failure_policy="recompute"``.
    """

    _cache_hit_source = getattr(getattr(engine_base, "CacheHitSource", None), "DISK", None)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        border.join_log("vllm", adapter="ucm_vllm")
        versions.probe(vllm.__version__, base=engine_base, output=engine_output).require()
        transfer = self._kv_transfer_config
        _refuse_settings(vllm_config, transfer)
        config = cache_config(transfer.kv_connector_extra_config)
        refuse_root(config.root)
        self._reason = ""
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        is_worker = role is KVConnectorRole.WORKER
        parts = self._identify(vllm_config, kv_cache_config, config, is_worker=is_worker)
        if parts is None:
            return
        spec, cache, view = parts
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                spec, cache, saves=transfer.is_kv_producer, loads=transfer.is_kv_consumer
            )
            if _follows_events(vllm_config):
                self._scheduler.follow_events()
        else:
            self._worker = WorkerHalf(spec, cache, worker=view.worker)
            self._part = RankPart(view)
            if _follows_events(vllm_config):
                self._worker.follow_events()

    def _identify(
        self, vllm_config: Any, kv_cache_config: Any, config: CacheConfig, *, is_worker: bool
    ) -> tuple[EngineSpec, EngineCache, RankView] | None:
        """What both halves work on; None, with one log line, when the model cannot be identified."""
        groups = kv_cache_config.kv_cache_groups
        try:
            model = engine_model(vllm_config, groups, config=config)
        except IdentityError as error:
            self._reason = str(error)
            border.complaints.say(
                "identity", f"the model cannot be identified, so nothing is cached: {error}"
            )
            return None
        align = versions.alignment_tokens(vllm_config, kv_cache_config)
        view = rank_view(model.table, vllm_config, stage_layers=get_pp_indices, is_worker=is_worker)
        spec = engine_spec(view.table, groups, spec_kind=_spec_kind, engine_align_tokens=align)
        # there the next step is planned before it is known that a load of this one failed
        ahead = bool(vllm_config.scheduler_config.async_scheduling)
        spec = replace(spec, asynchronous=config.load_asynchronously or ahead, workers=view.workers)
        return spec, EngineCache(model, config, share=view.share), view

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: a save that does not happen is a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True where layers are awaited and saved one by one: a replayed graph would skip the hooks."""
        return cache_config(extra_config).layerwise

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> UCMStats:
        """Statistics from what crossed between processes."""
        return UCMStats(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> UCMPromMetrics:
        """What shows UCM's counters under vLLM's ``/metrics``."""
        return UCMPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- start-up: invariants raise

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Learn where each layer's cache lies."""
        if self._worker is not None:
            self._worker.register(
                kv_caches, num_blocks=self._kv_cache_config.num_blocks, backend_of=self._backend
            )

    def get_handshake_metadata(self) -> UCMHandshake:
        """Send the worker's identity up."""
        return UCMHandshake(
            Handshake(None, self._reason) if self._worker is None else self._worker.handshake()
        )

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], UCMHandshake]) -> None:
        """Compare the workers' identities with our own before anything is loaded or saved."""
        if self._scheduler is not None:
            envelopes = list(metadata.values())
            # beside another connector vLLM may pass on that one's: then the first report says who they are
            ours = [each.handshake for each in envelopes if isinstance(each, UCMHandshake)]
            self._scheduler.meet(ours, workers=len(envelopes))

    # -- the scheduler's hooks

    @guarded("get_num_new_matched_tokens", lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerHalf.matched_tokens`."""
        return (
            (0, False)
            if self._scheduler is None
            else self._scheduler.matched_tokens(request, num_computed_tokens)
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerHalf.allocated`: whatever fails in it becomes a load that is reported as failed.

        Not guarded: once vLLM counts on a load there is no harmless answer without its block tables.
        """
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), external_tokens=num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> UCMStep:
        """See `SchedulerHalf.plan_step`, which turns every failure into failed loads."""
        if self._scheduler is None:
            return UCMStep(StepPlan(namespace=None))
        return UCMStep(self._scheduler.plan_step(scheduler_output))

    @guarded("update_connector_output", lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """See `SchedulerHalf.take_output`."""
        envelope = connector_output.kv_connector_worker_meta
        if self._scheduler is not None:
            self._scheduler.take_output(
                envelope.report if isinstance(envelope, UCMReport) else None,
                broken_pages=connector_output.invalid_block_ids,
                released=connector_output.finished_sending or (),
            )
            self._withdraw(self._scheduler.broken_pages)

    @guarded("request_finished", lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; True while saves may read its blocks: the workers say when they are over."""
        del block_ids
        return self._scheduler is not None and self._scheduler.finished(request.request_id), None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same for an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded("has_pending_block_frees", lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Whether waiting gives blocks back, so that nobody need be preempted."""
        return self._scheduler is not None and self._scheduler.frees_blocks_soon

    @guarded("take_events", tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """What came to the medium and went, where vLLM's KV events are enabled."""
        return [] if self._scheduler is None else list(_kv_events(self._scheduler.take_events()))

    @guarded("get_kv_connector_stats", lambda: None)
    def get_kv_connector_stats(self) -> UCMStats | None:
        """What this process counted since one of its halves was asked."""
        # vLLM asks after a step only: what it counted up to its last one would wait for the next request.
        # A worker in a process of its own learns of that in the step that only tells it who has finished.
        has_no_request = self._scheduler is not None and not self._scheduler.request_count
        gains = process_counters.feed.take(is_last=has_no_request or self._plan().idle)
        return UCMStats(data=gains) if gains else None

    @guarded("reset_cache", lambda: False)
    def reset_cache(self) -> bool | None:
        """The weights changed: that is what vLLM means by it."""
        if self._scheduler is None:
            return None
        return self._scheduler.reset(local_is_empty=self._local_cache_is_empty())

    # -- the worker's hooks

    @guarded("handle_preemptions", lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See `WorkerHalf.before_step`: vLLM calls this before every step writes anything."""
        if self._worker is not None and isinstance(kv_connector_metadata, UCMStep):
            self._worker.before_step(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `WorkerHalf.start_loads`, which turns every failure into a failed load."""
        del forward_context, kwargs
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    @guarded("wait_for_layer_load", lambda: None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `WorkerHalf.before_layer`."""
        if self._worker is not None:
            self._worker.before_layer(self._plan(), layer_name)

    @guarded("save_kv_layer", lambda: None)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See `WorkerHalf.after_layer`."""
        del kv_layer, attn_metadata, kwargs
        if self._worker is not None:
            self._worker.after_layer(self._plan(), layer_name)

    @guarded("wait_for_save", lambda: None)
    def wait_for_save(self) -> None:
        """See `WorkerHalf.end_step`."""
        if self._worker is not None:
            self._worker.end_step(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `get_transfer_results`, which vLLM asks instead."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    @guarded("get_transfer_results", KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See `WorkerHalf.collect`."""
        del finished_req_ids
        if self._worker is None:
            return KVConnectorTransferResults()
        ended, failed, saved = self._worker.collect(self._plan())
        return KVConnectorTransferResults(
            finished_sending=saved, finished_recving=ended, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `WorkerHalf.broken_pages`."""
        return set() if self._worker is None else self._worker.broken_pages(self._plan())

    @guarded("build_connector_worker_meta", lambda: None)
    def build_connector_worker_meta(self) -> UCMReport | None:
        """See `WorkerHalf.report`."""
        report = None if self._worker is None else self._worker.report()
        return None if report is None else UCMReport(report)

    @guarded("shutdown", lambda: None)
    def shutdown(self) -> None:
        """Let go of the cache; what is being written ends first, within a bound."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    def _withdraw(self, pages: Collection[int]) -> None:
        """Take blocks that hold garbage out of vLLM's own prefix cache, where it leaves them.

        It trusts the request that loaded them to compute them again, which one that is preempted or aborted
        before that does not do.
        """
        if pages and self._kv_cache_manager is not None:
            self._kv_cache_manager.evict_blocks(set(pages))

    def _local_cache_is_empty(self) -> bool:
        """Whether no block of vLLM can be shared later: none is named and none in use; False in doubt."""
        pool: Any = getattr(self._kv_cache_manager, "block_pool", None)
        try:
            # one block is always in use: the null block
            free = pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1
            return bool(free and len(pool.cached_block_hash_to_block) == 0)
        except (AttributeError, TypeError):
            return False

    def _plan(self) -> StepPlan:
        envelope = self._connector_metadata
        plan = envelope.plan if isinstance(envelope, UCMStep) else NO_STEP
        return plan if self._worker is None else self._part.of(plan)

    def _backend(self, layer: str) -> Backend:
        """Which code reads and writes the layer's tensor, from vLLM's own register of layers."""
        module = self._vllm_config.compilation_config.static_forward_context.get(layer)
        backend = getattr(module, "get_attn_backend", lambda: None)()
        return Backend(backend.get_name() if backend is not None else None, getattr(module, "isa", None))


def cache_config(extra: Mapping[str, Any]) -> CacheConfig:
    """Settings from ``kv_connector_extra_config``, or from the file named by its only key ``config_file``."""
    if "config_file" not in extra:
        return CacheConfig.load(dict(extra))
    others = sorted(set(extra) - {"config_file"})
    if others:
        raise ConfigError(f"config_file and {', '.join(others)}: put all settings into the file, or none")
    return CacheConfig.load(str(extra["config_file"]))


def _refuse_settings(vllm_config: Any, transfer: Any) -> None:
    """ConfigError, naming the setting, for what cannot work; before any file is touched."""
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy = {transfer.kv_load_failure_policy!r}: a failed load would end the"
            f" request; set kv_load_failure_policy='recompute'"
        )
    parallelism_of(vllm_config, stage_layers=get_pp_indices)


def _follows_events(vllm_config: Any) -> bool:
    settings = getattr(vllm_config, "kv_events_config", None)
    return settings is not None and bool(settings.enable_kv_cache_events)


def _kv_events(happened: Collection[StoredObject]) -> Iterator[KVCacheEvent]:
    """VLLM's events; the fields that this version of vLLM does not have are left out."""
    for each in happened:
        common: dict[str, Any] = {
            "block_hashes": [each.name],
            "medium": "STORAGE",
            "group_idx": each.group,
        }
        more = {
            "parent_block_hash": each.parent,
            "token_ids": list(each.token_ids),
            "block_size": each.block_tokens,
            "lora_id": None,
            "lora_name": None,
            "kv_cache_spec_kind": each.kind,
            "kv_cache_spec_sliding_window": each.window_tokens,
        }
        event, fields = (BlockStored, common | more) if each.stored else (BlockRemoved, common)
        yield event(**{name: value for name, value in fields.items() if name in event.__struct_fields__})


def _join_factory() -> None:
    """Be known by name: vLLM's wrapper of several connectors looks up statistics so."""
    if "UCMConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("UCMConnector", __name__, "UCMConnector")


def _spec_kind(spec: Any) -> str:
    return str(get_kv_cache_spec_kind(spec).value)


_join_factory()
