"""The worker's loads: those that a step waits for, layer by layer or whole, and asynchronous ones."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from ucm_core.cache import Cache
from ucm_core.flow.handles import UnitLoad
from ucm_core.flow.pipeline import StepLoad
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.ops import border
from ucm_vllm.block_tables import Mask
from ucm_vllm.engine_memory import EngineMemory
from ucm_vllm.metadata import FailedLoad, LoadPlan, RowTransfer, StepPlan
from ucm_vllm.worker_news import News

WHOLE_WAIT_S = 60.0
"""How long a step waits for all that does not come layer by layer: a medium may hang for ever."""

ASYNCHRONOUS_WAIT_S = 300.0
"""How long a request waits for an asynchronous load: more than any that goes on takes."""

IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for a load, instead of spinning through empty steps."""


NOTHING: Mapping[Any, Mapping[str, Mask]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class RunningLoad:
    """A load and the ticket of each of its transfers; None where it could not even begin."""

    plan: LoadPlan
    tickets: tuple[Ticket | None, ...]
    namespace: str | None
    """Where the bytes come from."""
    late: dict[str, Mask] = field(default_factory=dict)
    """Per row the objects that did not come before they were used."""
    ends_s: float = math.inf
    """When it is given up, on the monotonic clock."""

    @property
    def done(self) -> bool:
        """Whether nothing of it is written to the engine any more."""
        return all(ticket is None or ticket.done for ticket in self.tickets)

    def wait(self, deadline: float) -> None:
        """Wait until it is done, until ``deadline`` on the monotonic clock."""
        for ticket in self.tickets:
            if ticket is not None:
                ticket.wait(max(0.0, deadline - time.monotonic()))

    def give_up(self) -> None:
        """Nothing of it comes any more when this returns: waits for what is being copied, not for files."""
        for transfer, ticket in zip(self.plan.rows, self.tickets, strict=True):
            if ticket is not None:
                pending: Mask = ticket.object_results == ResultCode.PENDING
                self.late[transfer.row] = self.late.get(transfer.row, np.bool_(False)) | pending
                ticket.abandon()
        for ticket in self.tickets:
            if ticket is not None:
                ticket.wait()

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
        return [
            failed_objects(transfer, ticket) | self.late.get(transfer.row, np.bool_(False))
            for transfer, ticket in zip(self.plan.rows, self.tickets, strict=True)
        ]


class WorkerLoads:
    """Loads under way; for the worker's thread."""

    def __init__(self, memory: EngineMemory, news: News, *, layerwise: bool) -> None:
        self._memory, self._news, self._layerwise = memory, news, layerwise
        self._pending: dict[str, RunningLoad] = {}
        self._step: list[RunningLoad] = []
        self._handles: list[UnitLoad] = []
        self._broken: set[int] = set()
        self.failures = 0
        """Loads that a step waited for and that failed, so far."""

    @property
    def pending(self) -> Mapping[str, RunningLoad]:
        """Asynchronous loads that were not reported yet, by request."""
        return self._pending

    def begin_step(self, cache: Cache | None, plan: StepPlan) -> list[StepLoad]:
        """Begin what this step waits for; returns what comes layer by layer."""
        by_layer = []
        for load in plan.loads:
            if load.asynchronous:
                continue
            handles = self._begin(cache, load, plan.namespace) if self._layerwise else {}
            if handles:
                by_layer.append(StepLoad(load.request_id, handles))
            elif not self._layerwise:
                self._step.append(self._load_whole(cache, load, plan.namespace))
        return by_layer

    def begin_asynchronous(self, cache: Cache | None, plan: StepPlan) -> None:
        """Begin what vLLM is told of when it has come."""
        for load in plan.loads:
            if load.asynchronous:
                ends_s = time.monotonic() + ASYNCHRONOUS_WAIT_S
                running = self._load_whole(cache, load, plan.namespace)
                self._pending[load.request_id] = replace(running, ends_s=ends_s)

    def wait_whole(self) -> None:
        """Wait for what does not come layer by layer; what takes too long has failed."""
        deadline = time.monotonic() + WHOLE_WAIT_S
        if not self._layerwise:
            for load in self._step:
                load.wait(deadline)
                if not load.done:
                    load.give_up()

    def are_fine(self) -> bool:
        """Whether everything that this step waits for has come."""
        return all(load.done and not load.failed() for load in self._step)

    def judge(self, namespace: str | None, failed: Mapping[Any, Mapping[str, Mask]] = NOTHING) -> None:
        """Note which loads of this step failed. What has not come yet has failed, and comes no more.

        ``namespace`` is where the scheduler half is by now; ``failed`` by request and row what was used too
        early. Repeating it in a step changes nothing.
        """
        step, self._step = self._step, []
        for load in step:
            load.late.update(failed.get(load.plan.request_id, {}))
            if not load.done:
                load.give_up()
            if self._end(load, namespace):
                self.failures += 1
                self._broken |= load.failed_pages() | load.plan.exposed
                self._news.broken_pages |= self._broken
        self._cancel_handles()

    def collect(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """(requests whose asynchronous load ended, those of them that failed); each id once, ever.

        What takes too long has failed: no request waits for ever for a medium that hangs.
        """
        if plan.idle and self._pending:
            next(iter(self._pending.values())).wait(time.monotonic() + IDLE_WAIT_S)
        for load in self._pending.values():
            if load.ends_s <= time.monotonic() and not load.done:
                load.give_up()
        ended = [request_id for request_id, load in self._pending.items() if load.done]
        failed = {
            request_id for request_id in ended if self._end(self._pending.pop(request_id), plan.namespace)
        }
        return set(ended), failed

    def take_broken_pages(self) -> set[int]:
        """Engine blocks that loads of this step could not fill; once."""
        broken, self._broken = self._broken, set()
        return broken

    def close(self) -> None:
        """Give up what has not come: loads write to the engine's memory."""
        for load in chain(self._pending.values(), self._step):
            load.give_up()
        self._cancel_handles()
        self._pending.clear()
        self._step.clear()

    # -- private

    def _cancel_handles(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.cancel()

    def _begin(self, cache: Cache | None, load: LoadPlan, namespace: str | None) -> dict[str, UnitLoad]:
        handles = {transfer.row: self._unit_load(cache, load, transfer) for transfer in load.rows}
        begun = {row: handle for row, handle in handles.items() if handle is not None}
        tickets = tuple(None if handle is None else handle.ticket for handle in handles.values())
        self._step.append(RunningLoad(load, tickets, namespace))
        self._handles += begun.values()
        return begun

    def _unit_load(self, cache: Cache | None, load: LoadPlan, transfer: RowTransfer) -> UnitLoad | None:
        if cache is None or not load.possible:
            return None
        try:
            store = cache.stores[transfer.row]
            return store.begin_load(transfer.keys, self._memory.target(transfer), parents=transfer.parents)
        except Exception as error:  # noqa: BLE001 (the border: this load failed, the others go on)
            border.failed("load", error)
            return None

    def _load_whole(self, cache: Cache | None, load: LoadPlan, namespace: str | None) -> RunningLoad:
        tickets = tuple(self._load(cache, load, transfer) for transfer in load.rows)
        return RunningLoad(load, tickets, namespace)

    def _load(self, cache: Cache | None, load: LoadPlan, transfer: RowTransfer) -> Ticket | None:
        if cache is None or not load.possible:
            return None
        try:
            target = self._memory.target(transfer)
            return cache.stores[transfer.row].load(transfer.keys, target, parents=transfer.parents)
        except Exception as error:  # noqa: BLE001 (the border: this load failed, the others go on)
            border.failed("load", error)
            return None

    def _end(self, load: RunningLoad, namespace: str | None) -> bool:
        """Note what failed; True when anything did.

        If the scheduler half moved on while the load ran, the bytes are those of weights that are gone.
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


def failed_objects(transfer: RowTransfer, ticket: Ticket | None) -> Mask:
    """Which objects are not where they belong; a transfer of nothing cannot fail."""
    if ticket is None:
        return np.ones(len(transfer.keys), dtype=np.bool_)
    failed: Mask = ticket.object_results != ResultCode.OK
    return failed
