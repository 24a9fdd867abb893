"""Time to the first token of prompts that another engine computed: vLLM and SGLang on CPU, one cache.

Needs both engines: the environment variables `UCM_VLLM_PYTHON` and `UCM_SGLANG_PYTHON` name the pythons of
their environments. Models are those of `bench_vllm`. On one root vLLM saves one prompt and SGLang another;
then each is asked for the other's prompt, in turns with an engine of its kind without UCM, which computes it.
SGLang reads through both of its seams. All caches of the engines themselves are emptied before every request;
UCM's bytes come from the ring that the processes of a node share.

There are no kernels of SGLang's for CPUs: it computes every layer in plain torch, and the doubles of `e2e`
copy between its host and device pools, one thread and one layer at a time.
Where a prefix is there already, it computes the attention of all tokens again and keeps that of the new ones.
So a prompt that lies in its own device pool is measured beside: no cache can be sooner.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from e2e import objects
from e2e.checkpoints import bench_family, write_checkpoint
from e2e.harness import SGLANG, Answer, Engine, EngineSetup, Prompt
from e2e.hicache import engine_arguments, linker, ucm
from e2e.models import BENCH_MODELS, GRAIN_TOKENS, Model, connector, llm_arguments, tokens

from benchmarks.bench_vllm import bench_arguments, figure
from benchmarks.frame import Figure

FAMILIES = ("dense",)
"""Not MLA, whose turns take minutes."""
REUSED_TOKENS = 4096
"""Whole pages of SGLang and whole blocks of vLLM; the grain of both is a page."""
TAIL_TOKENS = 16
ROUNDS = 10
COMPUTED_EVERY = 4
"""Rounds between two computed prompts, which take much longer."""
LIMIT = 0.15
"""Of the time that computing takes."""
RING_BYTES = "512MiB"
"""Holds both prompts."""
POOL_TOKENS = 8192
"""Of SGLang's device pool, and the longest chunk of a prefill: it takes a prompt in one."""
HELD = "SGLang's own cache"
"""SGLang without UCM, on what it has just computed."""
PYTHONS = {"vLLM": "UCM_VLLM_PYTHON", "SGLang": "UCM_SGLANG_PYTHON"}


@dataclass(frozen=True, slots=True)
class Resume:
    """One engine goes on where another one was."""

    writer: str
    reader: str
    alone: str
    """The reader without UCM."""
    prompt: Prompt


FIRST, OTHER = (Prompt(tokens(REUSED_TOKENS + TAIL_TOKENS, seed=seed)) for seed in (1, 2))
RESUMES = (
    Resume("vLLM", "SGLang", "SGLang alone", FIRST),
    Resume("vLLM", "SGLang's linker", "SGLang alone", FIRST),
    Resume("SGLang", "vLLM", "vLLM alone", OTHER),
)


def figures() -> Iterator[Figure]:
    """Yield the figures of one family after the other."""
    if missing := [variable for variable in PYTHONS.values() if variable not in os.environ]:
        print(f"engines: not measured, {' and '.join(missing)} must name pythons with engines", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="ucm-bench-") as place:
        for family in FAMILIES:
            yield from of_family(BENCH_MODELS[family], Path(place))


def of_family(model: Model, place: Path) -> Iterator[Figure]:
    """What a prompt that another engine saved costs beside computing it."""
    root = place / f"cache {model.family}"
    with ExitStack() as stack:
        engines = started(arguments_of(model, place, root), place, stack)
        save(engines, root)
        taken = take_turns(engines)
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    for resume in RESUMES:
        what = f"{model.family}: {REUSED_TOKENS} tokens of {resume.writer}, first of {resume.reader}"
        peer = f"{resume.alone}, computing"
        yield figure(what, seconds[resume.reader], peer, seconds[resume.alone], LIMIT)
        if resume.alone == "SGLang alone":
            ratio = seconds[resume.reader] / seconds[HELD]
            yield Figure(what, 1e3 * seconds[resume.reader], HELD, 1e3 * seconds[HELD], ratio, None)


def arguments_of(model: Model, place: Path, root: Path) -> dict[str, dict[str, Any]]:
    """Per engine what it is started with; those alone have no UCM."""
    checkpoint = write_checkpoint(place / model.family, bench_family(model.family))
    behind = connector(root, grain_tokens=GRAIN_TOKENS, ring_bytes=RING_BYTES)
    vllm = llm_arguments(model, checkpoint, **bench_arguments(model))
    sizes = {"max_total_tokens": POOL_TOKENS, "chunked_prefill_size": POOL_TOKENS}
    sglang = engine_arguments(checkpoint, page_size=GRAIN_TOKENS, **sizes)
    return {
        "vLLM": vllm | {"kv_transfer_config": behind},
        "vLLM alone": vllm,
        "SGLang": sglang | ucm(root, ring_bytes=RING_BYTES),
        "SGLang's linker": sglang | linker(root, ring_bytes=RING_BYTES),
        "SGLang alone": sglang,
    }


def started(arguments: Mapping[str, dict[str, Any]], place: Path, stack: ExitStack) -> dict[str, Engine]:
    """All engines, side by side."""
    vllm, sglang = (
        EngineSetup(Path(os.environ[variable]).absolute(), place) for variable in PYTHONS.values()
    )
    sglang = replace(sglang, multiprocess=True, kind=SGLANG)
    engines = {
        name: stack.enter_context(Engine(sglang if name.startswith("SGLang") else vllm, name))
        for name in arguments
    }
    for name, engine in engines.items():
        engine.begin_start(arguments[name])
    for engine in engines.values():
        engine.end_start()
    return engines


def save(engines: Mapping[str, Engine], root: Path) -> None:
    """Let each prompt be computed by its writer, and be on files."""
    writers = {resume.writer: resume.prompt for resume in RESUMES}
    for count, (name, prompt) in enumerate(writers.items(), 1):
        first_token_s(engines[name], prompt, reused=0)
        objects.wait_whole(root, count * REUSED_TOKENS // GRAIN_TOKENS, writer=engines[name])


def take_turns(engines: Mapping[str, Engine]) -> dict[str, list[float]]:
    """Seconds to the first token; the first turn is not measured."""
    taken: dict[str, list[float]] = {name: [] for name in (*engines, HELD)}
    alone = {resume.alone: resume.prompt for resume in RESUMES}
    readers = {resume.reader: resume.prompt for resume in RESUMES}
    for turn in range(1 + ROUNDS):
        seconds = {
            name: first_token_s(engines[name], prompt, reused=REUSED_TOKENS)
            for name, prompt in readers.items()
        }
        if turn == 0 or turn % COMPUTED_EVERY == 1:
            seconds |= {
                name: first_token_s(engines[name], prompt, reused=0) for name, prompt in alone.items()
            }
            (again,) = engines["SGLang alone"].generate([alone["SGLang alone"]], max_tokens=2)
            seconds[HELD] = seconds_of(again, reused=REUSED_TOKENS)
        for name, each in seconds.items() if turn else ():
            taken[name].append(each)
    return taken


def first_token_s(engine: Engine, prompt: Prompt, *, reused: int) -> float:
    """`seconds_of` an answer of an engine whose own caches are empty."""
    (answer,) = engine.generate_apart([prompt], max_tokens=2)
    return seconds_of(answer, reused=reused)


def seconds_of(answer: Answer, *, reused: int) -> float:
    """To the first token of an answer for which exactly `reused` tokens were not computed."""
    assert answer.cached_tokens == reused, f"{answer.cached_tokens} tokens were loaded, not {reused}"
    assert answer.first_token_s is not None
    return answer.first_token_s
