"""The worker's half: moves bytes between vLLM's memory and the store as the step's plan says, and reports.

The order within one step of vLLM::

    start_loads     before the forward when the step waits for a load, else after it
    save            after the forward: every gather is over when it returns, files are written later
    collect         which asynchronous loads ended
    broken_pages    which blocks a synchronous load could not fill
    report          what the scheduler half must know

So no engine block is read or written by UCM between steps except the targets of asynchronous loads, which
vLLM keeps until they are reported; a preemption never meets an unfinished copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucm_core.cache import Cache
from ucm_core.coordinator.attempts import Attempt
from ucm_core.flow.copy import EngineBlocks
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.spec.keys import Keys
from ucm_core.spec.layout import EngineLayout
from ucm_core.spec.table import RowKind
from ucm_vllm import border
from ucm_vllm.block_tables import Mask
from ucm_vllm.engine_cache import EngineCache, Generation
from ucm_vllm.layout_from_engine import Backend, build_layouts
from ucm_vllm.metadata import FailedLoad, Handshake, LoadPlan, RowTransfer, SavePlan, StepPlan, WorkerReport
from ucm_vllm.spec_from_engine import EngineSpec

IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for a load, instead of spinning through empty steps."""


@dataclass(frozen=True, slots=True, eq=False)
class _RunningLoad:
    """A load and the ticket of each of its transfers; None where it could not even begin."""

    plan: LoadPlan
    tickets: tuple[Ticket | None, ...]
    namespace: str | None
    """Where the bytes come from."""

    @property
    def done(self) -> bool:
        return all(ticket is None or ticket.done for ticket in self.tickets)

    def wait(self, timeout_s: float | None = None) -> None:
        for ticket in self.tickets:
            if ticket is not None:
                ticket.wait(timeout_s)

    def failed(self) -> list[FailedLoad]:
        """What did not come; empty when the request can resume."""
        try:
            each = [
                FailedLoad(self.plan.request_id, transfer.row, transfer.keys[mask if ticket else slice(0, 0)])
                for transfer, mask, ticket in zip(self.plan.rows, self._masks(), self.tickets, strict=True)
                if mask.any()
            ]
        except Exception as error:  # noqa: BLE001 (the border: what cannot be read has failed)
            border.failed("load", error)
            each = [self.nothing()]
        return each if each or self.plan.possible else [self.nothing()]

    def failed_pages(self) -> set[int]:
        """Engine blocks that any failed object touches; all when it is not known which."""
        try:
            pages = [
                transfer.pages(mask) for transfer, mask in zip(self.plan.rows, self._masks(), strict=True)
            ]
        except Exception as error:  # noqa: BLE001 (the border: what cannot be read has failed)
            border.failed("load", error)
            pages = []
        return set().union(*pages) or self.plan.pages()

    def nothing(self) -> FailedLoad:
        """A failure of the whole that no object is to blame for."""
        return FailedLoad(self.plan.request_id, "", np.zeros((0, 32), dtype=np.uint8))

    def _masks(self) -> list[Mask]:
        return [_failed_objects(*pair) for pair in zip(self.plan.rows, self.tickets, strict=True)]


