"""Both engines, vLLM and SGLang, on the same checkpoints in float32, and what each computes without UCM."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from e2e import objects
from e2e.harness import SGLANG, Answer, Engine, EngineSetup, Prompt
from e2e.hicache import PAGE_TOKENS, engine_arguments, ucm
from e2e.models import MAX_TOKENS, tokens
from e2e.runs import Runs, serve_apart

MORE = tokens(60, seed=21)
"""What the next turn of a prompt has after the answer."""


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


def saved_tokens(answer: Answer) -> int:
    """Tokens of a request in whole pages; the last of its answer is never computed."""
    return (answer.prompt_tokens + len(answer.tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS


def page_count(*answers: Answer) -> int:
    """Pages that requests leave behind, and objects of a model with one row."""
    return sum(saved_tokens(answer) for answer in answers) // PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Alone:
    """An engine without UCM: every prompt with its own caches empty, but for the last."""

    first: tuple[Answer, ...]
    longer: tuple[Answer, ...]
    other: tuple[Answer, ...]
    again: Answer
    """The other prompt once more, from the engine's own cache as far as it has one."""
    longer_prompts: tuple[Prompt, ...]
    """The next turn of each first prompt: the prompt, its answer, and some tokens more."""


@dataclass(frozen=True, slots=True)
class Saved:
    """An SGLang with UCM that served the first prompts on an empty root, and ended."""

    root: Path
    """Left as that process left it: stories that change a root take a copy."""
    first: tuple[Answer, ...]
    flushed: Answer
    """The first of them once more, after the engine's own caches were emptied."""
    pages: tuple[frozenset[Path], ...]
    """Per first prompt the objects that it left, below the root."""


class Pair:
    """Starts either engine; remembers the runs that several stories look at."""

    def __init__(self, runs: Runs, python: Path) -> None:
        self.runs = runs
        self._setup = EngineSetup(python, runs.directory, multiprocess=True, kind=SGLANG)
        self.sglang_alone = cache(self._run_sglang)
        self.vllm_alone = cache(self._run_vllm)
        self.saved = cache(self._run_saving)

    def sglang(self, name: str, family: str, root: Path | None, **settings: Any) -> Engine:
        """An engine of SGLang on `family`, with UCM on `root` if that is not None."""
        behind = {} if root is None else ucm(root, **settings)
        engine = self.runs.process(f"sglang-{family}-{name}", self._setup)
        return engine.start(engine_arguments(self.runs.checkpoint(family), **behind))

    def vllm(self, name: str, family: str, root: Path | None) -> Engine:
        """An engine of vLLM on `family`, with UCM on `root` if that is not None, in grains of a page."""
        settings = {"grain_tokens": PAGE_TOKENS}
        return self.runs.engine(f"pair-{name}", family, root, settings=settings, **SHARED[family].vllm)

    def root_copy(self, family: str, name: str) -> Path:
        """A copy of the root that the saving run of `family` left."""
        return self.runs.copy(self.saved(family).root, f"sglang-{family}-{name}")

    def _run_sglang(self, family: str) -> Alone:
        with self.sglang("alone", family, None) as engine:
            return _serve_alone(engine, SHARED[family])

    def _run_vllm(self, family: str) -> Alone:
        with self.vllm("alone", family, None) as engine:
            return _serve_alone(engine, SHARED[family])

    def _run_saving(self, family: str) -> Saved:
        root = self.runs.empty_root(f"sglang-{family}")
        answers: list[Answer] = []
        pages: list[frozenset[Path]] = [frozenset()]
        with self.sglang("saving", family, root) as engine:
            for prompt in SHARED[family].first:
                answers += serve_apart(engine, (prompt,))
                found = objects.wait_whole(root, page_count(*answers), writer=engine)
                pages.append(frozenset(path.relative_to(root) for path in found).difference(*pages))
            (flushed,) = serve_apart(engine, SHARED[family].first[:1])
        return Saved(root, tuple(answers), flushed, tuple(pages[1:]))


def _serve_alone(engine: Engine, shared: Shared) -> Alone:
    first = serve_apart(engine, shared.first)
    turns = zip(shared.first, first, strict=True)
    longer = tuple(Prompt(prompt.tokens + answer.tokens + MORE) for prompt, answer in turns)
    return Alone(
        first,
        longer=serve_apart(engine, longer),
        other=serve_apart(engine, shared.other),
        again=engine.generate(shared.other, max_tokens=MAX_TOKENS)[0],
        longer_prompts=longer,
    )
