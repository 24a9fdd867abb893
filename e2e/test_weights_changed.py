"""The weights of a running engine change: nothing that was saved before is served again, by anybody."""

import pytest

from e2e.answers import cached
from e2e.harness import Answer
from e2e.runs import Runs, serve_apart

Served = dict[str, tuple[Answer, ...]]


@pytest.fixture(scope="module")
def served(runs: Runs) -> Served:
    root, prompts = runs.root_copy("dense", "weights-changed"), runs.prompts("dense").first
    with runs.engine("weights-changed", "dense", root) as engine:
        before = serve_apart(engine, prompts)
        engine.forget(connector=True)
        after = tuple(engine.generate(prompts, max_tokens=16))
        again = serve_apart(engine, prompts)
    with runs.engine("after-weights-changed", "dense", root) as engine:
        restarted = serve_apart(engine, prompts)
        restarted_again = serve_apart(engine, prompts)
    return {
        "before": before,
        "after": after,
        "again": again,
        "restarted": restarted,
        "restarted again": restarted_again,
    }


def test_before_it_the_prompts_are_served(served: Served) -> None:
    assert cached(served["before"]) == [256, 384]


def test_after_it_nothing_is_served(served: Served) -> None:
    assert cached(served["after"]) == [0, 0]


def test_what_the_engine_saves_from_then_on_it_is_served(served: Served) -> None:
    assert cached(served["again"]) == [256, 384]


def test_a_new_process_is_served_nothing_from_before_nor_from_memory(served: Served) -> None:
    assert cached(served["restarted"]) == [0, 0]


def test_a_new_process_starts_a_cache_of_its_own(served: Served) -> None:
    assert cached(served["restarted again"]) == [256, 384]


def test_tokens_are_right_throughout(runs: Runs, served: Served) -> None:
    right = [answer.tokens for answer in runs.plain("dense").first]
    assert all([answer.tokens for answer in answers] == right for answers in served.values())
