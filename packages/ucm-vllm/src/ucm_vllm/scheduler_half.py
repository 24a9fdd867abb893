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

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from ucm_core.cache import Cache
from ucm_core.coordinator.coordinator import Verdict
from ucm_core.coordinator.retention import Progress
from ucm_core.errors import IdentityError
from ucm_core.spec.keys import Keys, PrefixChain
from ucm_core.spec.table import SpecRow
from ucm_vllm import border
from ucm_vllm.border import guarded
from ucm_vllm.broken_pages import BrokenPages
from ucm_vllm.engine_cache import EngineCache
from ucm_vllm.metadata import Handshake, LoadPlan, RowTransfer, SavePlan, StepPlan, WorkerReport
from ucm_vllm.request_identity import RequestIdentities
from ucm_vllm.request_records import RequestRecord, RequestRecords
from ucm_vllm.spec_from_engine import EngineSpec
from ucm_vllm.state_retention import StateRetention
from ucm_vllm.transfer_plans import Tables, TransferPlanner, offers_by_position

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
        self._retention = StateRetention(spec, cache.retention)
        self._records = RequestRecords(
            identities or RequestIdentities(), grain_tokens=spec.table.grain_tokens
        )
        self._broken = BrokenPages(next(iter(spec.rows.values()))[0].page_tokens)
        self._loads: list[LoadPlan] = []
        self._step_tables: list[Tables] = []
        self._failures_seen = 0
        self._worker_ready = False

    @property
    def request_count(self) -> int:
        """Requests that are remembered; 0 once vLLM has finished all."""
        return len(self._records)

    @property
    def state_rows(self) -> tuple[str, ...]:
        """Names of the rows that hold states."""
        return tuple(row.name for row in self._spec.table.snapshot_rows)

    # -- before a step

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int, bool]:
        """(tokens that can be loaded past ``local_tokens``, asynchronously?); (0, False) in any doubt."""
        self._let_go(request.request_id, unless=request)
        record = self._records.begin(request, local_tokens)
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
            record.common_tokens = self._retention.see(chain, served_tokens=served)
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
        record.admit(external_tokens, tables[0])

    def plan_step(self, scheduled: Any) -> StepPlan:
        """The plan for a ``SchedulerOutput``; called every step, empty ones included. Never raises.

        vLLM counts on the loads already: without a plan they go down all the same, to nowhere, and so fail.
        """
        loads, self._loads = tuple(self._loads), []
        try:
            return self._step_plan(scheduled, loads)
        except Exception as error:  # noqa: BLE001 (the border: a plan without loads would be a wrong hit)
            border.failed("plan_step", error)
            return StepPlan(namespace=None, loads=loads, failures_seen=self._failures_seen)

    def _step_plan(self, scheduled: Any, loads: tuple[LoadPlan, ...]) -> StepPlan:
        cache = self._cache.current
        saves = self._saves(cache, scheduled) if cache is not None and self._saves_allowed else ()
        return StepPlan(
            namespace=None if cache is None else cache.namespace,
            generation=0 if cache is None else cache.identity.generation,
            private_token="" if cache is None else cache.identity.private_token,
            loads=loads,
            saves=saves,
            idle=not scheduled.num_scheduled_tokens,
            failures_seen=self._failures_seen,
        )

    # -- after a step

    def take_report(self, report: WorkerReport) -> None:
        """Learn what became of loads and saves; what failed is not promised before it is stored again."""
        self._worker_ready = report.namespace is not None
        self._broken.add(report.broken_pages, [tables[0] for tables in self._step_tables])
        # only now: a worker saves again once it hears that its failures are known
        self._failures_seen = max(self._failures_seen, report.failures)
        if self._cache.current is not None:
            self._tell(self._cache.current, report)
        failed_ids = {failed.request_id for failed in report.failed}
        for record in filter(None, map(self._records.get, failed_ids)):
            record.load_failed(report.broken_pages, page_tokens=self._broken.page_tokens)
        for request_id in failed_ids | report.dropped:
            self._save_again(request_id)

    def _tell(self, cache: Cache, report: WorkerReport) -> None:
        for attempt in report.ended:
            cache.release(attempt)
        for row, keys in report.stored:
            cache.coordinator.saved(row, keys)
        for failed in report.failed:
            if len(failed.keys):
                cache.coordinator.failed(failed.row, failed.keys)
                self._retention.forget(failed.row, failed.keys)

    def finished(self, request_id: str) -> None:
        """Count and forget the request; a load of it that still runs is the worker's to report."""
        self._let_go(request_id)
        self._records.finish(request_id)

    def reset(self, *, local_is_empty: bool = False) -> bool:
        """The weights changed: nothing stored before is found, nothing computed before is stored.

        ``local_is_empty``: vLLM's own prefix cache holds nothing of before either. False when a tier refused:
        this engine finds nothing of before all the same, others may.
        """
        self._records.distrust(local=not local_is_empty)
        everywhere = self._cache.weights_changed()
        self._retention = StateRetention(self._spec, self._cache.retention)
        return everywhere

    def meet(self, handshakes: Collection[Handshake]) -> None:
        """IdentityError, with digests and first difference, unless the workers run the same model."""
        mine = self._cache.identity
        for handshake in handshakes:
            theirs = handshake.identity
            if theirs is None:
                raise IdentityError(
                    f"the worker half cannot identify the model ({handshake.reason}), the scheduler half can"
                )
            mine.require_same_model(theirs, halves=("scheduler", "worker"))
        self._worker_ready = bool(handshakes) and all(
            h.identity is not None and h.identity.known for h in handshakes
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
            self._has_room(cache, row, verdict.keys[row.name])
        parents = {
            row: cache.coordinator.parents(chain, row, begin_block=blocks.start, end_block=blocks.stop)
            for row, blocks in verdict.blocks.items()
        }
        return self._planner.load(verdict, tables, parents=parents)

    # -- saves

    @guarded("save_plan", tuple)
    def _saves(self, cache: Cache, scheduled: Any) -> tuple[SavePlan, ...]:
        self._step_tables = []
        return tuple(self._save_plans(cache, scheduled))

    def _save_plans(self, cache: Cache, scheduled: Any) -> Iterator[SavePlan]:
        block_state = scheduled.kv_connector_block_state
        computed = _computed_tokens(scheduled)
        for request_id, count in scheduled.num_scheduled_tokens.items():
            record, tables = self._records.get(request_id), block_state.get_block_ids(request_id)
            if record is None or tables is None:
                continue
            end = min(computed[request_id] + count, len(record.request.all_token_ids))
            self._step_tables.append(tables)
            self._broken.review(record, tables[0], end_tokens=end)
            if rows := self._rows_to_save(cache, record, tables=tables, end_tokens=end):
                yield SavePlan(request_id, rows)
        for request_id, offers in block_state.boundary_state_offloads.items():
            record = self._records.get(request_id)
            if record is not None and (rows := self._states_to_save(cache, record, offers)):
                yield SavePlan(request_id, rows)

    def _rows_to_save(
        self, cache: Cache, record: RequestRecord, *, tables: Tables, end_tokens: int
    ) -> tuple[RowTransfer, ...]:
        chain = record.chain_to(end_tokens) if record.trusted and not record.loading else None
        if chain is None:
            return ()
        found = (
            self._blocks_to_save(cache, record, row, tables=tables, end_tokens=end_tokens)
            for row in self._planner.block_rows
        )
        return tuple(transfer for transfer in found if transfer is not None)

    def _blocks_to_save(
        self, cache: Cache, record: RequestRecord, row: SpecRow, *, tables: Tables, end_tokens: int
    ) -> RowTransfer | None:
        """Blocks ``[cursor, end)`` that the store lacks; the cursor begins at 0, so that holes are filled."""
        begin, end = record.cursors.get(row.name, 0), end_tokens // row.block_tokens
        chain = record.chain
        if begin >= end or chain is None:
            return None
        record.cursors[row.name] = end
        missing = cache.coordinator.missing(chain, row.name, begin_block=begin, end_block=end)
        keys = cache.coordinator.keys(chain, row.name, begin_block=begin, end_block=end)[missing]
        parents = cache.coordinator.parents(chain, row.name, begin_block=begin, end_block=end)
        return self._planner.save_blocks(
            row,
            np.flatnonzero(missing) + begin,
            keys=keys,
            parents=None if parents is None else parents[missing],
            tables=tables,
        )

    def _states_to_save(
        self, cache: Cache, record: RequestRecord, offers: Collection[tuple[int, int, int]]
    ) -> tuple[RowTransfer, ...]:
        """Of each row the states that are worth keeping among those that vLLM offers in this step."""
        by_position = offers_by_position(offers)
        chain = record.chain_to(max(by_position, default=0)) if record.trusted else None
        if chain is None:
            return ()
        progress = Progress(
            record.request.num_prompt_tokens,
            chain.token_count,
            tail_tokens=TAIL_TOKENS,
            common_tokens=record.common_tokens or 0,
        )
        states = (
            self._state_to_save(cache, chain, row, position=position, pages=by_position[position])
            for row in self._spec.table.snapshot_rows
            for position in self._retention.kept(row, by_position, progress=progress)
        )
        return tuple(state for state in states if state is not None)

    def _state_to_save(
        self, cache: Cache, chain: PrefixChain, row: SpecRow, *, position: int, pages: Mapping[int, int]
    ) -> RowTransfer | None:
        """The state, unless it is stored already or others are worth more."""
        block = position // row.block_tokens - 1
        key = cache.coordinator.keys(chain, row.name, begin_block=block, end_block=block + 1)
        if not self._has_room(cache, row, key):
            return None
        missing = cache.coordinator.missing(chain, row.name, begin_block=block, end_block=block + 1)
        return self._planner.state(row, key, pages=pages) if missing.any() else None

    def _has_room(self, cache: Cache, row: SpecRow, key: Keys) -> bool:
        """Count the state under ``key`` (``uint8[1, 32]``) as seen; what is worth too little is dropped."""
        fallen = self._retention.sight(row, key)
        itself = (fallen == key).all(axis=1)
        if len(fallen[~itself]):
            cache.stores[row.name].drop(fallen[~itself])
        return not itself.any()

    def _save_again(self, request_id: str) -> None:
        """Begin again at block 0: what was planned was not stored, or what was there is not any more."""
        record = self._records.get(request_id)
        if record is not None:
            record.cursors.clear()
            record.loading = False


def _computed_tokens(scheduled: Any) -> Mapping[str, int]:
    """Per scheduled request, the tokens computed before this step."""
    computed = {request.req_id: int(request.num_computed_tokens) for request in scheduled.scheduled_new_reqs}
    cached = scheduled.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, map(int, cached.num_computed_tokens), strict=True))
    return computed
