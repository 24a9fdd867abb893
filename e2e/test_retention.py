"""An engine that offers a state at every block, settings that keep few: none that is needed is lost."""

import pytest

from e2e import objects
from e2e.harness import Answer, Prompt
from e2e.models import MAX_TOKENS, tokens
from e2e.runs import Runs, serve_apart

FAMILY = "mamba"
"""Blocks of 128 tokens, computed one at a time."""
SPARSE = {"retention": {"*": {"interval_tokens": 256}}}

SHARED = tokens(700, seed=50)
FIRST, SECOND, THIRD = (Prompt(SHARED + tokens(300, seed=seed)) for seed in (51, 52, 53))
PROMPTS = (FIRST, FIRST, SECOND, THIRD)

SERVED = [0, 896, 512, 640]
"""Nothing; the same prompt again; the interval before tokens part; where a second prompt lacked a state."""
STATES = len([256, 512, 768, 896]) + len([640, 768, 896]) + len([768, 896])
"""What each prompt adds: at the interval, at the second sight (640), and for the same prompt again (896)."""


@pytest.fixture(scope="module")
def answers(runs: Runs) -> tuple[Answer, ...]:
    root = runs.empty_root("sparse")
    with runs.engine("sparse", FAMILY, root, settings=SPARSE, prefix_cache_retention_interval=None) as engine:
        answers = serve_apart(engine, PROMPTS)
    states = [row for row in objects.rows(root) if row.startswith("mamba")]
    assert [len(objects.rows(root)[row]) for row in states] == [STATES]
    return answers


def test_what_a_trigger_asks_for_serves(answers: tuple[Answer, ...]) -> None:
    assert [answer.external_tokens for answer in answers] == SERVED


def test_tokens_are_right(runs: Runs, answers: tuple[Answer, ...]) -> None:
    with runs.engine("sparse-oracle", FAMILY, None) as engine:
        right = serve_apart(engine, PROMPTS)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in right]
    assert len(right[0].tokens) == MAX_TOKENS
