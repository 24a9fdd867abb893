"""One engine of two workers, by tensor or by pipeline parallelism, on both sides of a restart.

Process A serves two prompts and ends; of the second prompt one worker's segment of one block is then removed,
as if it had never been written. Process B, fresh, is served what both workers stored and nothing else.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e import objects
from e2e.harness import Answer, Engine
from e2e.models import GRAIN_TOKENS, MODELS, connector, llm_arguments
from e2e.runs import Runs, serve_apart

WORKERS: Mapping[str, Any] = {"distributed_executor_backend": "mp"}
"""Each worker is a process of its own; the scheduler is in that of the runner."""
# vLLM on a CPU makes the tensors between its stages only when it warms a compiled model up.
STAGES: Mapping[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 1, "backend": "eager"}}

WRITE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Cut:
    """A model, how it is spread over two workers, and which segments that makes."""

    family: str
    arguments: Mapping[str, Any]
    segments: frozenset[str]

    def objects_of(self, answer: Answer) -> int:
        """Objects that a request leaves: the last token of its answer is never computed."""
        tokens = answer.prompt_tokens + len(answer.tokens) - 1
        return tokens // GRAIN_TOKENS * len(self.segments)

    def engine(self, runs: Runs, name: str, root: Path) -> Engine:
        more = {**WORKERS, **self.arguments, "kv_transfer_config": connector(root)}
        arguments = llm_arguments(MODELS[self.family], runs.checkpoint(self.family), **more)
        return runs.process(f"{self.family}-{name}").start(arguments)


CUTS = {
    "tensor": Cut("dense", {"tensor_parallel_size": 2}, frozenset({"h0-1.u0-4.c0-1", "h1-2.u0-4.c0-1"})),
    "pipeline": Cut(
        "dense", {"pipeline_parallel_size": 2, **STAGES}, frozenset({"hx.u0-2.c0-1", "hx.u2-4.c0-1"})
    ),
    # every tensor rank holds all of a latent row, and one of them writes each object
    "replicated": Cut("mla", {"tensor_parallel_size": 2}, frozenset({"hx.u0-3.c0-1"})),
}


@dataclass(frozen=True, slots=True)
class Story:
    """What became of one cut."""

    cut: Cut
    saved: tuple[Answer, ...]
    files: tuple[Path, ...]
    """All objects that A left."""
    resumed: tuple[Answer, ...]


@pytest.fixture(scope="module", params=CUTS)
def story(runs: Runs, request: pytest.FixtureRequest) -> Story:
    cut: Cut = CUTS[request.param]
    prompts, root = runs.prompts(cut.family).first, runs.empty_root(request.param)
    with cut.engine(runs, f"{request.param}-saving", root) as engine:
        saved = serve_apart(engine, prompts[:1])
        of_first = set(written(engine, root, cut.objects_of(saved[0])))
        saved += serve_apart(engine, prompts[1:])
    files = tuple(objects.objects(root))
    sorted(set(files) - of_first)[0].unlink()
    with cut.engine(runs, f"{request.param}-resuming", root) as engine:
        return Story(cut, saved, files, serve_apart(engine, prompts))


def written(engine: Engine, root: Path, count: int) -> list[Path]:
    """The objects under ``root`` once there are ``count`` of them: workers write behind."""
    deadline = time.monotonic() + WRITE_LIMIT_S
    while len(found := objects.objects(root)) < count and time.monotonic() < deadline:
        engine.counter("ucm_saved")  # a round trip to the engine is the pause between two looks
    assert len(found) == count
    return found


def test_every_worker_writes_its_own_segment(story: Story) -> None:
    assert {path.name.partition(".")[2] for path in story.files} == story.cut.segments
    names = [path.name.partition(".")[0] for path in story.files]
    assert {names.count(name) for name in names} == {len(story.cut.segments)}
    assert all(objects.is_whole(path) for path in story.files)


def test_what_all_workers_stored_is_served_after_a_restart(story: Story) -> None:
    first, _ = story.resumed
    assert first.external_tokens == MODELS[story.cut.family].served_again(first.prompt_tokens) > 0


def test_what_one_worker_lacks_is_computed_by_all(story: Story) -> None:
    model, (_, second) = MODELS[story.cut.family], story.resumed
    assert second.external_tokens < model.served_again(second.prompt_tokens)


def test_tokens_are_those_of_computing_everything(story: Story) -> None:
    assert [answer.external_tokens for answer in story.saved] == [0, 0]
    assert [answer.tokens for answer in story.resumed] == [answer.tokens for answer in story.saved]
