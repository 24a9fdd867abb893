"""vLLM as users start it, on both sides of a restart: scheduler and worker in processes of their own."""

import pytest

from e2e.harness import Answer
from e2e.models import MODELS, llm_arguments
from e2e.models import connector as ucm
from e2e.runs import Runs, serve_apart


@pytest.fixture(scope="module")
def answers(runs: Runs) -> tuple[tuple[Answer, ...], tuple[Answer, ...]]:
    root, prompts = runs.empty_root("default-processes"), runs.prompts("dense").first
    arguments = llm_arguments(MODELS["dense"], runs.checkpoint("dense"), kv_transfer_config=ucm(root))
    with runs.process("default-saving", multiprocess=True).start(arguments) as engine:
        first = serve_apart(engine, prompts)
    with runs.process("default-resuming", multiprocess=True).start(arguments) as engine:
        return first, serve_apart(engine, prompts)


def test_the_first_computes_and_the_second_is_served(
    answers: tuple[tuple[Answer, ...], tuple[Answer, ...]],
) -> None:
    first, second = answers
    assert [answer.external_tokens for answer in first] == [0, 0]
    assert [answer.external_tokens for answer in second] == [256, 384]


def test_tokens_are_right(runs: Runs, answers: tuple[tuple[Answer, ...], tuple[Answer, ...]]) -> None:
    right = [answer.tokens for answer in runs.plain("dense").first]
    assert [[answer.tokens for answer in each] for each in answers] == [right, right]
