"""Doubles for the scheduler half: a cache that is only a set of keys, and the steps of a scheduler.

Requests, block state and scheduler output are vLLM's own classes; what stands in is the store (keys without
bytes) and the scheduler (block tables written by the test).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.request import Request

from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.coordinator import Coordinator
from ucm_core.coordinator.leases import LeasedRow, Leases
from ucm_core.coordinator.retention import DEFAULT, RetentionPolicy
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.keys import row_seed
from ucm_core.spec.table import SpecTable
from ucm_vllm.metadata import RowTransfer, WorkerReport
from ucm_vllm.scheduler_half import SchedulerHalf
from ucm_vllm.spec_from_engine import EngineSpec

IDENTITY = ModelIdentity(
    config="{}",
    weights="ab" * 32,
    revision=None,
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    table="cd" * 32,
)
Tables = tuple[list[int], ...]


class KeysOnly:
    """A double of `ucm_core.Cache`: a real coordinator over sets of keys."""

    def __init__(self, table: SpecTable, identity: ModelIdentity = IDENTITY) -> None:
        self.identity = identity
        self.config = CacheConfig()
        self.present: dict[str, set[bytes]] = {row.name: set() for row in table.rows}
        lookups = {row.name: self._lookup(row.name) for row in table.rows}
        seeds = {row.name: row_seed(identity.digest, row.name) for row in table.rows}
        self.coordinator = Coordinator(table, lookups, seeds)
        self.pins: Counter[str] = Counter()
        """Objects pinned now, by row."""
        self.leases = Leases({row.name: LeasedRow(self._pin(row.name), 1000) for row in table.rows})

    @property
    def namespace(self) -> str:
        return self.identity.namespace

    @property
    def stores(self) -> dict[str, Any]:
        """Doubles of the stores: they can only drop."""
        return {row: SimpleNamespace(drop=partial(self.drop, row)) for row in self.present}

    def touch(self, verdict: Any) -> None:
        """The double keeps no age."""

    def lease(self, verdict: Any, use: Attempt) -> Any:
        return replace(verdict, lease=self.leases.take(use, verdict.keys))

    def release(self, use: Attempt) -> None:
        self.leases.release(use)

    def keep(self, transfer: RowTransfer) -> None:
        """What a worker does with a save, without bytes."""
        self.present[transfer.row] |= {key.tobytes() for key in transfer.keys}
        self.coordinator.saved(transfer.row, transfer.keys)

    def drop(self, row: str, keys: np.ndarray) -> None:
        self.present[row] -= {key.tobytes() for key in keys}

    def _lookup(self, row: str) -> Any:
        return lambda keys: np.array([key.tobytes() in self.present[row] for key in keys], dtype=np.bool_)

    def _pin(self, row: str) -> Any:
        def pin(keys: np.ndarray) -> Any:
            self.pins[row] += len(keys)
            return SimpleNamespace(keys=keys, release=lambda: self.pins.subtract({row: len(keys)}))

        return pin


class KeysOnlyEngine:
    """A double of `EngineCache`."""

    def __init__(self, table: SpecTable, policy: RetentionPolicy) -> None:
        self._table = table
        self.config = CacheConfig()
        self.retention = {row.name: policy for row in table.snapshot_rows}
        self.current: KeysOnly | None = KeysOnly(table)

    @property
    def identity(self) -> ModelIdentity:
        return IDENTITY if self.current is None else self.current.identity

    def weights_changed(self) -> bool:
        if self.current is not None:
            self.current.leases.close()
        self.current = KeysOnly(
            self._table, self.identity.with_generation(self.identity.generation + 1, "secret")
        )
        return True

    def close(self) -> None:
        if self.current is not None:
            self.current.leases.close()
        self.current = None


def request(tokens: int, request_id: str = "r", first: int = 3) -> Request:
    prompt = [(first + 7 * i) % 500 for i in range(tokens)]
    return Request(request_id, prompt, SamplingParams(max_tokens=64), None)


class Engine:
    """A scheduler half that is ready, and the vLLM around it as far as it is asked."""

    def __init__(self, spec: EngineSpec, policy: RetentionPolicy = DEFAULT, **roles: bool) -> None:
        self.cache = KeysOnlyEngine(spec.table, policy)
        self.half = SchedulerHalf(spec, self.cache, **{"saves": True, "loads": True} | roles)  # type: ignore[arg-type]
        self.tell(namespace=IDENTITY.namespace)

    @property
    def keys(self) -> KeysOnly:
        assert self.cache.current is not None
        return self.cache.current

    def tell(self, **report: Any) -> None:
        self.half.take_report(WorkerReport(**{"namespace": IDENTITY.namespace} | report))

    def step(
        self,
        *scheduled: tuple[Request, int, int, Tables],
        offers: dict[str, list[tuple[int, int, int]]] | None = None,
    ) -> Any:
        """Plan a step of (request, computed before, scheduled, block tables)."""
        return self.half.plan_step(scheduler_output(scheduled, offers or {}))

    def run(self, *scheduled: tuple[Request, int, int, Tables], **more: Any) -> Any:
        """Plan a step and keep everything that it saves."""
        plan = self.step(*scheduled, **more)
        for save in plan.saves:
            for transfer in save.rows:
                self.keys.keep(transfer)
        return plan


def balanced(engine: Engine) -> Iterator[Engine]:
    """For a fixture: afterwards nothing is remembered or pinned, once all requests have ended."""
    yield engine
    for request_id in list(engine.half._records._records):
        engine.half.finished(request_id)
    assert engine.half.request_count == 0
    if engine.cache.current is not None:
        engine.keys.leases.check_integrity()
        assert not +engine.keys.pins


def scheduler_output(
    scheduled: Any, offers: dict[str, list[tuple[int, int, int]]], *, preempted: set[str] | None = None
) -> SchedulerOutput:
    tables = {asked.request_id: table for asked, _, _, table in scheduled}
    cached = CachedRequestData.make_empty()
    cached.req_ids = [asked.request_id for asked, computed, _, _ in scheduled if computed]
    cached.num_computed_tokens = [computed for _, computed, _, _ in scheduled if computed]
    new = [
        SimpleNamespace(req_id=asked.request_id, num_computed_tokens=0)
        for asked, c, _, _ in scheduled
        if not c
    ]
    counts = {asked.request_id: count for asked, _, count, _ in scheduled}
    return SchedulerOutput(
        scheduled_new_reqs=_as_new(new),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        num_common_prefix_blocks=[],
        preempted_req_ids=preempted,
        kv_connector_block_state=KVConnectorBlockState(
            req_ids=set(tables) | set(offers),
            resolve_block_ids=tables.__getitem__,
            boundary_state_offloads=offers,
        ),
    )


def _as_new(requests: list[SimpleNamespace]) -> list[NewRequestData]:
    return requests  # type: ignore[return-value]


def saved(plan: Any, row: str = "full") -> list[tuple[int, int, int]]:
    """(group, engine block, tokens) of everything of ``row`` that the plan saves, in order."""
    transfers = [transfer for save in plan.saves for transfer in save.rows if transfer.row == row]
    return [
        (group, int(piece[2]), int(piece[4]))
        for transfer in transfers
        for group, pieces in transfer.pieces
        for piece in pieces
    ]
