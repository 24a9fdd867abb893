"""`UCMConnector`: vLLM's V1 KV connector. The only module with engine class names; it decides nothing itself.

Each hook goes to the scheduler half or the worker half, through one border that turns whatever fails into a
miss. Only start-up invariants raise: a setting that cannot work, a model whose layers the table does not
cover, a tensor that cannot be read for certain, two halves that run different models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import vllm
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
from vllm.v1.core.sched import output as engine_output
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from ucm_core.errors import ConfigError, IdentityError
from ucm_core.ops.config import CacheConfig
from ucm_vllm import border, versions
from ucm_vllm.border import guarded
from ucm_vllm.engine_cache import EngineCache, refuse_root
from ucm_vllm.identity_from_engine import engine_model, refuse_parallelism
from ucm_vllm.layout_from_engine import Backend
from ucm_vllm.metadata import Handshake, StepPlan, WorkerReport
from ucm_vllm.scheduler_half import SchedulerHalf
from ucm_vllm.spec_from_engine import EngineSpec, engine_spec
from ucm_vllm.worker_half import WorkerHalf

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


class UCMConnector(KVConnectorBase_V1, SupportsHMA):
    """UCM's connector; its settings are the keys of ``kv_connector_extra_config``.

    ``kv_connector="UCMConnector"``, ``kv_connector_module_path="ucm_vllm"``, ``kv_role="kv_both"`` and
    ``kv_load_failure_policy="recompute"``.
    """

    _cache_hit_source = getattr(getattr(engine_base, "CacheHitSource", None), "DISK", None)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        border.join_log("vllm")
        versions.probe(vllm.__version__, base=engine_base, output=engine_output).require()
        transfer = self._kv_transfer_config
        _refuse_settings(vllm_config, transfer)
        config = cache_config(transfer.kv_connector_extra_config)
        refuse_root(config.root)
        self._reason = ""
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        parts = self._identify(vllm_config, kv_cache_config, config)
        if parts is None:
            return
        spec, cache = parts
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                spec, cache, saves=transfer.is_kv_producer, loads=transfer.is_kv_consumer
            )
        else:
            self._worker = WorkerHalf(spec, cache)

    def _identify(
        self, vllm_config: Any, kv_cache_config: Any, config: CacheConfig
    ) -> tuple[EngineSpec, EngineCache] | None:
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
        spec = engine_spec(model.table, groups, spec_kind=_spec_kind, engine_align_tokens=align)
        return spec, EngineCache(model, config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: a save that does not happen is a later miss."""
        return False

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
            self._scheduler.meet([envelope.handshake for envelope in metadata.values()])

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
        """See `SchedulerHalf.take_report`."""
        envelope = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(envelope, UCMReport):
            self._scheduler.take_report(envelope.report)

    @guarded("request_finished", lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks may go, because every save has copied what it needs."""
        del block_ids
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same for an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded("reset_cache", lambda: False)
    def reset_cache(self) -> bool | None:
        """The weights changed: that is what vLLM means by it."""
        if self._scheduler is None:
            return None
        return self._scheduler.reset(local_is_empty=self._local_cache_is_empty())

    # -- the worker's hooks

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `WorkerHalf.start_loads`, which turns every failure into a failed load."""
        del forward_context, kwargs
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: `start_load_kv` returns when the whole request is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing yet: `wait_for_save` takes all layers at once."""

    @guarded("wait_for_save", lambda: None)
    def wait_for_save(self) -> None:
        """See `WorkerHalf.save`."""
        if self._worker is not None:
            self._worker.save(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `get_transfer_results`, which vLLM asks instead."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    @guarded("get_transfer_results", KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See `WorkerHalf.collect`."""
        del finished_req_ids
        if self._worker is None:
            return KVConnectorTransferResults()
        ended, failed = self._worker.collect(self._plan())
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `WorkerHalf.broken_pages`."""
        return set() if self._worker is None else self._worker.broken_pages()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing is pending here.

        Saves have copied when `wait_for_save` returns, and vLLM preempts no request that still loads.
        """

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
        return envelope.plan if isinstance(envelope, UCMStep) else StepPlan(namespace=None)

    def _backend(self, layer: str) -> Backend:
        """Which code reads and writes the layer's tensor, from vLLM's own register of layers."""
        module = self._vllm_config.compilation_config.static_forward_context.get(layer)
        backend = getattr(module, "attn_backend", None)
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
    refuse_parallelism(vllm_config)


def _spec_kind(spec: Any) -> str:
    return str(get_kv_cache_spec_kind(spec).value)
