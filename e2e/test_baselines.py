"""The arithmetic of the baselines; `tox -e baselines` runs them as a whole."""

import json
from dataclasses import replace

import pytest

from e2e.baselines import (
    RESULT,
    WAYS,
    assembled,
    common,
    folded_hits,
    found_in,
    line,
    problems,
    requests,
    text,
)
from e2e.harness import Answer, Prompt
from e2e.models import MODELS, Model, tokens

DENSE, MAMBA = MODELS["dense"], MODELS["mamba"]
COMPUTED = Answer(
    (7, 8), (-1.0, -2.0), prompt_tokens=300, cached_tokens=0, external_tokens=0, first_token_s=0.4
)
SERVED = replace(COMPUTED, cached_tokens=256, external_tokens=256, first_token_s=0.05)
TWICE = [Prompt(tokens(300, seed=1))] * 2


def outcome(first: Answer, second: Answer) -> dict[str, list[Answer]]:
    """Both requests, computed and folded as they should be; `ucm` as given."""
    return {"recompute": [COMPUTED] * 2, "folded": [COMPUTED, SERVED], "ucm": [first, second]}


def test_equal_pieces_in_front_make_requests_begin_alike() -> None:
    one, other = assembled([(1, 40), (2, 10)]), assembled([(1, 40), (3, 10)])
    assert common(one, other) == 40
    assert common(one, one[:30]) == 30


def test_a_request_begins_where_another_did_for_the_whole_of_its_pieces() -> None:
    prompts = list(requests().values())
    assert common(prompts[0].tokens, prompts[1].tokens) == 320
    assert common(prompts[0].tokens, prompts[3].tokens) == len(prompts[0].tokens)


@pytest.mark.parametrize(
    ("model", "earlier", "asked", "found"),
    [(DENSE, 300, 300, 256), (MAMBA, 300, 300, 256), (DENSE, 700, 300, 256), (MAMBA, 700, 300, 0)],
)
def test_a_folded_state_is_found_only_with_the_whole_of_its_prompt(
    model: Model, earlier: int, asked: int, found: int
) -> None:
    assert found_in(model, tokens(asked, seed=1), tokens(earlier, seed=1)) == found


def test_the_last_token_is_always_computed() -> None:
    assert found_in(DENSE, tokens(256, seed=1), tokens(300, seed=1)) == 128


def test_the_deepest_of_all_earlier_prompts_counts() -> None:
    prompts = [Prompt(tokens(length, seed=1)) for length in (200, 400, 900)]
    assert folded_hits(MAMBA, prompts) == [0, 128, 384]


def test_a_good_outcome_has_no_problems() -> None:
    assert problems(DENSE, TWICE, outcome(COMPUTED, SERVED)) == []


def test_other_tokens_are_a_problem() -> None:
    assert problems(DENSE, TWICE, outcome(COMPUTED, replace(SERVED, tokens=(7, 9)))) == [
        "dense: ucm: other tokens"
    ]


def test_a_shorter_hit_than_folded_is_a_problem() -> None:
    (problem,) = problems(DENSE, TWICE, outcome(COMPUTED, COMPUTED))
    assert problem == "dense: ucm: hits [0, 0], fewer than folded [0, 256]"


def test_the_file_is_json_with_a_request_a_line() -> None:
    one = line("one", 1, outcome(COMPUTED, SERVED))
    written = text({"dense": {"machine": "one", "requests": [one, one]}})
    (one, _) = json.loads(written)["dense"]["requests"]
    assert one["hit_tokens"] == {"recompute": 0, "folded": 256, "ucm": 256}
    assert one["first_token_ms"] == {"recompute": 400, "folded": 50, "ucm": 50}
    assert len(written.splitlines()) == 9


def test_the_committed_file_is_of_the_committed_requests() -> None:
    committed = json.loads(RESULT.read_text(encoding="utf-8"))
    for its in committed.values():
        assert [one["request"] for one in its["requests"]] == list(requests())
        assert all(one["hit_tokens"].keys() == WAYS.keys() for one in its["requests"])
