"""Time to the first token of a real vLLM on CPU: prompts that are loaded against prompts that are computed.

Runs with the python of vLLM's environment. Models are random, with 8 or 9 layers and a hidden size of 512,
and written when the benchmark runs. Three engines stand side by side and are asked in turns: one without
UCM, one that loads layer by layer, one that loads whole requests. vLLM's own prefix cache is emptied before
every request; UCM's bytes come from its ring, as in the process that saved them.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from e2e.checkpoints import bench_family, write_checkpoint
from e2e.harness import Answer, Engine, EngineSetup, Prompt
from e2e.models import BENCH_MODELS, Model, connector, llm_arguments, tokens

from benchmarks.frame import Figure

REUSED_TOKENS = 4096
"""At least so many; what is reused ends at a block of the engine."""
TAIL_TOKENS = 16
ROUNDS = 20
COMPUTED_EVERY = 5
"""Rounds between two computed prompts, which take much longer."""
LIMITS = {"dense": 0.1, "mla": 0.1, "window": 0.2, "mamba": 0.2, "gdn": 0.2}
"""Of the time that computing takes; the hybrids resume from fewer places."""
LAYERWISE = ("dense", "mla")
"""Models of one group: of others loads are always asynchronous and whole."""
LAYERWISE_LIMIT = 1.05
ENGINES: Mapping[str, Mapping[str, Any] | None] = {
    "computed": None,
    "loaded whole": {"layerwise": False},
    "layer by layer": {},
}
"""Settings of UCM; None: without it."""


def figures() -> Iterator[Figure]:
    """Yield the figures of one family after the other."""
    if importlib.util.find_spec("vllm") is None:
        print("vllm: not measured, it is not installed here", flush=True)
        return
    for family in LIMITS:
        with tempfile.TemporaryDirectory(prefix="ucm-bench-") as place:
            yield from of_family(BENCH_MODELS[family], EngineSetup(Path(sys.executable), Path(place)))


def of_family(model: Model, setup: EngineSetup) -> Iterator[Figure]:
    """What loading costs beside computing, and layer by layer beside whole requests."""
    reused = -(-REUSED_TOKENS // model.alignment_tokens) * model.alignment_tokens
    with ExitStack() as stack:
        engines = started(model, setup, stack)
        taken = take_turns(engines, Prompt(tokens(reused + TAIL_TOKENS, seed=1)), reused=reused)
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    ours, what = seconds["layer by layer"], f"{model.family}: first token, {reused} tokens reused"
    yield figure(what, ours, "computed", seconds["computed"], LIMITS[model.family])
    if model.family in LAYERWISE:
        yield figure(what, ours, "loaded whole", seconds["loaded whole"], LAYERWISE_LIMIT)


def figure(what: str, ours_s: float, peer: str, theirs_s: float, limit: float) -> Figure:
    """Of medians: the turns of the two are not equally many."""
    return Figure(what, 1e3 * ours_s, peer, 1e3 * theirs_s, ours_s / theirs_s, limit)


def started(model: Model, setup: EngineSetup, stack: ExitStack) -> dict[str, Engine]:
    """All engines of a family, each with a cache of its own."""
    checkpoint = write_checkpoint(setup.directory / "checkpoint", bench_family(model.family))
    engines = {}
    for name, settings in ENGINES.items():
        if settings is None or name == "layer by layer" or model.family in LAYERWISE:
            transfer = {} if settings is None else {"kv_transfer_config": with_ucm(setup, name, settings)}
            arguments = {**bench_arguments(model), **transfer}
            engine = stack.enter_context(Engine(setup, name.replace(" ", "-")))
            engines[name] = engine.start(llm_arguments(model, checkpoint, **arguments))
    return engines


def with_ucm(setup: EngineSetup, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` with a root of its own and a ring that holds the prompt."""
    return connector(setup.directory / f"cache {name}", ring_bytes="1GiB", **settings)


def bench_arguments(model: Model) -> dict[str, Any]:
    """Arguments of `vllm.LLM` under which a prompt of more than 4096 tokens fits, in groups of blocks too."""
    pool = 3 * 4608 // model.engine_block_tokens
    chunk = model.arguments.get("max_num_batched_tokens", 8192)
    return {"max_model_len": 4608, "max_num_batched_tokens": chunk, "num_gpu_blocks_override": max(64, pool)}


def take_turns(engines: Mapping[str, Engine], prompt: Prompt, *, reused: int) -> dict[str, list[float]]:
    """Seconds to the first token; the first turn, which saves, is not measured."""
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(1 + ROUNDS):
        for name, engine in engines.items():
            if name != "computed" or turn == 0 or turn % COMPUTED_EVERY == 1:
                (answer,) = engine.generate_apart([prompt], max_tokens=2)
                if turn:
                    taken[name].append(first_token_s(answer, 0 if name == "computed" else reused))
    return taken


def first_token_s(answer: Answer, reused: int) -> float:
    """Seconds to the first token of an answer for which exactly `reused` tokens were loaded."""
    assert answer.external_tokens == reused, f"{answer.external_tokens} tokens were loaded, not {reused}"
    assert answer.first_token_s is not None
    return answer.first_token_s
