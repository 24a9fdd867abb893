"""The scheduler's half: how much of a request is cached, plans of loads and saves, what became of them.

The order within one step of vLLM::

    matched_tokens  -> allocated       for each request that is tried (the former any number of times)
    plan_step                          once: loads of this step, saves of what this step completes
    take_report                        once, after the workers

What is promised is leased: pinned in the host ring from `matched_tokens` until the workers report the end of
the load, or until nothing will be loaded for the request.
Nothing here moves bytes. Nothing here promises what it did not just look up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ucm_core.cache import Cache
from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.coordinator import Verdict
from ucm_core.engine_cache import EngineCache
from ucm_core.errors import ConfigError, IdentityError
from ucm_core.ops import border
from ucm_core.ops.border import guarded
from ucm_core.spec.keys import PrefixChain
from ucm_vllm.block_holds import BlockHolds
from ucm_vllm.broken_pages import BrokenPages, PageUse
from ucm_vllm.kv_events import KvEvents, StoredObject
from ucm_vllm.metadata import Handshake, LoadPlan, RowTransfer, SavePlan, StepPlan, WorkerReport
from ucm_vllm.request_identity import RequestIdentities
from ucm_vllm.request_records import RequestRecord, RequestRecords
from ucm_vllm.save_plans import SavePlanner
from ucm_vllm.spec_from_engine import EngineSpec
from ucm_vllm.state_retention import StateRetention
from ucm_vllm.transfer_plans import Tables, TransferPlanner

TAIL_TOKENS = 1
"""The last token is always computed, for its logits."""


class SchedulerHalf:
    """Lives in the process of vLLM's scheduler; its methods are called by that one thread."""

    def __init__(
        self,
        spec: EngineSpec,
        cache: EngineCache,
        *,
        saves: bool,
        loads: bool,
        identities: RequestIdentities | None = None,
    ) -> None:
        self._spec = spec
        self._cache = cache
        self._saves_allowed = saves
        self._loads_allowed = loads
        self._planner = TransferPlanner(spec)
        self._events: KvEvents | None = None
        self._saver = self._new_saver()
        self._holds = BlockHolds()
        self._records = RequestRecords(
            identities or RequestIdentities(), grain_tokens=spec.table.grain_tokens
        )
        self._broken = BrokenPages(next(iter(spec.rows.values()))[0].page_tokens)
        self._loads: list[LoadPlan] = []
        self._uses: tuple[PageUse, ...] = ()
        self._reread: Mapping[str, Collection[int]] = {}
        self._failures_seen = 0
        self._worker_ready = False
        self._step = 0
        self._hold_saves_until = 0
        self._step_seen = 0
        self._ended: Counter[Attempt] = Counter()

    @property
    def request_count(self) -> int:
        """Requests that are remembered; 0 once vLLM has finished all."""
        return len(self._records)

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether vLLM will get blocks of finished requests back without doing anything for it."""
        return self._holds.waiting

    @property
    def state_rows(self) -> tuple[str, ...]:
        """Names of the rows that hold states."""
        return tuple(row.name for row in self._spec.table.snapshot_rows)

    def follow_events(self) -> None:
        """Remember from now on what the workers say of the medium, for `take_events`."""
        self._events = KvEvents(self._spec)
        self._saver = self._new_saver()

    def take_events(self) -> list[StoredObject]:
        """What came to the medium and went since the last call; nothing where nobody follows."""
        return [] if self._events is None else self._events.take()

    # -- before a step

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded past ``local_tokens``, asynchronously?); (0, False) in any doubt.

        (None, False), "ask again", once after an asynchronous load that failed. vLLM has taken the request's
        blocks back by then, but keeps it in front of those that hold some; if it finds no room there it never
        gets to them, and they never give up theirs. "Ask again" puts it among those that hold none.
        """
        self._let_go(request.request_id, unless=request)
        record = self._records.begin(request, local_tokens)
        if record.stand_back():
            self._let_go(request.request_id)
            return None, False
        new_tokens = self._promise(record)
        if new_tokens > 0:
            return new_tokens, self._spec.loads_asynchronously
        self._let_go(request.request_id)
        return 0, False

    def _promise(self, record: RequestRecord) -> int:
        """Tokens that can be loaded for the request, which are leased from now on; 0 in any doubt."""
        cache, request_tokens = self._cache.current, record.request.num_tokens
        chain = record.chain_to(request_tokens)
        if (
            cache is None
            or chain is None
            or not (self._worker_ready and self._loads_allowed and record.may_load)
        ):
            return 0
        verdict = self._verdict(cache, chain, request_tokens, local_tokens=record.local_tokens)
        if record.common_tokens is None:
            served = max(verdict.hit.resume_tokens, record.local_tokens)
            record.common_tokens = self._saver.retention.see(chain, served_tokens=served)
        if cache.config.prefetch_on_lookup:
            verdict = cache.prefetch(verdict)  # its reads end with the lease
        cache.lease(verdict, record.attempt)
        return verdict.hit.new_tokens

    def _let_go(self, request_id: str, *, unless: Any = None) -> None:
        """End the lease of a request, if it is known and is not that of ``unless``."""
        record, cache = self._records.get(request_id), self._cache.current
        if record is not None and cache is not None and record.request is not unless:
            cache.release(record.attempt)

    def allocated(self, request: Any, tables: Tables, *, external_tokens: int) -> None:
        """Plan the load of exactly ``external_tokens``, which may be fewer than promised, or 0."""
        record = self._records.get(request.request_id)
        if external_tokens > 0:
            self._loads.append(self._load_plan(request, record, tables, external_tokens=external_tokens))
        elif record is not None:
            record.end_load()  # vLLM's second call, after an asynchronous load that came
            self._let_go(request.request_id)
        if record is not None:
            self._admit(record, tables, external_tokens)

    @guarded("account", lambda: None)
    def _admit(self, record: RequestRecord, tables: Tables, external_tokens: int) -> None:
        self._broken.renew(tables[0], local_tokens=record.local_tokens)
        record.admit(external_tokens, tables[0])

    def plan_step(self, scheduled: Any) -> StepPlan:
        """The plan for a ``SchedulerOutput``; called every step, empty ones included. Never raises.

        vLLM counts on the loads already: without a plan they go down all the same, to nowhere, and so fail.
        """
        loads, self._loads = tuple(self._loads), []
        overwritten, promised = frozenset(scheduled.preempted_req_ids or ()), self._holds.take_promised()
        self._step += 1
        plan = StepPlan(
            namespace=None,
            loads=loads,
            idle=not scheduled.num_scheduled_tokens,
            failures_seen=self._failures_seen,
            overwritten=overwritten,
            promised=promised,
            number=self._step,
        )
        try:
            plan = self._followed(plan, scheduled)
            return self._with_saves(plan, scheduled)
        except Exception as error:  # noqa: BLE001 (the border: a plan without loads would be a wrong hit)
            border.failed("plan_step", error)
            return replace(plan, broken=self._broken.pages)

    def _followed(self, plan: StepPlan, scheduled: Any) -> StepPlan:
        """The plan with what must be told of blocks that hold garbage, now or if a load of it fails."""
        self._uses = tuple(self._uses_of(scheduled))
        self._reread = self._broken.begin_step(self._uses)
        loads = tuple(
            load if load.asynchronous else replace(load, exposed=self._broken.exposed(load.pages()))
            for load in plan.loads
        )
        return replace(plan, loads=loads, broken=frozenset().union(*self._reread.values()))

    def _uses_of(self, scheduled: Any) -> Iterator[PageUse]:
        block_state, computed = scheduled.kv_connector_block_state, _computed_tokens(scheduled)
        for request_id, count in scheduled.num_scheduled_tokens.items():
            if (tables := block_state.get_block_ids(request_id)) is not None:
                yield PageUse(request_id, tables, computed[request_id], computed[request_id] + count)

    def _with_saves(self, plan: StepPlan, scheduled: Any) -> StepPlan:
        self._hold_saves(plan, scheduled)
        cache = self._cache.current
        if cache is None:
            return plan
        saves = self._saves(cache, scheduled) if self._saves_allowed else ()
        self._holds.planned(saves)
        return replace(
            plan,
            namespace=cache.namespace,
            generation=cache.identity.generation,
            private_token=cache.identity.private_token,
            saves=saves,
            overwritten=plan.overwritten | self._records.take_rewritten(),
            ask=self._step_seen < self._hold_saves_until,
        )

    def _hold_saves(self, plan: StepPlan, scheduled: Any) -> None:
        """Save nothing before it is known how this step ended, where others load: connectors or workers.

        What is computed on the garbage of a load that failed there is garbage here too.
        """
        others = self._holds.workers > 1 and any(not load.asynchronous for load in plan.loads)
        for request in scheduled.scheduled_new_reqs:
            others |= self._is_loaded_by_others(request.req_id, int(request.num_computed_tokens))
        cached = scheduled.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            others |= self._is_loaded_by_others(request_id, int(computed))
        if others:
            self._hold_saves_until = plan.number

    def _is_loaded_by_others(self, request_id: str, computed: int) -> bool:
        record = self._records.get(request_id)
        return record is not None and record.begins_above(computed)

    # -- after a step

    def take_output(
        self,
        report: WorkerReport | None,
        *,
        broken_pages: Collection[int] = (),
        released: Collection[str] = (),
    ) -> None:
        """Learn how a step ended. ``broken_pages`` could not be filled, by us or by another connector.

        ``released``: requests whose blocks vLLM gets back now.
        """
        self._holds.released(released)
        self._broken.fail(frozenset(broken_pages).difference(*self._reread.values()))
        if report is not None:
            self.take_report(report)

    @property
    def broken_pages(self) -> Collection[int]:
        """Engine blocks that hold garbage until they are computed again."""
        return self._broken.pages

    def take_report(self, report: WorkerReport) -> None:
        """Learn what became of loads and saves; what failed is not promised before it is stored again."""
        self._worker_ready = report.namespace is not None
        self._broken.fail(report.broken_pages)
        self._holds.over(report.saved)
        self._step_seen = max(self._step_seen, report.step)
        # only now: a worker saves again once it hears that its failures are known
        self._failures_seen = max(self._failures_seen, report.failures)
        if self._cache.current is not None:
            self._tell(self._cache.current, report)
        failed_ids = {failed.request_id for failed in report.failed}
        for record in filter(None, map(self._records.get, failed_ids)):
            record.load_failed(report.broken_pages, page_tokens=self._broken.page_tokens)
            record.loading = False
        for record in filter(None, map(self._records.get, report.dropped)):
            record.saves_failed += 1
        for request_id in failed_ids | report.dropped:
            self._save_again(request_id)

    def _tell(self, cache: Cache, report: WorkerReport) -> None:
        self._ended.update(report.ended)
        for attempt in [one for one, count in self._ended.items() if count >= self._spec.workers]:
            del self._ended[attempt]
            cache.release(attempt)
        if self._events is not None:
            self._events.add(cache, report.happened)
        for row, keys in report.stored:
            cache.coordinator.saved(row, keys)
        for failed in report.failed:
            if len(failed.keys):
                cache.coordinator.failed(failed.row, failed.keys)
                self._saver.retention.forget(failed.row, failed.keys)

    def finished(self, request_id: str) -> bool:
        """Count and forget the request; whether vLLM must keep its blocks, because saves still read them.

        A load of it that still runs is the worker's to report, and vLLM keeps the blocks for that anyway.
        """
        record = self._records.get(request_id)
        self._forget(request_id)
        return record is not None and not record.loading and self._holds.finish(record.attempt)

    @guarded("finish", lambda: None)  # whatever fails in it, what saves read must be kept
    def _forget(self, request_id: str) -> None:
        try:
            self._let_go(request_id)
        finally:
            self._records.finish(request_id)

    def reset(self, *, local_is_empty: bool = False) -> bool:
        """The weights changed: nothing stored before is found, nothing computed before is stored.

        ``local_is_empty``: vLLM's own prefix cache holds nothing of before either. False when a tier refused:
        this engine finds nothing of before all the same, others may.
        """
        self._records.distrust(local=not local_is_empty)
        everywhere = self._cache.weights_changed()
        self._saver = self._new_saver()
        return everywhere

    def meet(self, handshakes: Collection[Handshake], *, workers: int | None = None) -> None:
        """IdentityError, with digests and first difference, unless the workers run the same model."""
        mine = self._cache.identity
        for handshake in handshakes:
            theirs = handshake.identity
            if theirs is None:
                raise IdentityError(
                    f"the worker half cannot identify the model ({handshake.reason}), the scheduler half can"
                )
            mine.require_same_model(theirs, halves=("scheduler", "worker"))
            self._require_groups(handshake)
        self._holds.workers = max(1, len(handshakes) if workers is None else workers)
        self._worker_ready = bool(handshakes) and all(
            h.identity is not None and h.identity.known for h in handshakes
        )

    def check_integrity(self) -> None:
        """SpecError when the books do not balance."""
        self._holds.check_integrity()

    def _require_groups(self, handshake: Handshake) -> None:
        """Plans name the groups of the first worker: a layer of another one would be left out."""
        for row, theirs in handshake.groups.items():
            mine = tuple(group.index for group in self._spec.rows[row])
            if theirs != mine:
                raise ConfigError(
                    f"row {row!r} lies in vLLM's groups {mine} on the first worker and {theirs} on another;"
                    f" choose another pipeline_parallel_size or VLLM_PP_LAYER_PARTITION"
                )

    def close(self) -> None:
        """Let go of the cache."""
        self._cache.close()

    # -- loads

    def _verdict(
        self, cache: Cache, chain: PrefixChain, request_tokens: int, *, local_tokens: int
    ) -> Verdict:
        return cache.coordinator.verdict(
            chain,
            request_tokens=request_tokens,
            local_tokens=local_tokens,
            tail_tokens=TAIL_TOKENS,
            align_tokens=self._spec.align_tokens,
        )

    def _load_plan(
        self, request: Any, record: RequestRecord | None, tables: Tables, *, external_tokens: int
    ) -> LoadPlan:
        """Exactly [local, resume); reported as failed when some row cannot serve ``resume``."""
        asynchronous, transfers = self._spec.loads_asynchronously, None
        begin, end = 0, request.num_tokens  # where it is not known what vLLM holds: all that it may hold
        use = 0
        if record is not None:
            begin, end = record.local_tokens, record.local_tokens + external_tokens
            record.begin_load(asynchronous=asynchronous)
            use = record.attempt.use
            transfers = self._transfers(record, tables, end)
        possible = transfers is not None
        if transfers is None:
            transfers = self._planner.range_of(begin_tokens=begin, end_tokens=end, tables=tables)
        return LoadPlan(request.request_id, transfers, asynchronous, possible=possible, use=use)

    @guarded("load_plan", lambda: None)
    def _transfers(
        self, record: RequestRecord, tables: Tables, resume_tokens: int
    ) -> tuple[RowTransfer, ...] | None:
        cache, chain = self._cache.current, record.chain_to(resume_tokens)
        if cache is None or chain is None:
            return None
        # vLLM may have room for less than was promised: ask again, as if the request ended there
        asked = resume_tokens + TAIL_TOKENS
        verdict = self._verdict(cache, chain, asked, local_tokens=record.local_tokens)
        if verdict.hit.resume_tokens != resume_tokens:
            return None
        cache.lease(verdict, record.attempt)
        cache.touch(verdict)
        for row in self._spec.table.snapshot_rows:
            self._saver.has_room(cache, row, key=verdict.keys[row.name])
        parents = {
            row: cache.coordinator.parents(chain, row, begin_block=blocks.start, end_block=blocks.stop)
            for row, blocks in verdict.blocks.items()
        }
        return self._planner.load(verdict, tables, parents=parents)

    # -- saves

    def _new_saver(self) -> SavePlanner:
        return SavePlanner(
            self._planner,
            StateRetention(self._spec, self._cache.retention),
            state_rows=tuple(self._spec.table.snapshot_rows),
            tail_tokens=TAIL_TOKENS,
            origins=None if self._events is None else self._events.origins,
        )

    @guarded("save_plan", tuple)
    def _saves(self, cache: Cache, scheduled: Any) -> tuple[SavePlan, ...]:
        return tuple(self._save_plans(cache, scheduled))

    def _save_plans(self, cache: Cache, scheduled: Any) -> Iterator[SavePlan]:
        held = self._step_seen < self._hold_saves_until
        for use in () if held else self._uses:
            record = self._records.get(use.request_id)
            if record is None or use.request_id in self._reread:
                continue
            end = min(use.end_tokens, len(record.request.all_token_ids))  # what is drafted may not stay
            rows = self._saver.blocks(cache, record, tables=use.tables, end_tokens=end)
            if rows:
                yield _save_plan(record, rows, job=f"{self._step}" if self._cache.config.layerwise else "")
        offered = scheduled.kv_connector_block_state.boundary_state_offloads
        for request_id, offers in () if held else offered.items():
            record = self._records.get(request_id)
            if record is not None and (rows := self._saver.states(cache, record, offers=offers)):
                yield _save_plan(record, rows)

    def _save_again(self, request_id: str) -> None:
        """Begin again at block 0: what was planned was not stored, or what was there is not any more."""
        record = self._records.get(request_id)
        if record is not None:
            record.cursors.clear()


def _save_plan(record: RequestRecord, rows: tuple[RowTransfer, ...], *, job: str = "") -> SavePlan:
    attempt = record.attempt
    return SavePlan(attempt.request_id, rows, use=attempt.use, job=job, failed=record.saves_failed)


def _computed_tokens(scheduled: Any) -> Mapping[str, int]:
    """Per scheduled request, the tokens computed before this step."""
    computed = {request.req_id: int(request.num_computed_tokens) for request in scheduled.scheduled_new_reqs}
    cached = scheduled.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, map(int, cached.num_computed_tokens), strict=True))
    return computed
