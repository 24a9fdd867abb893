"""The runs that several stories look at, each made once, by processes that have ended by then."""

import itertools
import shutil
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from e2e.checkpoints import FAMILIES, alter_one_value, write_checkpoint
from e2e.harness import Answer, Blocks, Engine, EngineSetup, Prompt
from e2e.models import MAX_TOKENS, MODELS, Prompts, connector, llm_arguments, prompts_of

ALTERED_TENSOR = "model.layers.0.input_layernorm.weight"
"""The tensor of which one value differs in "another checkpoint"; every family has it."""


@dataclass(frozen=True, slots=True)
class Plain:
    """vLLM without UCM."""

    first: tuple[Answer, ...]
    longer: tuple[Answer, ...]
    other: tuple[Answer, ...]
    own_first: tuple[Answer, ...]
    """The first prompts again, from the engine's own prefix cache."""
    own_longer: tuple[Answer, ...]
    longer_prompts: tuple[Prompt, ...]
    prefilled: tuple[tuple[float, ...], ...]
    """Per first prompt, logprobs of its answer's first tokens, each after a prefill of all before it."""

    @property
    def spread(self) -> float:
        """The largest difference of a logprob that the engine shows against itself.

        First tokens from its own prefix cache against first tokens without. vLLM switches that cache off for
        MLA on a CPU; there, tokens decoded on the cached prefix against tokens after a prefill of all of it.
        """
        own, cold = self.own_first + self.own_longer, self.first + self.longer
        pairs = [(a.logprobs[0], b.logprobs[0]) for a, b in zip(own, cold, strict=True)]
        if not any(answer.cached_tokens for answer in own):
            for answer, prefilled in zip(self.first, self.prefilled, strict=True):
                pairs += zip(answer.logprobs, prefilled, strict=False)
        return max(abs(a - b) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Saved:
    """A process with UCM that served the first prompts on an empty root, and ended."""

    root: Path
    """Left as that process left it: stories that change a root take a copy."""
    first: tuple[Answer, ...]
    blocks: tuple[Blocks, ...]
    """Digests of the engine's blocks of each first prompt, as computed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A fresh process with UCM on a copy of that root; its own prefix cache emptied before every prompt."""

    first: tuple[Answer, ...]
    longer: tuple[Answer, ...]
    other: tuple[Answer, ...]
    salted: tuple[Answer, ...]
    """The first prompts under a salt that nobody used before."""
    salted_again: tuple[Answer, ...]
    blocks: tuple[Blocks, ...]
    """Digests of the engine's blocks of each first prompt, after the load."""


class Runs:
    """Starts engines; remembers the runs and the checkpoints so far."""

    def __init__(self, python: Path, directory: Path) -> None:
        self.directory = directory
        self.setup = EngineSetup(python, directory)
        """For one process; `process` starts engines with it."""
        self._numbers = itertools.count(1)
        self.checkpoint = cache(self._write_checkpoint)
        self.altered_checkpoint = cache(self._write_altered)
        self.plain = cache(self._run_plain)
        self.saved = cache(self._run_saving)
        self.resumed = cache(self._run_resuming)

    def process(self, name: str, setup: EngineSetup | None = None, **changed: Any) -> Engine:
        """A process with vLLM imported, or what `setup` says, without an engine yet."""
        setup = replace(setup or self.setup, **changed)
        return Engine(setup, f"{next(self._numbers):02d}-{name}")

    def engine(self, name: str, family: str, root: Path | None, **more: Any) -> Engine:
        """A process with an engine for `family`, with UCM on `root` unless that is None.

        `more` are arguments of `vllm.LLM`; settings of UCM go in `settings`.
        """
        settings = more.pop("settings", {})
        if root is not None:
            more["kv_transfer_config"] = connector(root, **settings)
        checkpoint = more.pop("checkpoint", None) or self.checkpoint(family)
        return self.process(f"{family}-{name}").start(llm_arguments(MODELS[family], checkpoint, **more))

    def empty_root(self, name: str) -> Path:
        """A path for a root that nobody used; not made yet."""
        return self.directory / "roots" / f"{next(self._numbers):02d}-{name}"

    def root_copy(self, family: str, name: str) -> Path:
        """A copy of the root that the saving run of `family` left."""
        return self.copy(self.saved(family).root, f"{family}-{name}")

    def copy(self, root: Path, name: str) -> Path:
        """A copy of `root`."""
        return Path(shutil.copytree(root, self.empty_root(name)))

    def prompts(self, family: str) -> Prompts:
        """The prompts for `family`."""
        return prompts_of(MODELS[family])

    def _write_checkpoint(self, family: str) -> Path:
        return write_checkpoint(self.directory / "checkpoints" / family, FAMILIES[family]())

    def _write_altered(self, family: str) -> Path:
        target = self.directory / "checkpoints" / f"{family}-altered"
        return alter_one_value(self.checkpoint(family), target, tensor=ALTERED_TENSOR)

    def _run_plain(self, family: str) -> Plain:
        prompts = self.prompts(family)
        with self.engine("plain", family, None) as engine:
            first = serve_apart(engine, prompts.first)
            longer_prompts = prompts.longer(tuple(answer.tokens for answer in first))
            own = [serve_after(engine, prompt, prompt) for prompt in prompts.first]
            own_longer = [
                serve_after(engine, *pair) for pair in zip(prompts.first, longer_prompts, strict=True)
            ]
            longer, other = serve_apart(engine, longer_prompts), serve_apart(engine, prompts.other)
            prefilled = tuple(
                prefilled_logprobs(engine, *pair) for pair in zip(prompts.first, first, strict=True)
            )
        return Plain(first, longer, other, tuple(own), tuple(own_longer), longer_prompts, prefilled)

    def _run_saving(self, family: str) -> Saved:
        root = self.empty_root(f"{family}-saved")
        with self.engine("saving", family, root) as engine:
            seen = [observe_apart(engine, prompt) for prompt in self.prompts(family).first]
        return Saved(root, tuple(answer for answer, _ in seen), tuple(blocks for _, blocks in seen))

    def _run_resuming(self, family: str) -> Resumed:
        prompts, root = self.prompts(family), self.root_copy(family, "resumed")
        salted = tuple(replace(prompt, salt="tenant-b") for prompt in prompts.first)
        with self.engine("resuming", family, root) as engine:
            seen = [observe_apart(engine, prompt) for prompt in prompts.first]
            return Resumed(
                first=tuple(answer for answer, _ in seen),
                blocks=tuple(blocks for _, blocks in seen),
                longer=serve_apart(engine, self.plain(family).longer_prompts),
                other=serve_apart(engine, prompts.other),
                salted=serve_apart(engine, salted),
                salted_again=serve_apart(engine, salted),
            )


def complaints(log: str, root: Path) -> list[str]:
    """The warnings of a log about the root."""
    return [line for line in log.splitlines() if str(root) in line and " WARNING " in line]


def observe_apart(engine: Engine, prompt: Prompt) -> tuple[Answer, Blocks]:
    """Serve `prompt` with the engine's own prefix cache emptied before it, and look at its blocks."""
    engine.forget()
    return engine.observe(prompt, max_tokens=MAX_TOKENS)


def serve_apart(engine: Engine, prompts: tuple[Prompt, ...]) -> tuple[Answer, ...]:
    """Serve each prompt with the engine's own prefix cache emptied before it."""
    return tuple(engine.generate_apart(prompts, max_tokens=MAX_TOKENS))


def prefilled_logprobs(engine: Engine, prompt: Prompt, answer: Answer, count: int = 8) -> tuple[float, ...]:
    """The logprobs of the first `count` tokens of `answer`, each after a prefill of all tokens before it."""
    steps = tuple(Prompt(prompt.tokens + answer.tokens[:done]) for done in range(count))
    return tuple(one.logprobs[0] for one in engine.generate_apart(steps, max_tokens=1))


def serve_after(engine: Engine, before: Prompt, prompt: Prompt) -> Answer:
    """Serve `prompt` when the engine's own prefix cache holds `before` and nothing else."""
    engine.forget()
    engine.generate([before], max_tokens=MAX_TOKENS)
    return engine.generate([prompt], max_tokens=MAX_TOKENS)[0]
