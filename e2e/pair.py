"""Both engines on the same checkpoints, and the runs of them that several stories look at."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from e2e import objects
from e2e.crossing import Crossed, cross
from e2e.harness import SGLANG, Answer, Engine, EngineSetup, Prompt
from e2e.hicache import engine_arguments, linker, ucm
from e2e.models import MAX_TOKENS, MODELS, Model, connector, llm_arguments, tokens
from e2e.pools import POOLS, Pools
from e2e.runs import Runs, serve_apart
from e2e.shared import DENSE, SHARED, Shared

MORE = tokens(60, seed=21)
"""What the next turn of a prompt has after the answer."""
POOL_TOKENS = 8192
"""Of vLLM's pool."""


@dataclass(frozen=True, slots=True)
class Alone:
    """SGLang without UCM: every prompt with its own caches empty, but for the last."""

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


@dataclass(frozen=True, slots=True)
class Linked:
    """An SGLang with UCM at its radix tree that served the first prompts on an empty root, and ended."""

    root: Path
    """Left as that process left it."""
    first: tuple[Answer, ...]
    pages: frozenset[Path]
    """What the first prompt left, below the root."""


class Pair:
    """Starts the engines; remembers the runs that several stories look at."""

    def __init__(self, runs: Runs, python: Path) -> None:
        self.runs = runs
        self._setup = EngineSetup(python, runs.directory, multiprocess=True, kind=SGLANG)
        self.alone = cache(self._run_alone)
        self.saved = cache(self._run_saving)
        self.linking = cache(self._run_linking)
        self.crossed = cache(self._run_crossing)

    def sglang(self, name: str, root: Path | None, shared: Shared = DENSE, **settings: Any) -> Engine:
        """An engine of SGLang, with UCM on `root` if that is not None."""
        return self._process(name, shared).start(self._sglang_arguments(shared, root, **settings))

    def linked(self, name: str, root: Path, **settings: Any) -> Engine:
        """An engine of SGLang with UCM on `root` at its radix tree, without a host cache."""
        checkpoint = self.runs.checkpoint(DENSE.family)
        return self._process(name, DENSE).start(engine_arguments(checkpoint, **linker(root, **settings)))

    def pools(self, name: str) -> Pools:
        """A process with SGLang imported that makes pools and trees, and never a model."""
        return Pools(replace(self._setup, kind=POOLS), f"sglang-pools-{name}")

    @contextmanager
    def both(self, name: str, shared: Shared, root: Path) -> Iterator[tuple[Engine, Engine]]:
        """Engines of vLLM and SGLang, with UCM on one root in grains of a page; they start together."""
        vllm = self.runs.process(f"vllm-{shared.name}-{name}")
        with vllm, self._process(name, shared) as sglang:
            vllm.begin_start(self._vllm_arguments(shared, root))
            sglang.begin_start(self._sglang_arguments(shared, root))
            vllm.end_start()
            sglang.end_start()
            yield vllm, sglang

    def root_copy(self, name: str) -> Path:
        """A copy of the root that the saving run left."""
        return self.runs.copy(self.saved().root, f"sglang-{name}")

    def _process(self, name: str, shared: Shared) -> Engine:
        return self.runs.process(f"sglang-{shared.name}-{name}", self._setup)

    def _sglang_arguments(self, shared: Shared, root: Path | None, **settings: Any) -> dict[str, Any]:
        behind = {} if root is None else ucm(root, **settings)
        cut = {"page_size": shared.page_tokens, "dtype": shared.dtype}
        return engine_arguments(self.runs.checkpoint(shared.family), **cut, **behind)

    def _vllm_arguments(self, shared: Shared, root: Path) -> dict[str, Any]:
        cut = {"block_size": shared.block_tokens, "dtype": shared.dtype}
        cut |= {"num_gpu_blocks_override": POOL_TOKENS // shared.block_tokens}
        behind = connector(root, grain_tokens=shared.page_tokens)
        model = MODELS.get(shared.family, Model(shared.family, shared.block_tokens))
        checkpoint = self.runs.checkpoint(shared.family)
        return llm_arguments(model, checkpoint, kv_transfer_config=behind, **cut)

    def _run_alone(self) -> Alone:
        with self.sglang("alone", None) as engine:
            first = serve_apart(engine, DENSE.first)
            turns = zip(DENSE.first, first, strict=True)
            longer = tuple(Prompt(prompt.tokens + answer.tokens + MORE) for prompt, answer in turns)
            return Alone(
                first,
                longer=serve_apart(engine, longer),
                other=serve_apart(engine, DENSE.other),
                again=engine.generate(DENSE.other, max_tokens=MAX_TOKENS)[0],
                longer_prompts=longer,
            )

    def _run_saving(self) -> Saved:
        root = self.runs.empty_root("sglang-saved")
        answers: list[Answer] = []
        pages: list[frozenset[Path]] = [frozenset()]
        with self.sglang("saving", root) as engine:
            for prompt in DENSE.first:
                answers += serve_apart(engine, (prompt,))
                found = objects.wait_whole(root, DENSE.pages(answers), writer=engine)
                pages.append(frozenset(path.relative_to(root) for path in found).difference(*pages))
            (flushed,) = serve_apart(engine, DENSE.first[:1])
        return Saved(root, tuple(answers), flushed, tuple(pages[1:]))

    def _run_linking(self) -> Linked:
        root = self.runs.empty_root("sglang-linked")
        with self.linked("linking", root) as engine:
            first = serve_apart(engine, DENSE.first[:1])
            pages = objects.wait_whole(root, DENSE.pages(first), writer=engine)
            pages_of_first = frozenset(path.relative_to(root) for path in pages)
            first += serve_apart(engine, DENSE.first[1:])
            objects.wait_whole(root, DENSE.pages(first), writer=engine)
        return Linked(root, first, pages_of_first)

    def _run_crossing(self, name: str) -> Crossed:
        shared, root = SHARED[name], self.runs.empty_root(f"crossed-{name}")
        if shared.onto is not None:
            root = self.runs.copy(self.crossed(shared.onto).root, f"crossed-{name}")
        with self.both("crossing", shared, root) as (vllm, sglang):
            checkpoint = self.runs.checkpoint(shared.family)
            return cross(vllm, sglang, shared=shared, root=root, checkpoint=checkpoint)
