"""A real LoRA adapter, another one of the same name, and the plain model, in one engine on one root."""

from dataclasses import replace

import pytest

from e2e.answers import cached, tokens_of
from e2e.checkpoints import FAMILIES, write_adapter
from e2e.harness import Adapter, Answer, Engine
from e2e.runs import Runs, serve_apart

Answers = dict[str, tuple[Answer, ...]]


@pytest.fixture(scope="module")
def answers(runs: Runs) -> Answers:
    one, other = (
        str(write_adapter(runs.directory / "adapters" / str(seed), FAMILIES["dense"](), seed=seed))
        for seed in (1, 2)
    )
    root = runs.root_copy("dense", "adapters")
    with runs.engine("adapters", "dense", root, enable_lora=True, max_lora_rank=8) as engine:
        return {
            "first": serve(runs, engine, Adapter("tone", 1, one)),
            "again": serve(runs, engine, Adapter("tone", 1, one)),
            "same bytes": serve(runs, engine, Adapter("tone", 2, one)),
            "other bytes": serve(runs, engine, Adapter("tone", 3, other)),
            "none": serve_apart(engine, runs.prompts("dense").first),
        }


def serve(runs: Runs, engine: Engine, adapter: Adapter) -> tuple[Answer, ...]:
    return serve_apart(
        engine, tuple(replace(prompt, adapter=adapter) for prompt in runs.prompts("dense").first)
    )


def test_an_adapter_changes_the_tokens(answers: Answers) -> None:
    assert tokens_of(answers["first"]) != tokens_of(answers["none"])
    assert tokens_of(answers["first"]) != tokens_of(answers["other bytes"])


def test_it_is_served_nothing_that_the_plain_model_saved(answers: Answers) -> None:
    assert cached(answers["first"]) == [0, 0]


def test_it_is_served_what_it_saved(answers: Answers) -> None:
    assert cached(answers["again"]) == [256, 384]
    assert tokens_of(answers["again"]) == tokens_of(answers["first"])


def test_its_number_in_the_engine_does_not_matter(answers: Answers) -> None:
    assert cached(answers["same bytes"]) == [256, 384]
    assert tokens_of(answers["same bytes"]) == tokens_of(answers["first"])


def test_its_bytes_matter_not_its_name(answers: Answers) -> None:
    assert cached(answers["other bytes"]) == [0, 0]


def test_the_plain_model_is_served_beside_it(runs: Runs, answers: Answers) -> None:
    assert cached(answers["none"]) == [256, 384]
    assert tokens_of(answers["none"]) == tokens_of(runs.plain("dense").first)
