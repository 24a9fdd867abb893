"""The worker's half: moves bytes between vLLM's memory and the store as the step's plan says, and reports.

The order within one step of vLLM::

    before_step     before anything is written: older saves read no block that the step may overwrite
    start_loads     before the forward when the step waits for a load, else after it
    before_layer    of each attention layer: its part of the loads has come, or failed
    after_layer     of each attention layer: its part of the saves may be read
    end_step        after the forward: states are copied; what the layers saved is read on
    collect         which asynchronous loads ended, and whose blocks vLLM may have back
    broken_pages    which blocks the loads of this step could not fill, or those of a step before
    report          what the scheduler half must know

With speculative decoding vLLM may repeat layers, and ask for results before the step has ended.
Between steps UCM writes the targets of asynchronous loads, which vLLM keeps until they are reported, and
reads blocks that it saves: see `ucm_vllm.worker_saves`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ucm_core.cache import Cache
from ucm_core.engine_cache import EngineCache, Generation
from ucm_core.flow.handles import ComputeEvent
from ucm_core.flow.pipeline import LayerPipeline
from ucm_core.flow.trace import Trace
from ucm_core.ops import border
from ucm_vllm.device_events import event_recorder
from ucm_vllm.engine_memory import EngineMemory
from ucm_vllm.layout_from_engine import Backend
from ucm_vllm.metadata import Handshake, StepPlan, WorkerReport
from ucm_vllm.object_events import ObjectEvents
from ucm_vllm.spec_from_engine import EngineSpec
from ucm_vllm.worker_loads import WorkerLoads
from ucm_vllm.worker_news import News
from ucm_vllm.worker_saves import WorkerSaves

NO_STEP = StepPlan(namespace=None)


class WorkerHalf:
    """Lives in the worker's process; its methods are called by that one thread.

    ``worker`` is its number among the workers of the engine.
    """

    def __init__(self, spec: EngineSpec, cache: EngineCache, *, worker: int = 0) -> None:
        layerwise = cache.config.layerwise
        self._cache, self._worker = cache, worker
        self._events: ObjectEvents | None = None
        self._news = News()
        self._groups = {row: tuple(group.index for group in groups) for row, groups in spec.rows.items()}
        self._always = spec.workers > 1  # of several workers who is silent would not be counted
        self._memory = EngineMemory(spec)
        self._loads = WorkerLoads(self._memory, self._news, layerwise=layerwise)
        self._saves = WorkerSaves(spec.table, self._memory, self._news, layerwise=layerwise, worker=worker)
        self._pipeline: LayerPipeline | None = None
        self._record: Callable[[], ComputeEvent | None] = lambda: None
        self._step = NO_STEP
        self._step_cache: Cache | None = None
        self._piped: LayerPipeline | None = None  # while the step has loads or saves that come layer by layer
        self._last_step = 0
        # vLLM gives each step a plan of its own, and may call a hook of it twice or not at all
        self._begun = self._heard = NO_STEP

    @property
    def pending_count(self) -> int:
        """Asynchronous loads that were not reported yet."""
        return len(self._loads.pending)

    @property
    def open_saves(self) -> int:
        """Saves that still read the engine's blocks."""
        return self._saves.open_count

    def register(
        self, kv_caches: Mapping[str, Any], *, num_blocks: int, backend_of: Callable[[str], Backend]
    ) -> None:
        """Learn where vLLM keeps each layer; LayoutError, naming the layer, for what cannot be read."""
        self._memory.register(kv_caches, num_blocks=num_blocks, backend_of=backend_of)
        trace = Trace(self._cache.config.trace_dir)
        self._pipeline = LayerPipeline(self._memory.units, layers=self._memory.layers, trace=trace)
        self._record = event_recorder(self._memory.device)

    def handshake(self) -> Handshake:
        """What the scheduler half compares with its own."""
        return Handshake(self._cache.identity, groups=self._groups)

    def follow_events(self) -> None:
        """Tell from now on what comes to the medium and goes. One worker does, for all."""
        self._events = ObjectEvents() if self._worker == 0 else None

    # -- the step

    def before_step(self, plan: StepPlan) -> None:
        """Before the step writes anything."""
        self._saves.settle(plan)

    def start_loads(self, plan: StepPlan) -> None:
        """Begin all loads; returns when those that do not come layer by layer have ended, well or not."""
        self._begin(plan)
        self._begin_asynchronous(plan)
        self._loads.wait_whole()

    def before_layer(self, plan: StepPlan, name: str) -> None:
        """Wait for what the layer needs; what is not there by then has failed."""
        self._begin(plan)
        if self._piped is not None and (layer := self._memory.layer(name)) is not None:
            self._piped.before_layer(layer)

    def after_layer(self, plan: StepPlan, name: str) -> None:
        """Save what the layer has finished."""
        self._begin(plan)
        if self._piped is not None and (layer := self._memory.layer(name)) is not None:
            self._piped.after_layer(layer, computed=self._record())

    def end_step(self, plan: StepPlan) -> None:
        """Save the rest of what the step completed; nothing that may have been computed on garbage."""
        self._begin(plan)
        trusted = plan.failures_seen >= self._loads.failures and self._loads.are_fine()
        computed = None
        try:
            computed = self._record() if self._piped is not None else None
        except Exception as error:  # noqa: BLE001 (the border: nothing says when its bytes are final)
            border.failed("compute_event", error)
            trusted = False
        if not trusted:
            self._saves.give_up_step()
        piped, self._piped = self._piped, None
        failed = {} if piped is None else piped.end_step(computed=computed, share_blocks=True).failed
        self._loads.judge(plan.namespace, failed)
        trusted &= plan.failures_seen >= self._loads.failures
        self._saves.end_step(self._step_cache, trusted=trusted)
        if plan.ask:
            self._last_step = plan.number

    def collect(self, plan: StepPlan) -> tuple[set[str], set[str], set[str]]:
        """Requests: whose asynchronous load ended, of those the failed ones, whose blocks vLLM may have back.

        Each id once, ever.
        """
        if any(load.asynchronous for load in plan.loads):
            self._begin(plan)
            self._begin_asynchronous(plan)
        heard = plan if plan is not self._heard else replace(plan, promised=())
        self._heard = plan
        return *self._loads.collect(plan), self._saves.collect(heard)

    def broken_pages(self, plan: StepPlan) -> set[int]:
        """Engine blocks that loads could not fill and that this step read; asked once per step."""
        # with a draft model, whose layers UCM does not cache, vLLM asks before the step is over
        failed = {} if self._piped is None else self._piped.end_loads()
        self._loads.judge(self._step.namespace, failed)
        return self._loads.take_broken_pages() | plan.broken

    def report(self) -> WorkerReport | None:
        """What happened since the last report; None when nothing did."""
        self._saves.report()
        cache = self._cache.current
        if self._events is not None:
            self._news.happened += self._events.take(cache)
        namespace = None if cache is None else cache.namespace
        failures, step = self._loads.failures, self._last_step
        return self._news.take(namespace, failures=failures, step=step, always=self._always)

    def wait_durable(self, timeout_s: float) -> bool:
        """Wait until everything saved so far is on the medium; False when some is not, or not in time."""
        return self._saves.wait_durable(timeout_s)

    def check_integrity(self) -> None:
        """SpecError when the books do not balance."""
        self._saves.check_integrity()

    def close(self) -> None:
        """Let loads and saves leave the engine's memory; close the cache, which says what it lost."""
        self._loads.close()
        self._saves.close()
        if self._pipeline is not None:
            self._pipeline.close()
        self._cache.close()

    # -- private

    def _begin(self, plan: StepPlan) -> None:
        """Begin the step of ``plan``, unless that was done: its first hook may be any."""
        if plan is self._step:
            return
        if self._piped is not None:  # the end of the step before never came
            self._saves.give_up_step()
            self._loads.judge(plan.namespace, self._piped.end_loads())
        self._step, self._piped = plan, None
        self._step_cache = self._follow(plan) if plan.loads or plan.saves else None
        try:
            self._begin_layers(plan)
        except Exception as error:  # noqa: BLE001 (the border: what did not begin has failed when the step ends)
            border.failed("begin_step", error)
            self._saves.give_up_step()
            self._loads.judge(plan.namespace)

    def _begin_asynchronous(self, plan: StepPlan) -> None:
        """Begin the asynchronous loads of ``plan``, once: vLLM waits for each of them to be reported."""
        if plan is not self._begun:
            self._begun = plan
            self._loads.begin_asynchronous(self._step_cache, plan)

    def _begin_layers(self, plan: StepPlan) -> None:
        loads = self._loads.begin_step(self._step_cache, plan)
        trusted = plan.failures_seen >= self._loads.failures
        saves = self._saves.begin_step(self._step_cache if trusted else None, plan)
        traced = self._cache.config.trace_dir is not None
        if self._pipeline is not None and (loads or saves or traced):
            self._pipeline.begin_step(loads, saves)
            self._piped = self._pipeline

    def _follow(self, plan: StepPlan) -> Cache | None:
        try:
            return self._cache.follow(plan.namespace, Generation(plan.generation, plan.private_token))
        except Exception as error:  # noqa: BLE001 (the border: a cache that cannot be opened is a miss)
            border.failed("follow", error)
            return None
