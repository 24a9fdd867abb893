"""What UCM is held against, on one set of requests: full recompute, and states folded into a prompt's hash.

Each request of `requests.json` is served by one vLLM after the other: without UCM; with UCM; and with UCM as
if a state were part of its prompt's hash, so that a model with states can only take up a whole prompt that
was served before. vLLM's own prefix cache is emptied before each request. Output tokens, hit lengths and
times to the first token go into `baselines.json`, which the next run can be compared with. It fails when
tokens differ, or when a folded hit is not the one that arithmetic says.
"""

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from e2e.checkpoints import bench_family, write_checkpoint
from e2e.harness import Answer, Engine, EngineSetup, Prompt
from e2e.models import BENCH_MODELS, Model, connector, llm_arguments, tokens

REQUESTS = Path(__file__).with_name("requests.json")
RESULT = Path(__file__).with_name("baselines.json")
ANSWER_TOKENS = 8
FOLDED: Mapping[str, Any] = {"retention": {"*": {"second_sight": False}}}
"""States are kept at the end of prompts alone, and so found only by what begins with the whole of one."""
WAYS: Mapping[str, Mapping[str, Any] | None] = {"recompute": None, "folded": FOLDED, "ucm": {}}
"""Settings of UCM; None: without it."""
WARM_UP = Prompt(tokens(40, seed=99))
"""Shorter than a block, so nothing of it is saved; the first request of a process pays for its set-up."""


def requests() -> dict[str, Prompt]:
    """The committed requests by name, in order."""
    named = json.loads(REQUESTS.read_text(encoding="utf-8"))["requests"]
    return {name: Prompt(assembled(pieces)) for name, pieces in named.items()}


def assembled(pieces: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The token ids of pieces (seed, tokens), one after the other."""
    return tuple(token for seed, count in pieces for token in tokens(count, seed=seed))


def folded_hits(model: Model, prompts: Sequence[Prompt]) -> list[int]:
    """Tokens that each prompt finds of those before it, if states are found with whole prompts alone."""
    return [
        max((found_in(model, prompt.tokens, earlier.tokens) for earlier in prompts[:number]), default=0)
        for number, prompt in enumerate(prompts)
    ]


def found_in(model: Model, prompt: tuple[int, ...], earlier: tuple[int, ...]) -> int:
    """Tokens of `prompt` that what was saved of `earlier` serves."""
    align = model.alignment_tokens
    if not model.has_state:
        return min(common(prompt, earlier), len(prompt) - 1) // align * align
    end = (len(earlier) - 1) // align * align
    return end if end < len(prompt) and common(prompt, earlier) >= end else 0


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def serve(setup: EngineSetup, model: Model, way: str, *, prompts: Sequence[Prompt]) -> list[Answer]:
    """Serve all prompts in order by one engine that runs `way`."""
    checkpoint = write_checkpoint(setup.directory / model.family, bench_family(model.family))
    more: dict[str, Any] = {"num_gpu_blocks_override": max(64, 2 * 2048 // model.engine_block_tokens)}
    if (settings := WAYS[way]) is not None:
        root = setup.directory / f"{model.family} {way}"
        more["kv_transfer_config"] = connector(root, ring_bytes="512MiB", **settings)
    with Engine(setup, f"{model.family}-{way}").start(llm_arguments(model, checkpoint, **more)) as engine:
        engine.generate([WARM_UP], max_tokens=ANSWER_TOKENS)
        return engine.generate_apart(prompts, max_tokens=ANSWER_TOKENS)


def problems(model: Model, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Answer]]) -> list[str]:
    """What is wrong with the outcome; empty when the baselines stand."""
    right = [answer.tokens for answer in answers["recompute"]]
    found = [f"{way}: other tokens" for way in WAYS if [a.tokens for a in answers[way]] != right]
    hits = {way: [answer.external_tokens for answer in answers[way]] for way in WAYS}
    if hits["folded"] != (expected := folded_hits(model, prompts)):
        found.append(f"folded: hits {hits['folded']}, expected {expected}")
    if any(ours < theirs for ours, theirs in zip(hits["ucm"], hits["folded"], strict=True)):
        found.append(f"ucm: hits {hits['ucm']}, fewer than folded {hits['folded']}")
    return [f"{model.family}: {problem}" for problem in found]


def line(name: str, number: int, answers: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """What became of one request."""
    each = {way: answers[way][number] for way in WAYS}
    times = {way: round(1e3 * (answer.first_token_s or 0.0)) for way, answer in each.items()}
    said: dict[str, Any] = {"request": name, "prompt_tokens": each["recompute"].prompt_tokens}
    said |= {"hit_tokens": {way: answer.external_tokens for way, answer in each.items()}}
    return said | {"first_token_ms": times, "output": each["recompute"].tokens}


def text(families: Mapping[str, Mapping[str, Any]]) -> str:
    """The file: JSON, one request a line."""
    parts = []
    for family, its in families.items():
        lines = ",\n".join(f"   {json.dumps(one)}" for one in its["requests"])
        head = f' "{family}": {{\n  "machine": {json.dumps(its["machine"])},\n  "requests": [\n'
        parts.append(f"{head}{lines}\n  ]\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """Sums over all requests of a family."""
    hits = {way: sum(one["hit_tokens"][way] for one in lines) for way in WAYS}
    times = {way: sum(one["first_token_ms"][way] for one in lines) for way in WAYS}
    return ", ".join(f"{way} {hits[way]} tokens {times[way]} ms" for way in WAYS)


def main(
    python: Annotated[
        Path, typer.Option(envvar="UCM_VLLM_PYTHON", help="The python of an environment with vLLM and UCM.")
    ],
    families: Annotated[list[str] | None, typer.Argument(help="All unless named.")] = None,
    note: Annotated[str, typer.Option(help="What else the machine does meanwhile.")] = "nothing else",
) -> None:
    """Run all ways on all requests and write what came of it into `baselines.json`."""
    named, prompts = list(requests()), list(requests().values())
    written = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    machine = f"{os.cpu_count()} processors, {platform.machine()}, which did meanwhile: {note}"
    wrong = []
    for family in families or BENCH_MODELS:
        with tempfile.TemporaryDirectory(prefix="ucm-baselines-") as place:
            setup = EngineSetup(python, Path(place))
            answers = {way: serve(setup, BENCH_MODELS[family], way, prompts=prompts) for way in WAYS}
        wrong += problems(BENCH_MODELS[family], prompts, answers)
        lines = [line(name, number, answers) for number, name in enumerate(named)]
        written[family] = {"machine": machine, "requests": lines}
        RESULT.write_text(text(written), encoding="utf-8")
        typer.echo(f"{family}: {summary(lines)}")
    if wrong:
        typer.echo("\n".join(wrong))
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
