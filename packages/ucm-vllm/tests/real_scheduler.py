"""vLLM's own scheduler with the scheduler half of UCM in it, over a model and a store that are only numbers.

What is real: vLLM's `Scheduler` with its block pool and prefix cache, `UCMConnector` in the scheduler's role,
`SchedulerHalf`. What stands in: the store (`engine_doubles.KeysOnly`), the worker, and the model, whose
attention is a fold over what the engine's blocks hold at that moment. So a request whose blocks hold anything
but what its tokens say samples other tokens; `answer` says which ones are right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engine_doubles import IDENTITY, KeysOnlyEngine
from families import COMMON, full, group
from halves import kind
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from ucm_core.coordinator.retention import DEFAULT
from ucm_core.spec.presets import canonical_table
from ucm_vllm.block_tables import PAGE, PAYLOAD, TOKEN_IN_BLOCK, TOKEN_IN_PAGE, TOKENS
from ucm_vllm.connector import UCMReport
from ucm_vllm.metadata import FailedLoad, LoadPlan, RowTransfer, StepPlan, WorkerReport, job_name
from ucm_vllm.scheduler_half import SchedulerHalf
from ucm_vllm.spec_from_engine import engine_spec

PAGE_TOKENS = 4
LAYERS = 2
MODEL_TOKENS = 256
CONFIG = {
    **COMMON,
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
GROUP = group([f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)], full(PAGE_TOKENS))

Slot = tuple[int, int]
"""(engine block, token in it)."""
Memory = dict[tuple[int, Slot], int]
"""By layer and slot what the engine's blocks hold."""
GARBAGE = -1


# -- the model


def forward(uses: Sequence[tuple[list[Slot], list[int], int]], memory: Memory) -> list[int]:
    """One step over (slots, tokens, tokens computed before) of each request; returns what each samples.

    As in an engine, each layer writes all its tokens, of all requests, and then reads.
    """
    states = [tokens[begin:] for _, tokens, begin in uses]
    for layer in range(LAYERS):
        for (slots, _, begin), state in zip(uses, states, strict=True):
            memory |= {(layer, s): hash((layer, h)) for s, h in zip(slots[begin:], state, strict=True)}
        for (slots, _, begin), state in zip(uses, states, strict=True):
            seen = 0
            for position, slot in enumerate(slots):
                seen = hash((seen, memory.get((layer, slot), GARBAGE)))
                if position >= begin:
                    state[position - begin] = hash((state[position - begin], seen))
    return [3 + state[-1] % 400 for state in states]


def answer(prompt: Sequence[int], count: int) -> tuple[list[int], set[int]]:
    """(What the model says without any cache, all that its blocks hold meanwhile): the oracle."""
    tokens, memory = list(prompt), Memory()
    for _ in range(count):
        slots = [(0, position) for position in range(len(tokens))]
        tokens += forward([(slots, tokens, 0)], memory)
    return tokens[len(prompt) :], set(memory.values())


# -- the worker


