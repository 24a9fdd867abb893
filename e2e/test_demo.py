"""The demo's own arithmetic; `tox -e demo` runs it as a whole."""

import itertools
from dataclasses import replace

from e2e.conversation import decode, encode, prompts
from e2e.demo import Turn, problems, summary
from e2e.harness import Answer

COLD = Answer((7, 8), (-1.0, -2.0), prompt_tokens=200, cached_tokens=0, external_tokens=0, first_token_s=4.0)
WARM = replace(COLD, cached_tokens=128, external_tokens=128, first_token_s=0.5)


def test_the_conversation_grows_past_4k_tokens_turn_by_turn() -> None:
    turns = prompts()
    assert len(turns) == 9
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(turns))
    assert 4096 < len(encode(turns[-1])) < 8000


def test_tokens_are_the_bytes_of_the_text() -> None:
    text = "Ja – déjà vu?"
    assert decode(encode(text)) == text
    assert len(encode(text)) == len(text.encode())
    assert all(3 <= token < 512 for token in encode(text))


def test_a_good_outcome_has_no_problems() -> None:
    assert problems([Turn(COLD, WARM)]) == []


def test_other_tokens_are_a_problem() -> None:
    assert problems([Turn(COLD, replace(WARM, tokens=(7, 9)))]) == ["turn 1: other tokens"]


def test_a_turn_that_was_not_served_is_a_problem() -> None:
    assert problems([Turn(COLD, WARM), Turn(COLD, COLD)]) == ["turn 2: nothing served"]


def test_a_first_process_that_was_served_is_a_problem() -> None:
    assert problems([Turn(WARM, WARM)]) == ["turn 1: the first process read"]


def test_the_summary_adds_up() -> None:
    text = summary([Turn(COLD, WARM), Turn(COLD, WARM)])
    assert "256 of 400 prompt tokens" in text
    assert "after 1.0 s instead of 8.0 s" in text
