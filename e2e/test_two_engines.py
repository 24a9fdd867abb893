"""Two engines on one root at the same time: right tokens, and each is served what the other saved."""

import pytest

from e2e import objects
from e2e.harness import Answer, Prompt
from e2e.models import MAX_TOKENS, tokens
from e2e.runs import Runs, serve_apart

SHARED = Prompt(tokens(700, seed=40))
"""Both compute and save this one at the same time."""
OWN = (Prompt(tokens(700, seed=41)), Prompt(tokens(700, seed=42)))
SERVED_TOKENS = 640

Answers = dict[str, tuple[Answer, ...]]


@pytest.fixture(scope="module")
def answers(runs: Runs) -> Answers:
    root = runs.empty_root("two-engines")
    with (
        runs.engine("one", "dense", root) as one,
        runs.engine("two", "dense", root) as two,
    ):
        one.begin_generate([SHARED, OWN[0]], max_tokens=MAX_TOKENS)
        two.begin_generate([SHARED, OWN[1]], max_tokens=MAX_TOKENS)
        together = tuple(one.end_generate()), tuple(two.end_generate())
        for engine in (one, two):
            engine.forget()  # lets go of what it served: the ring, and who uses it, is that of both
        for engine in (one, two):
            engine.settle()
        crossed = serve_apart(one, (OWN[1],)), serve_apart(two, (OWN[0],))
    assert all(objects.is_whole(path) for path in objects.objects(root))
    return {"one": together[0], "two": together[1], "crossed": crossed[0] + crossed[1]}


@pytest.fixture(scope="module")
def right(runs: Runs) -> dict[Prompt, tuple[int, ...]]:
    prompts = (SHARED, *OWN)
    with runs.engine("two-engines-oracle", "dense", None) as engine:
        return {
            prompt: answer.tokens
            for prompt, answer in zip(prompts, serve_apart(engine, prompts), strict=True)
        }


def test_tokens_are_right_while_both_save(answers: Answers, right: dict[Prompt, tuple[int, ...]]) -> None:
    assert [answer.tokens for answer in answers["one"]] == [right[SHARED], right[OWN[0]]]
    assert [answer.tokens for answer in answers["two"]] == [right[SHARED], right[OWN[1]]]


def test_each_is_served_what_the_other_saved(answers: Answers) -> None:
    assert [answer.external_tokens for answer in answers["crossed"]] == [SERVED_TOKENS] * 2


def test_tokens_are_right_when_served_by_the_other(
    answers: Answers, right: dict[Prompt, tuple[int, ...]]
) -> None:
    assert [answer.tokens for answer in answers["crossed"]] == [right[OWN[1]], right[OWN[0]]]
