"""The demo's own arithmetic; `tox -e demo` runs it as a whole."""

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.conversation import decode, encode, prompts
from e2e.demo import Turn, pages, problems, summary
from e2e.harness import Answer, Prompt

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
    assert problems([Turn(COLD, WARM, WARM), Turn(COLD, WARM, WARM, shared_tokens=127)]) == []


@pytest.mark.parametrize("who", ["cold", "vllm", "sglang"])
def test_other_tokens_are_a_problem(who: str) -> None:
    good = Turn(COLD, WARM, WARM)
    bad = replace(good, **{who: replace(getattr(good, who), tokens=(7, 9))})
    assert problems([bad]) == ["turn 1: other tokens"]


def test_a_turn_that_was_not_served_is_a_problem() -> None:
    turns = [Turn(COLD, WARM, WARM), Turn(COLD, COLD, WARM), Turn(COLD, WARM, COLD)]
    assert problems(turns) == [
        "turn 2: vLLM took nothing from the first process",
        "turn 3: SGLang took nothing",
    ]


def test_what_vllm_had_saved_itself_does_not_come_from_sglang() -> None:
    assert problems([Turn(COLD, WARM, WARM, shared_tokens=128)]) == ["turn 1: vLLM took nothing from SGLang"]


def test_a_first_process_that_was_served_is_a_problem() -> None:
    assert problems([Turn(WARM, WARM, WARM)]) == ["turn 1: the first process read"]


def test_the_summary_adds_up() -> None:
    text = summary([Turn(COLD, WARM, replace(WARM, external_tokens=64))] * 2)
    assert "Of 400 prompt tokens the new vLLM process took 256 from UCM and SGLang 128" in text
    assert "after 1.0 s instead of 8.0 s" in text


def test_pages_of_the_same_begin_are_the_same() -> None:
    tokens = tuple(range(200))
    long, short = Prompt(tokens), Prompt(tokens[:120])
    ends = replace(COLD, tokens=tokens[120:128])
    assert len(list(pages([short], [ends]))) == 1
    assert len(list(pages([short], [replace(ends, tokens=tokens[120:129])]))) == 2
    assert {*pages([long, short], [COLD, ends])} == {(None, tokens[:end]) for end in (64, 128, 192)}
    assert {salt for salt, _ in pages([replace(long, salt="a")], [COLD])} == {"a"}


def test_tox_allows_what_is_run_before_it() -> None:
    command = [sys.executable, "-m", "tox", "config", "-e", "demo,baselines", "-k", "allowlist_externals"]
    told = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
    ).stdout
    assert told.count("allowlist_externals = bash") == 2
