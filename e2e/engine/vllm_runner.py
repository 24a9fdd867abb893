"""A vLLM engine as a process of its own, commanded by the harness as `engine/commands.py` says.

Run by the interpreter of vLLM's environment. It imports vLLM, the standard library and that module: vLLM
itself loads the connector, as it does for users.

| command | fields | answer |
| --- | --- | --- |
| start | arguments of `vllm.LLM` | error: text of the exception chain, or null |
| generate | prompts, max_tokens | one `answer` per prompt, served one after the other |
| together | prompts, max_tokens | the same, served in one batch |
| forget | connector: bool | the engine's own prefix cache is emptied; connector: the weights changed |
| observe | prompt, max_tokens | its answer, and digests of its blocks in the engine after the prefill |
| drive | orders, max_tokens, look | what became of requests that come, and are aborted, at given steps |
| books | | what is still held although nothing is served; zero all over when the books balance |
| counters | | the `ucm_` samples of this process |
"""

import hashlib
import time
from typing import Any

from e2e.engine.commands import Json, answer_commands, margin, refusal

SETTLE_LIMIT_S = 20.0
"""How long what was served may hold blocks, and what is being written pins, after the last request."""


class Runner:
    """The commands; one engine at a time."""

    def __init__(self) -> None:
        self._llm: Any = None

    def start(self, command: Json) -> Json:
        """Build the engine; a refusal is an answer."""
        from vllm import LLM

        try:
            self._llm = LLM(**command["arguments"])
        except Exception as error:  # noqa: BLE001  (an answer to the parent, whatever it is)
            return refusal(error)
        return {"error": None}

    def generate(self, command: Json) -> Json:
        """Serve the prompts one after the other, so that each may find what the one before left."""
        return {"answers": [self._serve([prompt], command["max_tokens"])[0] for prompt in command["prompts"]]}

    def together(self, command: Json) -> Json:
        """Serve the prompts in one batch."""
        return {"answers": self._serve(command["prompts"], command["max_tokens"])}

    def forget(self, command: Json) -> Json:
        """Empty the engine's own prefix cache, as soon as it has let go of what it served, within a bound."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            self._let_go()
            done = self._llm.reset_prefix_cache(reset_connector=command["connector"])
            if done or time.monotonic() > deadline:
                return {"done": done}

    def _let_go(self) -> None:
        # Finished requests keep their blocks until their saves have copied them: until a later step, which
        # `generate` does not take. An engine core of its own process goes on by itself.
        engine = self._llm.llm_engine
        core = getattr(engine.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            engine.step()

    def observe(self, command: Json) -> Json:
        """Serve one prompt and digest its blocks in the engine once its prefill is done."""
        engine = self._llm.llm_engine
        core = engine.engine_core.engine_core
        external = self._external_hits()
        prompt = command["prompt"]
        engine.add_request("observed", _prompt(prompt), _sampling(command["max_tokens"], prompt))
        (request,) = core.scheduler.requests.values()
        digests: list[list[Any]] = []
        outputs: list[Any] = []
        while engine.has_unfinished_requests():
            outputs = engine.step() or outputs
            if request.num_output_tokens == 1 and not digests:
                digests = _block_digests(core, request)
        answer = _answer(outputs[0]) | {"external_tokens": self._external_hits() - external}
        return {"answer": answer, "blocks": digests}

    def counters(self, command: Json) -> Json:
        """The `ucm_` and `vllm:` samples of the default registry, by name and labels."""
        from prometheus_client import REGISTRY

        samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
        ours = [[s.name, s.labels, s.value] for s in samples if s.name.startswith("ucm_")]
        counts = {m.name: m.value for m in self._llm.get_metrics() if hasattr(m, "value")}
        return {"counters": ours + [[name, {}, value] for name, value in counts.items()]}

    def drive(self, command: Json) -> Json:
        """Serve requests that come, and are aborted, at given steps."""
        external = self._external_hits()
        drive = Drive(self._llm.llm_engine, command["max_tokens"], look=command["look"])
        outcomes = drive.run(command["orders"])
        return {"outcomes": outcomes, "external_tokens": self._external_hits() - external}

    def books(self, command: Json) -> Json:
        """What is held when nothing is served, as soon as that is nothing, within a bound."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while any((held := _held(self._llm.llm_engine)).values()) and time.monotonic() < deadline:
            pass  # what is being written holds pins for moments more
        return held

    def _serve(self, prompts: list[Json], max_tokens: int) -> list[Json]:
        lora = [_adapter(prompt) for prompt in prompts]
        before = self._external_hits()
        outputs = self._llm.generate(
            [_prompt(prompt) for prompt in prompts],
            [_sampling(max_tokens, prompt) for prompt in prompts],
            use_tqdm=False,
            lora_request=lora if any(lora) else None,
        )
        external = self._external_hits() - before
        return [_answer(output) | {"external_tokens": external} for output in outputs]

    def _external_hits(self) -> int:
        name = "vllm:external_prefix_cache_hits"
        return sum(int(metric.value) for metric in self._llm.get_metrics() if metric.name == name)


def _block_digests(core: Any, request: Any) -> list[list[Any]]:
    """(layer, index in the request, digest of its bytes) for every block full of prompt tokens."""
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    layers = core.vllm_config.compilation_config.static_forward_context
    tables = core.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    found: list[list[Any]] = []
    for group, blocks in zip(groups, tables, strict=True):
        full = request.num_prompt_tokens // group.kv_cache_spec.block_size
        for layer in group.layer_names:
            for index, block in enumerate(blocks[:full]):
                if block != 0:
                    found.append([layer, index, _digest(layers[layer].kv_cache, block)])
    return found


