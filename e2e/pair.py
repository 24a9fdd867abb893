"""Both engines, vLLM and SGLang, on the same checkpoints in float32, and what each computes without UCM."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from e2e.harness import SGLANG, Answer, Engine, EngineSetup, Prompt
from e2e.models import MAX_TOKENS, tokens
from e2e.runs import Runs, serve_apart
from e2e.sglang_arguments import PAGE_TOKENS, engine_arguments


@dataclass(frozen=True, slots=True)
class Shared:
    """A family that both engines run on a CPU, and what is asked of it.

    The seeds of its prompts are such that no step of their answers is a close call, which a test measures.
    """

    family: str
    seeds: tuple[int, int, int]
    vllm: Mapping[str, Any]
    """Arguments of `vllm.LLM` beyond those that its model has."""
    lengths: tuple[int, int, int] = (200, 330, 200)
    """Prompt tokens; SGLang takes the second prompt in two chunks."""

    @property
    def first(self) -> tuple[Prompt, ...]:
        """Two prompts that one engine serves and saves."""
        return self._prompts[:2]

    @property
    def other(self) -> tuple[Prompt, ...]:
        """A prompt that begins like neither."""
        return self._prompts[2:]

    @property
    def _prompts(self) -> tuple[Prompt, ...]:
        pairs = zip(self.lengths, self.seeds, strict=True)
        return tuple(Prompt(tokens(length, seed=seed)) for length, seed in pairs)


SHARED = {
    one.family: one
    for one in (
        Shared("dense", (6, 5, 1), {"dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 256}),
    )
}


def served_again(answer: Answer) -> int:
    """Tokens of the same prompt that a cache may serve SGLang: whole pages, and never the last token."""
    return (answer.prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Alone:
    """An engine without UCM: every prompt with its own caches empty, but for the last."""

    first: tuple[Answer, ...]
    other: tuple[Answer, ...]
    again: Answer
    """The other prompt once more, from the engine's own cache as far as it has one."""


class Pair:
    """Starts either engine; remembers what each computed alone."""

    def __init__(self, runs: Runs, python: Path) -> None:
        self.runs = runs
        self._setup = EngineSetup(python, runs.directory, multiprocess=True, kind=SGLANG)
        self.sglang_alone = cache(self._run_sglang)
        self.vllm_alone = cache(self._run_vllm)

    def sglang(self, name: str, family: str) -> Engine:
        """An engine of SGLang on `family`, without UCM."""
        engine = self.runs.process(f"sglang-{family}-{name}", self._setup)
        return engine.start(engine_arguments(self.runs.checkpoint(family)))

    def vllm(self, name: str, family: str) -> Engine:
        """An engine of vLLM on `family`, without UCM."""
        return self.runs.engine(f"pair-{name}", family, None, **SHARED[family].vllm)

    def _run_sglang(self, family: str) -> Alone:
        with self.sglang("alone", family) as engine:
            return _serve_alone(engine, SHARED[family])

    def _run_vllm(self, family: str) -> Alone:
        with self.vllm("alone", family) as engine:
            return _serve_alone(engine, SHARED[family])


def _serve_alone(engine: Engine, shared: Shared) -> Alone:
    return Alone(
        first=serve_apart(engine, shared.first),
        other=serve_apart(engine, shared.other),
        again=engine.generate(shared.other, max_tokens=MAX_TOKENS)[0],
    )
