"""The main job, to look at: a conversation is served by one vLLM process, which ends, and again by a new one.

The first process saves and reads nothing, so it pays the whole prompt at every turn. The new one begins with
nothing in memory and takes what it needs from UCM. The answers are the same, token by token.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from e2e.harness import Answer, Engine, EngineSetup, Prompt
from e2e.models import MODELS, connector, llm_arguments, tokens

LAYERS, HIDDEN, INNER = 8, 512, 1408
"""Sizes at which a prompt of 4K tokens takes seconds on two cores, and the checkpoint 44 MiB."""
ANSWER_TOKENS = 8
CAPTION = (
    "Seconds to the first token, cold: in the first process, which only saves; warm: in the new process, "
    "which loads. vLLM's own prefix cache is off in both: what is not computed comes from UCM."
)
WARM_UP = Prompt(tokens(40, seed=1))
"""Shorter than a block, so nothing of it is saved; the first request of a process pays for its set-up."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, served by both processes."""

    cold: Answer
    warm: Answer

    @property
    def equal(self) -> bool:
        """Whether both gave the same tokens."""
        return self.cold.tokens == self.warm.tokens

    @property
    def speedup(self) -> float:
        """How many times sooner the new process gave its first token."""
        return (self.cold.first_token_s or 0.0) / (self.warm.first_token_s or float("inf"))


def problems(turns: Sequence[Turn]) -> list[str]:
    """What is wrong with the outcome; empty when the demo showed what it claims."""
    found = [f"turn {number}: other tokens" for number, turn in enumerate(turns, 1) if not turn.equal]
    found += [f"turn {n}: nothing served" for n, turn in enumerate(turns, 1) if not turn.warm.external_tokens]
    found += [
        f"turn {n}: the first process read" for n, turn in enumerate(turns, 1) if turn.cold.cached_tokens
    ]
    return found


def table_of(turns: Sequence[Turn]) -> Table:
    """The closing table, a line per turn."""
    table = Table(title="One conversation, two processes", caption=CAPTION)
    headings = ("turn", "prompt tokens", "from UCM", "computed", "cold", "warm", "sooner", "tokens equal")
    for heading in headings:
        table.add_column(heading, justify="right")
    for number, turn in enumerate(turns, 1):
        times = (f"{answer.first_token_s or 0.0:.2f}" for answer in (turn.cold, turn.warm))
        counts = (turn.warm.prompt_tokens, turn.warm.external_tokens, turn.warm.computed_tokens)
        verdict = "[green]yes[/]" if turn.equal else "[red]no[/]"
        table.add_row(str(number), *map(str, counts), *times, f"{turn.speedup:.1f}x", verdict)
    return table


def summary(turns: Sequence[Turn]) -> str:
    """The outcome in one line."""
    prompt = sum(turn.warm.prompt_tokens for turn in turns)
    served = sum(turn.warm.external_tokens for turn in turns)
    cold = sum(turn.cold.first_token_s or 0.0 for turn in turns)
    warm = sum(turn.warm.first_token_s or 0.0 for turn in turns)
    return (
        f"The new process took {served} of {prompt} prompt tokens from UCM; "
        f"all first tokens together came after {warm:.1f} s instead of {cold:.1f} s."
    )


class Demo:
    """Runs both processes and shows how far they are."""

    def __init__(self, setup: EngineSetup, root: Path, *, progress: Progress) -> None:
        self._setup = setup
        self._root = root
        self._progress = progress

    def run(self, prompts: Sequence[Prompt]) -> list[Turn]:
        """Serve `prompts` in order by a first and then by a new process."""
        with self._step("writing a checkpoint"):
            family = demo_family(layers=LAYERS, hidden=HIDDEN, inner=INNER)
            checkpoint = write_checkpoint(self._setup.directory / "checkpoint", family)
        cold = self._serve("first process", prompts, arguments=self._arguments(checkpoint, "kv_producer"))
        warm = self._serve("new process", prompts, arguments=self._arguments(checkpoint, "kv_both"))
        return [Turn(*pair) for pair in zip(cold, warm, strict=True)]

    def _arguments(self, checkpoint: Path, role: str) -> dict[str, Any]:
        # Without a prefix cache of its own, whatever an engine does not compute comes from UCM.
        more: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": False, "max_model_len": 8192}
        more |= {"max_num_batched_tokens": 8192, "num_gpu_blocks_override": 96}
        transfer = connector(self._root, role=role)
        return llm_arguments(MODELS["dense"], checkpoint, kv_transfer_config=transfer, **more)

    def _serve(self, name: str, prompts: Sequence[Prompt], *, arguments: dict[str, Any]) -> list[Answer]:
        with Engine(self._setup, name.replace(" ", "-")) as engine:
            with self._step(f"{name}: starting vLLM"):
                engine.start(arguments).generate([WARM_UP], max_tokens=ANSWER_TOKENS)
            with self._step(f"{name}: serving turns", len(prompts)) as advance:
                answers = []
                for prompt in prompts:
                    answers += engine.generate([prompt], max_tokens=ANSWER_TOKENS)
                    advance()
            with self._step(f"{name}: ending"):
                engine.close()
        return answers

    @contextmanager
    def _step(self, name: str, total: int = 1) -> Iterator[Callable[[], None]]:
        if not self._progress.console.is_terminal:  # a log has no live display: say what begins
            self._progress.console.print(f"{name} ...")
        task = self._progress.add_task(name, total=total)
        yield lambda: self._progress.advance(task)
        self._progress.update(task, completed=total)


def show_progress(console: Console) -> Progress:
    """A line per step: a spinner while it lasts, how many turns are done, how long it took."""
    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"), BarColumn())
    return Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console)


def main(
    python: Annotated[
        Path, typer.Option(envvar="UCM_VLLM_PYTHON", help="The python of an environment with vLLM and UCM.")
    ],
    turns: Annotated[int, typer.Option(min=1, help="At most so many turns of the conversation.")] = 9,
) -> None:
    """Serve a conversation by one vLLM process, then by a new one, and compare."""
    console = Console()
    prompts = [Prompt(encode(text)) for text in turns_of_text()[:turns]]
    with tempfile.TemporaryDirectory(prefix="ucm-demo-") as place, show_progress(console) as progress:
        demo = Demo(EngineSetup(python, Path(place)), Path(place) / "cache", progress=progress)
        outcome = demo.run(prompts)
    console.print(table_of(outcome), summary(outcome))
    if found := problems(outcome):
        console.print(f"[red]It did not work: {'; '.join(found)}.[/]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