class Drive:
    """Steps an engine by hand, so that requests come and go at steps that the parent chose."""

    def __init__(self, engine: Any, max_tokens: int, *, look: bool) -> None:
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._max_tokens = max_tokens
        self._look = look
        self._requests: dict[str, Any] = {}
        self._outcomes: dict[str, Json] = {}
        self._broken: set[int] = set()
        if self._core.scheduler.connector is not None:
            _listen(self._broken)

    def run(self, orders: list[Json]) -> list[Json]:
        """Steps until all orders are done and the engine has let go of them; an outcome per order."""
        waiting = sorted(enumerate(orders), key=lambda order: int(order[1]["arrive"]))
        aborts: dict[str, int] = {}
        step = 0
        while waiting or aborts or self._core.scheduler.has_requests():
            while waiting and waiting[0][1]["arrive"] <= step:
                number, order = waiting.pop(0)
                self._add(str(number), order["prompt"])
                if order["abort"] is not None:
                    aborts[str(number)] = step + order["abort"]
            for name in [name for name, at in aborts.items() if at <= step]:
                del aborts[name]
                self._abort(name)
            for output in self._engine.step():
                self._note(output)
            self._look_at_broken_blocks()
            self._look_at_blocks()
            step += 1
        return [self._outcomes[str(number)] for number in range(len(orders))]

    def _add(self, name: str, prompt: Json) -> None:
        sampling = _sampling(self._max_tokens, prompt)
        core_id = self._engine.add_request(name, _prompt(prompt), sampling)
        self._requests[name] = self._core.scheduler.requests[core_id]
        begun: Json = {"tokens": [], "cached_tokens": 0, "aborted": False, "preemptions": 0}
        self._outcomes[name] = begun | {"blocks": [], "digests": [], "digested_s": 0.0, "loaded_tokens": None}

    def _abort(self, name: str) -> None:
        if self._requests[name].request_id in self._core.scheduler.requests:
            self._outcomes[name]["aborted"] = True
            self._engine.abort_request([name])

    def _note(self, output: Any) -> None:
        outcome = self._outcomes[output.request_id]
        outcome["tokens"] = list(output.outputs[0].token_ids)
        outcome["cached_tokens"] = output.num_cached_tokens or 0

    def _look_at_broken_blocks(self) -> None:
        """From the first block that could not be filled vLLM computes again, and counts it as cached."""
        for name, request in self._requests.items():
            for table in self._core.scheduler.kv_cache_manager.get_block_ids(request.request_id)[:1]:
                if broken := [index for index, block in enumerate(table) if block in self._broken]:
                    size = self._core.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
                    self._outcomes[name]["loaded_tokens"] = broken[0] * size
        self._broken.clear()

    def _look_at_blocks(self) -> None:
        for name, request in self._requests.items():
            outcome = self._outcomes[name]
            outcome["preemptions"] = request.num_preemptions
            if request.request_id not in self._core.scheduler.requests or request.is_finished():
                continue
            tables = self._core.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            if request.num_output_tokens and any(tables):
                outcome["blocks"].append([request.num_tokens, *map(len, tables)])
                if self._look and not outcome["digests"]:
                    outcome["digests"] = _block_digests(self._core, request)
                    outcome["digested_s"] = time.monotonic()


def _listen(broken: set[int]) -> None:
    """Add to `broken` what the connector reports of blocks that could not be filled."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    report = type(connector).get_block_ids_with_load_errors

    def listening() -> set[int]:
        blocks: set[int] = report(connector)
        broken.update(blocks)
        return blocks

    connector.get_block_ids_with_load_errors = listening


def _held(engine: Any) -> dict[str, int]:
    """What an engine that serves nothing should not hold: blocks, requests, and the connector's own."""
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    # one block is always in use: the null block
    held = {
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "requests": len(scheduler.requests),
    }
    if scheduler.connector is None:
        return held
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    half, worker = scheduler.connector._scheduler, get_kv_transfer_group()._worker
    cache = half._cache.current
    cache.check_integrity()
    books = cache.statistics()
    rings = [row.ring for row in books.rows.values() if row.ring is not None]
    held |= {"records": half.request_count, "loads": worker.pending_count, "leases": books.leases.held}
    return held | {"pins": sum(ring.pinned + ring.loading for ring in rings)}


def _digest(cache: Any, block: int) -> str:
    import torch

    digest = hashlib.sha256()
    # Attention layers hold one tensor, state layers one per part of the state.
    for part in cache if isinstance(cache, list | tuple) else [cache]:
        digest.update(part[block].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _prompt(prompt: Json) -> Json:
    given: Json = {"prompt_token_ids": prompt["tokens"]}
    return given | ({"cache_salt": prompt["salt"]} if prompt.get("salt") is not None else {})


def _adapter(prompt: Json) -> Any:
    from vllm.lora.request import LoRARequest

    adapter = prompt.get("adapter")
    return LoRARequest(adapter["name"], adapter["number"], adapter["path"]) if adapter else None


def _sampling(max_tokens: int, prompt: Json) -> Any:
    from vllm import SamplingParams

    common: Json = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 2}
    return SamplingParams(max_tokens=max_tokens, allowed_token_ids=prompt.get("alphabet"), **common)


def _answer(output: Any) -> Json:
    completion = output.outputs[0]
    steps = zip(completion.logprobs, completion.token_ids, strict=True)
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [step[token].logprob for step, token in steps],
        "margins": [margin([one.logprob for one in step.values()]) for step in completion.logprobs],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "first_token_s": output.metrics.first_token_latency if output.metrics else None,
    }


def main() -> None:
    """Import vLLM and answer commands."""
    import vllm  # noqa: F401  (the long part of a start; the parent waits for the answer to it)

    answer_commands(Runner())


if __name__ == "__main__":  # vLLM's spawned processes import this file again
    main()
