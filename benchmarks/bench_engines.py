"""Time to the first token of prompts that another engine computed: vLLM and SGLang on CPU, one cache.

Needs both engines: the environment variables `UCM_VLLM_PYTHON` and `UCM_SGLANG_PYTHON` name the pythons of
their environments. Models are those of `bench_vllm`: here the dense one, in `bench_engines_mla` that with
latents. On one root vLLM saves one prompt and SGLang another; then each is asked for the other's prompt, in
turns with an engine of its kind without UCM, which computes it. SGLang reads through both of its seams. All
caches of the engines themselves are emptied before every request; UCM's bytes come from the ring that the
processes of a node share.

There are no kernels of SGLang's for CPUs: it computes every layer in plain torch, and the doubles of `e2e`
copy between its host and device pools, one thread and one layer at a time. Where a prefix is there already,
its attention, `torch_native`, computes that of all tokens again and keeps that of the new ones. So SGLang is
measured twice: as it is, and with the double that computes new queries only, as its backends on a GPU do. A
prompt that lies in its own device pool is measured beside: no cache can be sooner.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from e2e import objects
from e2e.checkpoints import bench_family, write_checkpoint
from e2e.harness import SGLANG, VLLM, Answer, Engine, EngineKind, EngineSetup, Prompt
from e2e.hicache import engine_arguments, linker, ucm
from e2e.models import BENCH_MODELS, GRAIN_TOKENS, connector, llm_arguments, tokens

from benchmarks.bench_vllm import bench_arguments, figure
from benchmarks.frame import Figure

REUSED_TOKENS = 4096
"""Whole pages of SGLang and whole blocks of vLLM; the grain of both is a page."""
TAIL_TOKENS = 16
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
class Turns:
    """How often a family is asked, so that it takes less than four minutes."""

    family: str
    rounds: int
    computed_every: int
    """Rounds between two computed prompts, which take much longer."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What SGLang computes attention with."""

    name: str
    variables: Mapping[str, str]

    @property
    def kind(self) -> EngineKind:
        """SGLang with it."""
        return replace(SGLANG, variables={**SGLANG.variables, **self.variables})


ATTENTIONS = (
    Attention("torch_native", {}),
    Attention("new queries only", {"UCM_DOUBLE_NEW_QUERIES": "1"}),
)


@dataclass(frozen=True, slots=True)
class Resume:
    """One engine goes on where another one was."""

    writer: str
    reader: str
    alone: str
    """The reader without UCM."""
    prompt: Prompt


FIRST, OTHER = (Prompt(tokens(REUSED_TOKENS + TAIL_TOKENS, seed=seed)) for seed in (1, 2))
OF_VLLM = Resume("SGLang", "vLLM", "vLLM alone", OTHER)
OF_SGLANG = (
    Resume("vLLM", "SGLang", "SGLang alone", FIRST),
    Resume("vLLM", "SGLang's linker", "SGLang alone", FIRST),
)


def figures() -> Iterator[Figure]:
    """Yield the figures of the dense family."""
    yield from figures_of(Turns("dense", rounds=10, computed_every=4))


def figures_of(turns: Turns) -> Iterator[Figure]:
    """Yield those of one family; with `torch_native` also of vLLM, which that does not change."""
    if missing := [variable for variable in PYTHONS.values() if variable not in os.environ]:
        print(f"engines: not measured, {' and '.join(missing)} must name pythons with engines", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="ucm-bench-") as folder, ExitStack() as stack:
        place, engines = Path(folder), dict[str, Engine]()
        arguments = arguments_of(turns.family, place)
        for attention in ATTENTIONS:
            for name in [name for name in engines if name.startswith("SGLang")]:
                engines.pop(name).close()
            new = {name: each for name, each in arguments.items() if name not in engines}
            engines |= started(new, place, stack, attention=attention)
            resumes: tuple[Resume, ...] = OF_SGLANG
            if attention is ATTENTIONS[0]:
                save(engines, root_of(place))
                resumes = (*OF_SGLANG, OF_VLLM)
            yield from of_resumes(turns, engines, resumes, attention=attention)


def of_resumes(
    turns: Turns, engines: Mapping[str, Engine], resumes: Sequence[Resume], *, attention: Attention
) -> Iterator[Figure]:
    """What prompts that another engine saved cost beside computing them."""
    taken = take_turns(turns, engines, resumes)
    seconds = {name: statistics.median(times) for name, times in taken.items() if times}
    for resume in resumes:
        what = f"{turns.family}: {REUSED_TOKENS} tokens of {resume.writer}, first of {resume.reader}"
        of_sglang = resume.alone == "SGLang alone"
        if of_sglang:
            what += f", {attention.name}"
        yield figure(what, seconds[resume.reader], f"{resume.alone}, computing", seconds[resume.alone], LIMIT)
        if of_sglang:
            ratio = seconds[resume.reader] / seconds[HELD]
            yield Figure(what, 1e3 * seconds[resume.reader], HELD, 1e3 * seconds[HELD], ratio, None)
    if OF_VLLM not in resumes:
        what = f"{turns.family}: {REUSED_TOKENS} tokens in {HELD}, {attention.name}"
        peer = "SGLang alone, computing"
        ratio = seconds[HELD] / seconds["SGLang alone"]
        yield Figure(what, 1e3 * seconds[HELD], peer, 1e3 * seconds["SGLang alone"], ratio, None)


def root_of(place: Path) -> Path:
    """Of the one cache."""
    return place / "cache"


def arguments_of(family: str, place: Path) -> dict[str, dict[str, Any]]:
    """Per engine what it is started with; those alone have no UCM."""
    model, root = BENCH_MODELS[family], root_of(place)
    checkpoint = write_checkpoint(place / family, bench_family(family))
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


def started(
    arguments: Mapping[str, dict[str, Any]], place: Path, stack: ExitStack, *, attention: Attention
) -> dict[str, Engine]:
    """These engines, side by side."""
    vllm, sglang = (
        EngineSetup(Path(os.environ[variable]).absolute(), place) for variable in PYTHONS.values()
    )
    vllm, sglang = replace(vllm, kind=VLLM), replace(sglang, multiprocess=True, kind=attention.kind)
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
    for count, (name, prompt) in enumerate({"vLLM": FIRST, "SGLang": OTHER}.items(), 1):
        first_token_s(engines[name], prompt, reused=0)
        objects.wait_whole(root, count * REUSED_TOKENS // GRAIN_TOKENS, writer=engines[name])


def take_turns(
    turns: Turns, engines: Mapping[str, Engine], resumes: Sequence[Resume]
) -> dict[str, list[float]]:
    """Seconds to the first token; the first turn is not measured."""
    taken: dict[str, list[float]] = {name: [] for name in (*engines, HELD)}
    alone = {resume.alone: resume.prompt for resume in resumes}
    readers = {resume.reader: resume.prompt for resume in resumes}
    for turn in range(1 + turns.rounds):
        seconds = {
            name: first_token_s(engines[name], prompt, reused=REUSED_TOKENS)
            for name, prompt in readers.items()
        }
        if turn == 0 or turn % turns.computed_every == 1:
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