class WorkerHalf:
    """Lives in the worker's process; its methods are called by that one thread."""

    def __init__(self, spec: EngineSpec, cache: EngineCache) -> None:
        self._spec = spec
        self._cache = cache
        self._layouts: dict[tuple[str, int], EngineLayout] = {}
        self._tensors: Mapping[str, Any] = {}
        self._pending: dict[str, _RunningLoad] = {}
        self._saving: list[tuple[str, Keys, Ticket]] = []
        self._writing: list[Ticket] = []
        self._broken: set[int] = set()
        self._failures = 0
        self._news = _News()

    @property
    def pending_count(self) -> int:
        """Asynchronous loads that were not reported yet."""
        return len(self._pending)

    def register(
        self, kv_caches: Mapping[str, Any], *, num_blocks: int, backend_of: Callable[[str], Backend]
    ) -> None:
        """Learn where vLLM keeps each layer; LayoutError, naming the layer, for what cannot be read."""
        self._layouts = build_layouts(
            self._spec.table,
            self._spec.rows,
            kv_caches=kv_caches,
            num_blocks=num_blocks,
            backend_of=backend_of,
        )
        self._tensors = dict(kv_caches)  # addresses in the layouts stay valid as long as these live

    def handshake(self) -> Handshake:
        """What the scheduler half compares with its own."""
        return Handshake(self._cache.identity)

    # -- the step

    def start_loads(self, plan: StepPlan) -> None:
        """Begin all loads; returns when the synchronous ones have ended, well or not."""
        if not plan.loads:
            return
        cache = self._follow(plan)
        running = [self._begin(cache, load, plan.namespace) for load in plan.loads]
        for load in running:
            if load.plan.asynchronous:
                self._pending[load.plan.request_id] = load
            else:
                load.wait()
                self._end_synchronous(load, plan.namespace)

    def save(self, plan: StepPlan) -> None:
        """Gather all that the step completed. Nothing is saved that may have been computed on garbage."""
        if not plan.saves:
            return
        cache = self._follow(plan)
        for request in plan.saves:
            if cache is None or plan.failures_seen < self._failures or request.request_id in self._pending:
                self._news.dropped.add(request.request_id)
            else:
                self._save_request(cache, request)

    def collect(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """(requests whose asynchronous load ended, those of them that failed); each id once, ever."""
        if plan.idle and self._pending:
            next(iter(self._pending.values())).wait(IDLE_WAIT_S)
        ended = [request_id for request_id, load in self._pending.items() if load.done]
        failed = {
            request_id for request_id in ended if self._end(self._pending.pop(request_id), plan.namespace)
        }
        return set(ended), failed

    def broken_pages(self) -> set[int]:
        """Engine blocks that synchronous loads of this step could not fill; asked once per step."""
        broken, self._broken = self._broken, set()
        return broken

    def report(self) -> WorkerReport | None:
        """What happened since the last report; None when nothing did."""
        self._collect_saves()
        cache = self._cache.current
        return self._news.take(None if cache is None else cache.namespace, self._failures)

    def wait_durable(self, timeout_s: float) -> bool:
        """Wait until everything saved so far is on the medium; False when some is not, or not in time."""
        deadline = time.monotonic() + timeout_s
        return all(ticket.wait_durable(max(0.0, deadline - time.monotonic())) for ticket in self._writing)

    def close(self) -> None:
        """Let loads end (they write to the engine's memory); close the cache, which says what it lost."""
        for load in self._pending.values():
            load.wait()
        self._pending.clear()
        self._cache.close()

    # -- loads

    def _follow(self, plan: StepPlan) -> Cache | None:
        try:
            return self._cache.follow(plan.namespace, Generation(plan.generation, plan.private_token))
        except Exception as error:  # noqa: BLE001 (the border: a cache that cannot be opened is a miss)
            border.failed("follow", error)
            return None

    def _begin(self, cache: Cache | None, load: LoadPlan, namespace: str | None) -> _RunningLoad:
        return _RunningLoad(
            load, tuple(self._load(cache, load, transfer) for transfer in load.rows), namespace
        )

    def _load(self, cache: Cache | None, load: LoadPlan, transfer: RowTransfer) -> Ticket | None:
        if cache is None or not load.possible:
            return None
        try:
            target = self._engine_blocks(transfer)
            return cache.stores[transfer.row].load(transfer.keys, target, parents=transfer.parents)
        except Exception as error:  # noqa: BLE001 (the border: this load failed, the others go on)
            border.failed("load", error)
            return None

    def _end_synchronous(self, load: _RunningLoad, namespace: str | None) -> None:
        if self._end(load, namespace):
            self._failures += 1
            self._broken |= load.failed_pages()
            self._news.broken_pages |= self._broken

    def _end(self, load: _RunningLoad, namespace: str | None) -> bool:
        """Note what failed; True when anything did.

        ``namespace`` is where the scheduler half is by now: if it moved on while the load ran, the bytes are
        those of weights that are gone.
        """
        failed = load.failed()
        if not failed and load.namespace != namespace:
            failed = [load.nothing()]
        self._news.failed += failed
        self._news.ended.add(load.plan.attempt)
        if failed:
            rows = ", ".join(sorted({each.row for each in failed if each.row}))
            border.complaints.say(
                "load",
                f"request {load.plan.request_id}: objects of {rows or 'no row'} did not load",
            )
        return bool(failed)

    def _engine_blocks(self, transfer: RowTransfer, *, block_tokens: int | None = None) -> EngineBlocks:
        layouts = [self._layouts[transfer.row, group] for group, _ in transfer.pieces]
        return EngineBlocks(layouts, [pieces for _, pieces in transfer.pieces], block_tokens=block_tokens)

    # -- saves

    def _save_request(self, cache: Cache, request: SavePlan) -> None:
        for transfer in request.rows:
            try:
                row = self._spec.table.row(transfer.row)
                whole = 1 if row.kind is RowKind.SNAPSHOT else row.block_tokens
                source = self._engine_blocks(transfer, block_tokens=whole)
                ticket = cache.stores[transfer.row].save(transfer.keys, source, parents=transfer.parents)
            except Exception as error:  # noqa: BLE001 (the border: these bytes are not kept, the engine goes on)
                border.failed("save", error)
                self._news.dropped.add(request.request_id)
            else:
                self._saving.append((transfer.row, transfer.keys, ticket))
                self._writing.append(ticket)

    def _collect_saves(self) -> None:
        still_saving = []
        for row, keys, ticket in self._saving:
            if not ticket.done:
                still_saving.append((row, keys, ticket))
                continue
            kept = ticket.stored
            if kept.any():
                self._news.stored.append((row, keys[kept]))
        self._saving = still_saving
        self._writing = [
            ticket for ticket in self._writing if (ticket.durable_results == ResultCode.PENDING).any()
        ]


class _News:
    """What the next report will say."""

    def __init__(self) -> None:
        self.failed: list[FailedLoad] = []
        self.dropped: set[str] = set()
        self.ended: set[Attempt] = set()
        self.stored: list[tuple[str, Keys]] = []
        self.broken_pages: set[int] = set()
        self._told: tuple[str | None, int] = (None, 0)

    def take(self, namespace: str | None, failures: int) -> WorkerReport | None:
        """The report, or None when it would say nothing new."""
        news = self.failed or self.dropped or self.stored or self.ended
        if not news and self._told == (namespace, failures):
            return None
        report = WorkerReport(
            namespace=namespace,
            failed=tuple(self.failed),
            broken_pages=frozenset(self.broken_pages),
            dropped=frozenset(self.dropped),
            ended=frozenset(self.ended),
            stored=tuple(self.stored),
            failures=failures,
        )
        self.__init__()  # type: ignore[misc]
        self._told = (namespace, failures)
        return report


def _failed_objects(transfer: RowTransfer, ticket: Ticket | None) -> Mask:
    """Which objects are not where they belong; a transfer of nothing cannot fail."""
    if ticket is None:
        return np.ones(len(transfer.keys), dtype=np.bool_)
    failed: Mask = ticket.object_results != ResultCode.OK
    return failed
