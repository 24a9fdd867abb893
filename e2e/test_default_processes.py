"""vLLM and UCM as users start them first, on both sides of a restart: all defaults.

Scheduler and worker are processes of their own, and UCM is given no setting, not even a root.
"""

import pytest

from e2e import objects
from e2e.harness import Answer
from e2e.models import MODELS, default_connector, llm_arguments
from e2e.runs import Runs, serve_apart


@pytest.fixture(scope="module")
def answers(runs: Runs) -> tuple[tuple[Answer, ...], tuple[Answer, ...]]:
    prompts, transfer = runs.prompts("dense").first, default_connector()
    arguments = llm_arguments(MODELS["dense"], runs.checkpoint("dense"), kv_transfer_config=transfer)
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


def test_the_cache_lies_under_the_users_cache_directory(
    runs: Runs, answers: tuple[tuple[Answer, ...], tuple[Answer, ...]]
) -> None:
    assert len(objects.objects(runs.directory / ".cache" / "ucm")) == 12


def test_tokens_are_right(runs: Runs, answers: tuple[tuple[Answer, ...], tuple[Answer, ...]]) -> None:
    right = [answer.tokens for answer in runs.plain("dense").first]
    assert [[answer.tokens for answer in each] for each in answers] == [right, right]
