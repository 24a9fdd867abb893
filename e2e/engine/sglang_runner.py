"""An SGLang engine as a process of its own, commanded by the harness as `engine/commands.py` says.

Run by the interpreter of SGLang's environment. It imports SGLang, the standard library and that module:
SGLang itself loads UCM's backend, as it does for users. SGLang starts a scheduler and a detokenizer as
processes; the end of the input ends them too.

| command | fields | answer |
| --- | --- | --- |
| start | arguments of `sglang.Engine` | error: text of the exception chain, or null |
| generate | prompts, max_tokens | one `answer` per prompt, served one after the other |
| together | prompts, max_tokens | the same, served in one batch |
| forget | | the engine's own caches, on the device and on the host, are emptied |
| update_weights | checkpoint | done, message; the engine takes the weights of a checkpoint as it runs |
| abort | prompt, max_tokens, after_s | tokens of its answer; aborted so long after it was sent |
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from e2e.engine.commands import Json, answer_commands, margin, refusal

SETTLE_LIMIT_S = 20.0
"""How long what was served may keep the engine from emptying its caches."""


class Runner:
    """The commands; one engine at a time."""

    def __init__(self) -> None:
        self._engine: Any = None

    def start(self, command: Json) -> Json:
        """Build the engine; a refusal is an answer."""
        import sglang

        try:
            self._engine = sglang.Engine(**command["arguments"])
        except Exception as error:  # noqa: BLE001  (an answer to the parent, whatever it is)
            return refusal(error)
        return {"error": None}

    def generate(self, command: Json) -> Json:
        """Serve the prompts one after the other, so that each may find what the one before left."""
        served = (self._serve(prompt, command["max_tokens"]) for prompt in command["prompts"])
        return {"answers": [self._wait(one) for one in served]}

    def together(self, command: Json) -> Json:
        """Serve the prompts in one batch."""
        return {"answers": self._wait(self._gather(command["prompts"], command["max_tokens"]))}

    def forget(self, command: Json) -> Json:
        """Empty the engine's own caches, as soon as it is idle, within a bound."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while not (done := self._engine.flush_cache().success) and time.monotonic() < deadline:
            pass  # a round trip to the scheduler is the pause between two tries
        return {"done": done}

    def update_weights(self, command: Json) -> Json:
        """Replace the weights in place; SGLang empties its own caches with it."""
        done, message, *_ = self._engine.update_weights_from_disk(command["checkpoint"])
        return {"done": done, "message": message}

    def abort(self, command: Json) -> Json:
        """Serve a prompt and abort it `after_s` seconds later, wherever it is by then."""
        manager = self._engine.tokenizer_manager
        self._engine.loop.call_later(command["after_s"], manager.abort_request, "aborted")
        stream = self._stream(command["prompt"], command["max_tokens"], name="aborted")
        output, _ = self._wait(stream)
        return {"tokens": list(output["output_ids"])}

    def close(self) -> None:
        """End the engine's processes."""
        if self._engine is not None:
            self._engine.shutdown()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._engine.loop.run_until_complete(work)

    async def _gather(self, prompts: list[Json], max_tokens: int) -> list[Json]:
        return await asyncio.gather(*(self._serve(prompt, max_tokens) for prompt in prompts))

    async def _serve(self, prompt: Json, max_tokens: int) -> Json:
        output, first_token_s = await self._stream(prompt, max_tokens)
        return _answer(output) | {"first_token_s": first_token_s}

    async def _stream(
        self, prompt: Json, max_tokens: int, *, name: str | None = None
    ) -> tuple[Json, float | None]:
        """All of an output, and when its first part came."""
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        begin = time.monotonic()
        stream = await self._engine.async_generate(
            input_ids=prompt["tokens"], sampling_params=sampling, cache_salt=prompt.get("salt"),
            return_logprob=True, top_logprobs_num=2, stream=True, rid=name,
        )  # fmt: skip
        first_token_s, output = None, {}
        async for so_far in stream:
            first_token_s, output = first_token_s or time.monotonic() - begin, so_far
        return output, first_token_s


def _answer(output: Json) -> Json:
    about = output["meta_info"]
    sources = about.get("cached_tokens_details") or {}
    return {
        "tokens": list(output["output_ids"]),
        "logprobs": [logprob for logprob, *_ in about.get("output_token_logprobs", ())],
        "margins": [margin([one for one, *_ in top]) for top in about.get("output_top_logprobs", ())],
        "prompt_tokens": about["prompt_tokens"],
        "cached_tokens": about["cached_tokens"],
        "external_tokens": sources.get("storage", 0),
    }


def main() -> None:
    """Import SGLang, answer commands, end what was started."""
    import sglang  # noqa: F401  (the long part of a start; the parent waits for the answer to it)

    runner = Runner()
    try:
        answer_commands(runner)
    finally:
        runner.close()


if __name__ == "__main__":  # SGLang's spawned processes import this file again
    main()