class Worker:
    """A double of the worker half, its store and its model."""

    def __init__(self, half: SchedulerHalf, keys: Any) -> None:
        self.half, self.keys = half, keys
        self.fails: Callable[[LoadPlan, int], Sequence[int]] = lambda load, count: ()
        """Which of the ``count`` objects of a load do not come."""
        self.memory = Memory()
        self.stored: dict[bytes, dict[tuple[int, int], int]] = {}
        self.right: set[int] = set()
        """All that may ever be saved."""
        self.failures = 0
        self.told: list[frozenset[int]] = []
        """Per step the blocks that it would read as garbage of a step before."""

    def run(
        self, scheduled: Any, requests: dict[str, Request], tables: dict[str, list[int]]
    ) -> ModelRunnerOutput:
        """One step: loads, the forward, saves, the report."""
        plan: StepPlan = scheduled.kv_connector_metadata.plan
        self.told.append(plan.broken)
        failed, broken = self._load(plan)
        names, tokens = self._forward(scheduled, requests, tables)
        trusted = plan.failures_seen >= self.failures
        for save in plan.saves if trusted else ():
            for transfer in save.rows:
                self._save(transfer)
        report = WorkerReport(
            namespace=IDENTITY.namespace,
            failed=tuple(failed),
            broken_pages=frozenset(broken),
            dropped=frozenset() if trusted else frozenset(save.request_id for save in plan.saves),
            ended=tuple(load.attempt for load in plan.loads),
            saved=tuple((save.attempt, job_name(save.job, 0)) for save in plan.saves),
            failures=self.failures,
        )
        done = KVConnectorOutput(
            invalid_block_ids=broken | plan.broken,
            kv_connector_worker_meta=UCMReport(report),
            finished_sending={attempt.request_id for attempt in plan.promised},
        )
        places = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(names, places, tokens, kv_connector_output=done)

    def _load(self, plan: StepPlan) -> tuple[list[FailedLoad], set[int]]:
        failed, broken = [], set[int]()
        for load in plan.loads:
            (transfer,) = load.rows
            lost = np.full(len(transfer.keys), not load.possible)
            lost[list(self.fails(load, len(transfer.keys)))] = True
            for index, place, slot in slots(transfer):
                content = {} if lost[index] else self.stored[transfer.keys[index].tobytes()]
                self.memory[place[0], slot] = content.get(place, GARBAGE)
            if lost.any():
                self.failures += 1
                broken |= transfer.pages(lost) | load.exposed
                failed.append(FailedLoad(load.request_id, transfer.row, transfer.keys[lost]))
                self.keys.drop(transfer.row, transfer.keys[lost])
        return failed, broken

    def _forward(
        self, scheduled: Any, requests: dict[str, Request], tables: dict[str, list[int]]
    ) -> tuple[list[str], list[list[int]]]:
        cached = scheduled.scheduled_cached_reqs
        begins = {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs}
        begins |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        uses = []
        for name, count in scheduled.num_scheduled_tokens.items():
            end = begins[name] + count
            places = [(tables[name][at // PAGE_TOKENS], at % PAGE_TOKENS) for at in range(end)]
            uses.append((places, list(requests[name].all_token_ids)[:end], begins[name]))
        names = list(scheduled.num_scheduled_tokens)
        complete = [len(use[0]) == requests[name].num_tokens for name, use in zip(names, uses, strict=True)]
        sampled = forward(uses, self.memory)
        return names, [[token] if ends else [] for token, ends in zip(sampled, complete, strict=True)]

    def _save(self, transfer: RowTransfer) -> None:
        contents: list[dict[tuple[int, int], int]] = [{} for _ in transfer.keys]
        for index, place, slot in slots(transfer):
            contents[index][place] = self.memory[place[0], slot]
            assert contents[index][place] in self.right, f"garbage was saved from block {slot[0]}"
        self.stored |= {key.tobytes(): one for key, one in zip(transfer.keys, contents, strict=True)}
        self.keys.keep(transfer)


def slots(transfer: RowTransfer) -> Iterator[tuple[int, tuple[int, int], Slot]]:
    """(object, (layer, token in it), slot) for everything of a transfer."""
    ((_, pieces),) = transfer.pieces
    for piece in pieces.tolist():
        for layer in range(LAYERS):
            for token in range(piece[TOKENS]):
                place = layer, piece[TOKEN_IN_BLOCK] + token
                yield piece[PAYLOAD], place, (piece[PAGE], piece[TOKEN_IN_PAGE] + token)


# -- the engine


def vllm_config(directory: Path, *, blocks: int, **scheduling: Any) -> VllmConfig:
    """A real configuration over a checkpoint whose weights are never computed with."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors").write_bytes(b"the weights")
    cache = CacheConfig(block_size=PAGE_TOKENS)
    cache.num_gpu_blocks = blocks
    extra = {"root": str(directory / "root"), "ring_bytes": "8MiB", "grain_tokens": PAGE_TOKENS}
    return VllmConfig(
        model_config=ModelConfig(
            model=str(directory), skip_tokenizer_init=True, max_model_len=MODEL_TOKENS, dtype="bfloat16"
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_model_len=MODEL_TOKENS, is_encoder_decoder=False, **{"max_num_seqs": 8} | scheduling
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="UCMConnector",
            kv_connector_module_path="ucm_vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
    )


class RealEngine:
    """The scheduler and its worker, stepped by hand."""

    def __init__(self, config: VllmConfig) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(PAGE_TOKENS, sha256)
        blocks = config.cache_config.num_gpu_blocks
        self.scheduler = Scheduler(
            config,
            KVCacheConfig(blocks, [], [GROUP], cache_hit_alignment_tokens=PAGE_TOKENS),
            StructuredOutputManager(config),
            PAGE_TOKENS,
        )
        table = canonical_table(CONFIG, grain_tokens=PAGE_TOKENS, kv_dtype="bfloat16")
        cache = KeysOnlyEngine(table, DEFAULT)
        spec = engine_spec(table, [GROUP], spec_kind=kind, engine_align_tokens=PAGE_TOKENS)
        connector: Any = self.scheduler.connector
        connector.shutdown()
        self.half = connector._scheduler = SchedulerHalf(spec, cache, saves=True, loads=True)  # type: ignore[arg-type]
        self.half.take_report(WorkerReport(namespace=IDENTITY.namespace))
        self.keys = cache.current
        self.worker = Worker(self.half, cache.current)
        self.expected: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, list[int]] = {}
        """Blocks of each request in the last step."""

    def add(self, name: str, prompt: Sequence[int], count: int = 1, **more: Any) -> Request:
        """A request that will sample ``count`` tokens."""
        self.expected[name], right = answer(prompt, count)
        self.worker.right |= right
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        made = Request(name, list(prompt), sampling, None, block_hasher=self._hasher, **more)
        self.requests[name] = made
        self.scheduler.add_request(made)
        return made

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, *, abort_meanwhile: Sequence[str] = ()) -> Any:
        """One step; ``abort_meanwhile`` are aborted while it runs."""
        scheduled = self.scheduler.schedule()
        manager = self.scheduler.kv_cache_manager
        self.tables = {name: manager.get_block_ids(name)[0] for name in scheduled.num_scheduled_tokens}
        result = self.worker.run(scheduled, dict(self.scheduler.requests), self.tables)
        for name in abort_meanwhile:
            self.abort(name)
        self.scheduler.update_from_output(scheduled, result)
        return scheduled

    def run(self, limit: int = 1000) -> None:
        """Steps until everything has ended."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("requests did not come to an end")

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache; nothing is running."""
        assert self.scheduler.reset_prefix_cache()

    def check(self) -> None:
        """What was sampled is right: of requests that were aborted the beginning."""
        for name, request in self.requests.items():
            sampled = list(request.output_token_ids)
            whole = self.expected[name]
            if request.status is RequestStatus.FINISHED_ABORTED:
                whole = whole[: len(sampled)]
            assert sampled == whole, name
