"""A vLLM engine as a process of its own: one JSON command a line on stdin, one JSON line back.

Run by the interpreter of vLLM's environment: `python vllm_runner.py ANSWER_DESCRIPTOR`. It imports vLLM and
the standard library, nothing of this repository: vLLM itself loads the connector, as it does for users. The
engine's own output goes to stdout and stderr, which the parent sends to a log file. The end of the input ends
the process, as a script would end.

| command | fields | answer |
| --- | --- | --- |
| start | arguments of `vllm.LLM` | error: text of the exception chain, or null |
| generate | prompts, max_tokens | one `answer` per prompt, served one after the other |
| together | prompts, max_tokens | the same, served in one batch |
| forget | connector: bool | the engine's own prefix cache is emptied; connector: the weights changed |
| observe | prompt, max_tokens | its answer, and digests of its blocks in the engine after the prefill |
| counters | | the `ucm_` samples of this process |
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

Json = dict[str, Any]


class Runner:
    """The commands; one engine at a time."""

    def __init__(self) -> None:
        self._llm: Any = None

    def start(self, command: Json) -> Json:
        """Build the engine; a refusal is an answer, with every message of the exception chain."""
        from vllm import LLM

        try:
            self._llm = LLM(**command["arguments"])
        except Exception as error:  # noqa: BLE001  (an answer to the parent, whatever it is)
            # The traceback holds the half-built engine alive; only its text may leave this frame.
            return {"error": "\n".join(_chain(error))}
        return {"error": None}

    def generate(self, command: Json) -> Json:
        """Serve the prompts one after the other, so that each may find what the one before left."""
        return {"answers": [self._serve([prompt], command["max_tokens"])[0] for prompt in command["prompts"]]}

    def together(self, command: Json) -> Json:
        """Serve the prompts in one batch."""
        return {"answers": self._serve(command["prompts"], command["max_tokens"])}

    def forget(self, command: Json) -> Json:
        """Empty the engine's own prefix cache."""
        return {"done": self._llm.reset_prefix_cache(reset_connector=command["connector"])}

    def observe(self, command: Json) -> Json:
        """Serve one prompt and digest its blocks in the engine once its prefill is done."""
        engine = self._llm.llm_engine
        core = engine.engine_core.engine_core
        external = self._external_hits()
        engine.add_request("observed", _prompt(command["prompt"]), _sampling(command["max_tokens"]))
        (request,) = core.scheduler.requests.values()
        digests: list[list[Any]] = []
        outputs: list[Any] = []
        while engine.has_unfinished_requests():
            outputs = engine.step() or outputs
            if request.num_output_tokens == 1 and not digests:
                digests = self._block_digests(core, request)
        answer = _answer(outputs[0]) | {"external_tokens": self._external_hits() - external}
        return {"answer": answer, "blocks": digests}

    def counters(self, command: Json) -> Json:
        """The `ucm_` samples of the default registry, by name and labels."""
        from prometheus_client import REGISTRY

        samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
        return {"counters": [[s.name, s.labels, s.value] for s in samples if s.name.startswith("ucm_")]}

    def _serve(self, prompts: list[Json], max_tokens: int) -> list[Json]:
        lora = [_adapter(prompt) for prompt in prompts]
        before = self._external_hits()
        outputs = self._llm.generate(
            [_prompt(prompt) for prompt in prompts],
            _sampling(max_tokens),
            use_tqdm=False,
            lora_request=lora if any(lora) else None,
        )
        external = self._external_hits() - before
        return [_answer(output) | {"external_tokens": external} for output in outputs]

    def _external_hits(self) -> int:
        name = "vllm:external_prefix_cache_hits"
        return sum(int(metric.value) for metric in self._llm.get_metrics() if metric.name == name)

    def _block_digests(self, core: Any, request: Any) -> list[list[Any]]:
        """(layer, index in the request, digest of its bytes) for every block full of prompt tokens."""
        manager = core.scheduler.kv_cache_manager
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        layers = core.vllm_config.compilation_config.static_forward_context
        found: list[list[Any]] = []
        for group, blocks in zip(groups, manager.get_block_ids(request.request_id), strict=True):
            full = request.num_prompt_tokens // group.kv_cache_spec.block_size
            for layer in group.layer_names:
                for index, block in enumerate(blocks[:full]):
                    if block != 0:
                        found.append([layer, index, _digest(layers[layer].kv_cache, block)])
        return found


def _digest(cache: Any, block: int) -> str:
    import torch

    digest = hashlib.sha256()
    # Attention layers hold one tensor, state layers one per part of the state.
    for part in cache if isinstance(cache, list | tuple) else [cache]:
        digest.update(part[block].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _chain(error: BaseException | None) -> Iterable[str]:
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__


def _prompt(prompt: Json) -> Json:
    given: Json = {"prompt_token_ids": prompt["tokens"]}
    return given | ({"cache_salt": prompt["salt"]} if prompt.get("salt") is not None else {})


def _adapter(prompt: Json) -> Any:
    from vllm.lora.request import LoRARequest

    adapter = prompt.get("adapter")
    return LoRARequest(adapter["name"], adapter["number"], adapter["path"]) if adapter else None


def _sampling(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=1)


def _answer(output: Any) -> Json:
    completion = output.outputs[0]
    steps = zip(completion.logprobs, completion.token_ids, strict=True)
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [step[token].logprob for step, token in steps],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "first_token_s": output.metrics.first_token_latency if output.metrics else None,
    }


def main() -> None:
    """Answer commands until the input ends."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    import vllm  # noqa: F401  (the long part of a start; the parent waits for the answer to it)

    runner = Runner()
    with os.fdopen(descriptor, "w", buffering=1) as answers:
        answers.write(json.dumps({"pid": os.getpid()}) + "\n")
        for line in sys.stdin:
            command = json.loads(line)
            handler: Callable[[Json], Json] = getattr(runner, command.pop("command"))
            answers.write(json.dumps(handler(command)) + "\n")


if __name__ == "__main__":  # vLLM's spawned processes import this file again
    main()
