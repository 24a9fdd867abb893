"""Both halves of the connector over real caches, and an engine's memory made of plain tensors.

What stands in for vLLM: tensors of the registered shapes, filled by the test, and `Halves.step`, which calls
the hooks in vLLM's order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_doubles import Tables, scheduler_output
from families import TinyModel
from vllm.v1.kv_cache_interface import MambaSpec, get_kv_cache_spec_kind
from vllm.v1.request import Request

from ucm_core.engine_cache import EngineCache
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.model import Model
from ucm_vllm.layout_from_engine import Backend
from ucm_vllm.metadata import StepPlan
from ucm_vllm.scheduler_half import SchedulerHalf
from ucm_vllm.spec_from_engine import engine_spec, layer_number
from ucm_vllm.worker_half import WorkerHalf

PAGES = 24
WEIGHTS = "ab" * 32
WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Step:
    """What came out of one step."""

    plan: StepPlan
    received: set[str]
    failed: set[str]
    broken: set[int]
    sent: set[str] = field(default_factory=set)
    """Finished requests whose blocks vLLM has back."""


def kind(spec: Any) -> str:
    return str(get_kv_cache_spec_kind(spec).value)


def settings(root: Path, **changes: Any) -> CacheConfig:
    return CacheConfig(**{"root": root, "ring_bytes": "64MiB", "disk_bytes": "1GiB"} | changes)


def model_of(model: TinyModel) -> Model:
    identity = ModelIdentity(
        config="{}",
        weights=None,
        revision=None,
        compute_dtype=model.dtype,
        kv_dtype=model.dtype,
        table=model.table.digest.hex(),
    )
    return Model(Path("nowhere"), model.table, identity)


def memory(model: TinyModel, fill: str) -> dict[str, torch.Tensor]:
    """One tensor per layer in the shape that vLLM registers; ``fill`` is "random" or "zero"."""
    tensors = {}
    for group in model.groups:
        spec = group.kv_cache_spec
        for layer in group.layer_names:
            if isinstance(spec, MambaSpec):
                shape, dtype = (PAGES, 1, 1, spec.state_content_size_bytes), torch.int8
            elif spec.head_size_v == 0:
                shape, dtype = (PAGES, 1, spec.block_size, spec.head_size), spec.dtype
            else:
                shape, dtype = (PAGES, spec.num_kv_heads, spec.block_size, 2 * spec.head_size), spec.dtype
            blank = torch.zeros(shape, dtype=dtype)
            noise = torch.randint(-128, 128, (blank.nbytes,), dtype=torch.int16).to(torch.int8)
            tensors[layer] = noise.view(dtype).view(shape) if fill == "random" else blank
    return tensors


def has_hooks(layer: str) -> bool:
    return "attn.attn" in layer


def backend(layer: str) -> Backend:
    if not has_hooks(layer):
        return Backend("MAMBA2_ATTN", None)
    return Backend("CPU_ATTN", "vec")


class Halves:
    """A scheduler half and a worker half on one root."""

    def __init__(
        self, model: TinyModel, root: Path, *, fill: str = "random", align: int = 128, **changes: Any
    ) -> None:
        spec = engine_spec(model.table, model.groups, spec_kind=kind, engine_align_tokens=align)
        self.spec = replace(spec, asynchronous=bool(changes.get("load_asynchronously")))
        self.memory = memory(model, fill)
        caches = [
            EngineCache(
                model_of(model), settings(root, **changes), digest=lambda _: WEIGHTS, start_wait_s=WAIT_S
            )
            for _ in range(2)
        ]
        self.worker = WorkerHalf(self.spec, caches[0])
        self.worker.register(
            self.memory,
            num_blocks=PAGES,
            backend_of=(lambda _: Backend("CPU_MLA", None)) if "mla-576" in self.spec.rows else backend,
        )
        self.scheduler = SchedulerHalf(self.spec, caches[1], saves=True, loads=True)
        self.scheduler_cache, self.worker_cache = caches[1], caches[0]
        self.scheduler.meet([self.worker.handshake()])

    def plan(
        self,
        *scheduled: tuple[Request, int, int, Tables],
        offers: dict[str, list[tuple[int, int, int]]] | None = None,
        preempted: set[str] | None = None,
    ) -> StepPlan:
        return self.scheduler.plan_step(scheduler_output(scheduled, offers or {}, preempted=preempted))

    def execute(self, plan: StepPlan) -> Step:
        """The worker's hooks of one step, in vLLM's order, and its report."""
        self.worker.before_step(plan)
        if any(not load.asynchronous for load in plan.loads):
            self.worker.start_loads(plan)
        if not plan.idle:
            self.forward(plan)
        self.worker.start_loads(plan)
        self.worker.end_step(plan)
        received, failed, sent = self.worker.collect(plan)
        broken = self.worker.broken_pages(plan)
        self.scheduler.take_output(self.worker.report(), broken_pages=broken, released=sent)
        return Step(plan, received, failed, broken, sent)

    def forward(self, plan: StepPlan) -> None:
        """The hooks of all attention layers, in the model's order."""
        for layer in sorted(filter(has_hooks, self.memory), key=layer_number):
            self.worker.before_layer(plan, layer)
            self.worker.after_layer(plan, layer)

    def step(self, *scheduled: tuple[Request, int, int, Tables], **more: Any) -> Step:
        return self.execute(self.plan(*scheduled, **more))

    def matched_again(self, asked: Any, local_tokens: int = 0) -> tuple[int | None, bool]:
        """The answer after an asynchronous load failed; the first one lets others come first."""
        assert self.scheduler.matched_tokens(asked, local_tokens) == (None, False)
        return self.scheduler.matched_tokens(asked, local_tokens)

    def receive(self, request_id: str) -> Step:
        """Empty steps until the asynchronous load of a request has ended."""
        return self.step_until(lambda step: request_id in step.received)

    def step_until(self, seen: Callable[[Step], bool]) -> Step:
        """Empty steps until one shows what is looked for."""
        deadline = time.monotonic() + WAIT_S
        while not seen(step := self.step()):
            assert time.monotonic() < deadline, "it was never seen"
        return step

    def write_prompt(self, asked: Request, tables: Tables, **more: Any) -> None:
        """Compute (the memory is filled already) and save a whole prompt; its files are down afterwards."""
        self.scheduler.matched_tokens(asked, 0)
        self.scheduler.allocated(asked, tables, external_tokens=0)
        self.step((asked, 0, len(asked.all_token_ids), tables), **more)
        self.finish(asked.request_id)
        self.settle()

    def finish(self, request_id: str) -> None:
        """End a request; its blocks are vLLM's again."""
        if self.scheduler.finished(request_id):
            self.step_until(lambda step: request_id in step.sent)

    def settle(self) -> None:
        """Wait until what was saved is in files."""
        assert self.worker.wait_durable(WAIT_S)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()

    def blocks(self, group: int, pages: list[int]) -> dict[str, np.ndarray]:
        """The bytes of engine blocks of a group, per layer."""
        layers = [
            layer for row in self.spec.rows.values() for g in row if g.index == group for layer, _ in g.layers
        ]
        return {
            layer: self.memory[layer][pages].contiguous().view(torch.uint8).numpy().copy() for layer in layers
        }
