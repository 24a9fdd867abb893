"""The main job, to look at: a conversation survives the end of its engine, and changes engines.

A first vLLM process saves and reads nothing, so it pays the whole prompt at every turn. It ends. A new one
begins with nothing in memory and takes what it needs of the first turns from UCM. SGLang takes these turns
from there as well, and goes on with the conversation; then vLLM takes SGLang's turns. The answers are the
same, token by token.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from e2e.checkpoints import demo_family, write_checkpoint
from e2e.conversation import encode
from e2e.conversation import prompts as turns_of_text
from e2e.harness import SGLANG, Answer, Engine, EngineSetup, Prompt
from e2e.hicache import engine_arguments, ucm
from e2e.models import GRAIN_TOKENS, MODELS, connector, llm_arguments, tokens
from e2e.objects import wait_whole

LAYERS, HIDDEN, INNER = 8, 512, 1408
"""Sizes at which a prompt of 4K tokens takes seconds on two cores, and the checkpoint 44 MiB."""
ANSWER_TOKENS = 8
CONTEXT_TOKENS = 8192
CAPTION = (
    "Seconds to the first token; cold: in the first process, which only saves. Then in a new vLLM process "
    "and in SGLang, with what they took. Their own caches are empty before every turn: what they do not "
    "compute comes from UCM. * Turns that SGLang was the first to share."
)
APART = "not shared"
"""The salt of what the first process computes for comparison only."""
WARM_UP = Prompt(tokens(100, seed=1), salt=APART)
"""Saves one block: the first request that does pays for set-up (SGLang compiles its hash of pages)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, served by all processes."""

    cold: Answer
    vllm: Answer
    sglang: Answer
    shared_tokens: int = 0
    """Prompt tokens at most that vLLM had shared of it where SGLang was the first to share the rest."""

    @property
    def warm(self) -> tuple[Answer, Answer]:
        """What UCM helped with."""
        return self.vllm, self.sglang

    @property
    def equal(self) -> bool:
        """Whether all gave the same tokens."""
        return self.cold.tokens == self.vllm.tokens == self.sglang.tokens

    @property
    def wrong(self) -> Iterator[str]:
        """What is not as claimed."""
        if not self.equal:
            yield "other tokens"
        if self.cold.cached_tokens:
            yield "the first process read"
        if self.vllm.external_tokens <= self.shared_tokens:
            yield f"vLLM took nothing from {'SGLang' if self.shared_tokens else 'the first process'}"
        if not self.sglang.external_tokens:
            yield "SGLang took nothing"


def problems(turns: Sequence[Turn]) -> list[str]:
    """What is wrong with the outcome; empty when the demo showed what it claims."""
    return [f"turn {number}: {wrong}" for number, turn in enumerate(turns, 1) for wrong in turn.wrong]


def table_of(turns: Sequence[Turn]) -> Table:
    """The closing table, a line per turn."""
    table = Table(title="One conversation, three processes, two engines", caption=CAPTION)
    warm = ("vLLM took", "s", "sooner", "SGLang took", "s")
    for heading in ("turn", "prompt tokens", "cold s", *warm, "tokens equal"):
        table.add_column(heading, justify="right")
    for number, turn in enumerate(turns, 1):
        vllm, sglang = ((str(one.external_tokens), f"{seconds(one):.2f}") for one in turn.warm)
        sooner = f"{seconds(turn.cold) / seconds(turn.vllm):.1f}x"
        verdict = "[green]yes[/]" if turn.equal else "[red]no[/]"
        name = f"{number}*" if turn.shared_tokens else str(number)
        cells = (name, str(turn.cold.prompt_tokens), f"{seconds(turn.cold):.2f}")
        table.add_row(*cells, *vllm, sooner, *sglang, verdict)
    return table


def seconds(answer: Answer) -> float:
    """To the first token."""
    return answer.first_token_s or 0.0


def summary(turns: Sequence[Turn]) -> str:
    """The outcome in one line."""
    prompt = sum(turn.cold.prompt_tokens for turn in turns)
    vllm, sglang = (sum(turn.warm[engine].external_tokens for turn in turns) for engine in (0, 1))
    cold, warm = (
        sum(map(seconds, answers)) for answers in zip(*((t.cold, t.vllm) for t in turns), strict=True)
    )
    return (
        f"Of {prompt} prompt tokens the new vLLM process took {vllm} from UCM and SGLang {sglang}; "
        f"vLLM's first tokens together came after {warm:.1f} s instead of {cold:.1f} s."
    )


class Demo:
    """Runs the processes and shows how far they are."""

    def __init__(self, setup: EngineSetup, sglang: Path, *, root: Path, progress: Progress) -> None:
        self._setup = setup
        self._sglang = replace(setup, python=sglang, multiprocess=True, kind=SGLANG)
        self._root = root
        self._progress = progress

    def run(self, prompts: Sequence[Prompt]) -> list[Turn]:
        """Serve `prompts`: half by vLLM, half by SGLang, and each half by the other."""
        with self._step("writing a checkpoint"):
            family = demo_family(layers=LAYERS, hidden=HIDDEN, inner=INNER)
            checkpoint = write_checkpoint(self._setup.directory / "checkpoint", family)
        half = (len(prompts) + 1) // 2
        alone = [*prompts[:half], *(replace(prompt, salt=APART) for prompt in prompts[half:])]
        with self._vllm("first vLLM", checkpoint, role="kv_producer") as engine:
            cold = self._serve(engine, alone)
        with self._vllm("new vLLM", checkpoint, role="kv_both") as engine:
            vllm = self._serve(engine, prompts[:half])
            with self._started("SGLang", self._sglang, self._sglang_arguments(checkpoint)) as other:
                sglang = self._serve(other, prompts)
                files = {*pages(alone, cold), *pages(prompts, sglang), (APART, WARM_UP.tokens[:GRAIN_TOKENS])}
                with self._step("SGLang: saving"):
                    wait_whole(self._root, len(files), writer=other)
            vllm += self._serve(engine, prompts[half:])
        shared = [0] * half + [cold[half - 1].prompt_tokens] * (len(prompts) - half)
        return [Turn(*turn) for turn in zip(cold, vllm, sglang, shared, strict=True)]

    def _vllm(self, name: str, checkpoint: Path, *, role: str) -> AbstractContextManager[Engine]:
        # Without a prefix cache of its own, whatever an engine does not compute comes from UCM.
        more = {"dtype": "float32", "enable_prefix_caching": False, "num_gpu_blocks_override": 96}
        more |= {"max_model_len": CONTEXT_TOKENS, "max_num_batched_tokens": CONTEXT_TOKENS}
        more |= {"kv_transfer_config": connector(self._root, role=role)}
        return self._started(name, self._setup, llm_arguments(MODELS["dense"], checkpoint, **more))

    def _sglang_arguments(self, checkpoint: Path) -> dict[str, Any]:
        more = {"page_size": GRAIN_TOKENS, "max_total_tokens": CONTEXT_TOKENS}
        return engine_arguments(checkpoint, **more, chunked_prefill_size=CONTEXT_TOKENS, **ucm(self._root))

    @contextmanager
    def _started(self, name: str, setup: EngineSetup, arguments: dict[str, Any]) -> Iterator[Engine]:
        with Engine(setup, name.replace(" ", "-")) as engine:
            with self._step(f"{name}: starting"):
                engine.start(arguments).generate([WARM_UP], max_tokens=ANSWER_TOKENS)
            yield engine
            with self._step(f"{name}: ending"):
                engine.close()

    def _serve(self, engine: Engine, prompts: Sequence[Prompt]) -> list[Answer]:
        answers = []
        with self._step(f"{engine.log.stem}: serving turns", len(prompts)) as advance:
            for prompt in prompts:
                answers += engine.generate_apart([prompt], max_tokens=ANSWER_TOKENS)
                advance()
        return answers

    @contextmanager
    def _step(self, name: str, total: int = 1) -> Iterator[Callable[[], None]]:
        if not self._progress.console.is_terminal:  # a log has no live display: say what begins
            self._progress.console.print(f"{name} ...")
        task = self._progress.add_task(name, total=total)
        yield lambda: self._progress.advance(task)
        self._progress.update(task, completed=total)


def pages(
    prompts: Sequence[Prompt], answers: Sequence[Answer]
) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """What requests leave behind, by all that it depends on; an answer's last token is never computed."""
    for prompt, answer in zip(prompts, answers, strict=True):
        known = prompt.tokens + answer.tokens[:-1]
        for end in range(GRAIN_TOKENS, len(known) + 1, GRAIN_TOKENS):
            yield prompt.salt, known[:end]


def show_progress(console: Console) -> Progress:
    """A line per step: a spinner while it lasts, how many turns are done, how long it took."""
    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"), BarColumn())
    return Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console)


def main(
    python: Annotated[
        Path, typer.Option(envvar="UCM_VLLM_PYTHON", help="The python of an environment with vLLM and UCM.")
    ],
    sglang: Annotated[
        Path, typer.Option(envvar="UCM_SGLANG_PYTHON", help="The python of one with SGLang and UCM.")
    ],
    turns: Annotated[int, typer.Option(min=2, help="At most so many turns of the conversation.")] = 9,
) -> None:
    """Serve a conversation by one vLLM process, then by a new one and by SGLang, and compare."""
    console = Console()
    prompts = [Prompt(encode(text)) for text in turns_of_text()[:turns]]
    with tempfile.TemporaryDirectory(prefix="ucm-demo-") as place, show_progress(console) as progress:
        setup, root = EngineSetup(python, Path(place)), Path(place) / "cache"
        outcome = Demo(setup, sglang, root=root, progress=progress).run(prompts)
    console.print(table_of(outcome), summary(outcome))
    if found := problems(outcome):
        console.print(f"[red]It did not work: {'; '.join(found)}.[/]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
