"""SGLang with UCM behind its host cache: one process serves prompts and ends, a new one serves them again.

Every token is that of SGLang without UCM, and the new process computes no more than the design allows. What
is stored is what it computes with: noise in its place changes the tokens, and what is damaged is a miss.
"""

from dataclasses import dataclass, replace

import pytest

from e2e import objects
from e2e.answers import served, tokens_of
from e2e.harness import Answer
from e2e.models import MAX_TOKENS
from e2e.pair import Alone, Pair, Saved
from e2e.runs import serve_apart
from e2e.shared import DENSE


@dataclass(frozen=True, slots=True)
class Resumed:
    """A fresh process on a copy of the root; its own caches emptied before every prompt."""

    first: tuple[Answer, ...]
    longer: tuple[Answer, ...]
    other: tuple[Answer, ...]
    salted: tuple[Answer, ...]
    """The first prompt under a salt that nobody used before, and again."""
    aborted: tuple[tuple[int, ...], ...]
    """Tokens of the second prompt's answer, aborted at once, and soon."""
    after: tuple[Answer, ...]
    """The second prompt after that."""


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Alone:
    return pair.alone()


@pytest.fixture(scope="module")
def saved(pair: Pair) -> Saved:
    return pair.saved()


@pytest.fixture(scope="module")
def resumed(pair: Pair, alone: Alone) -> Resumed:
    salted = replace(DENSE.first[0], salt="tenant-b")
    with pair.sglang("resuming", pair.root_copy("resumed")) as engine:
        return Resumed(
            first=serve_apart(engine, DENSE.first),
            longer=serve_apart(engine, alone.longer_prompts),
            other=serve_apart(engine, DENSE.other),
            salted=serve_apart(engine, (salted,)) + tuple(engine.generate([salted], max_tokens=MAX_TOKENS)),
            aborted=tuple(engine.abort(DENSE.first[1], after_s=s, max_tokens=MAX_TOKENS) for s in (0, 0.1)),
            after=serve_apart(engine, DENSE.first[1:]),
        )


@pytest.fixture(scope="module")
def damaged(pair: Pair, saved: Saved) -> tuple[Answer, ...]:
    """The first prompts, served from noise and from files that were cut short."""
    root = pair.root_copy("damaged")
    for path in saved.pages[0]:
        objects.fill_with_noise(root / path)
        assert objects.is_whole(root / path)
    for path in saved.pages[1]:
        objects.cut_short(root / path)
    with pair.sglang("damaged", root) as engine:
        return serve_apart(engine, DENSE.first)


def test_saving_changes_no_token(alone: Alone, saved: Saved) -> None:
    assert tokens_of(saved.first) == tokens_of(alone.first)
    assert served(saved.first) == [0, 0]


def test_what_was_flushed_is_served(alone: Alone, saved: Saved) -> None:
    assert served([saved.flushed]) == [DENSE.served_sglang(saved.flushed)]
    assert saved.flushed.tokens == alone.first[0].tokens


def test_the_same_prompts_give_the_same_tokens(alone: Alone, resumed: Resumed) -> None:
    assert tokens_of(resumed.first) == tokens_of(alone.first)


def test_the_same_prompts_compute_less_than_a_page_and_the_last_token(resumed: Resumed) -> None:
    assert served(resumed.first) == [DENSE.served_sglang(answer) for answer in resumed.first]


def test_longer_prompts_give_the_same_tokens(alone: Alone, resumed: Resumed) -> None:
    assert tokens_of(resumed.longer) == tokens_of(alone.longer)


def test_longer_prompts_resume_from_the_deepest_saved_page(alone: Alone, resumed: Resumed) -> None:
    assert served(resumed.longer) == [DENSE.saved_tokens(answer) for answer in alone.first]


def test_different_prompts_are_computed_and_right(alone: Alone, resumed: Resumed) -> None:
    assert served(resumed.other) == [0]
    assert tokens_of(resumed.other) == tokens_of(alone.other)


def test_another_salt_is_served_nothing_and_right_tokens(alone: Alone, resumed: Resumed) -> None:
    before, again = resumed.salted
    assert served([before]) == [0]
    assert again.cached_tokens == DENSE.served_sglang(again)
    assert tokens_of(resumed.salted) == tokens_of(alone.first[:1]) * 2


def test_a_request_that_is_aborted_spoils_nothing(alone: Alone, resumed: Resumed) -> None:
    right = alone.first[1].tokens
    assert all(tokens == right[: len(tokens)] for tokens in resumed.aborted)
    assert tokens_of(resumed.after) == [right]
    assert served(resumed.after) == [DENSE.served_sglang(answer) for answer in resumed.after]


def test_noise_in_the_files_changes_the_tokens(alone: Alone, damaged: tuple[Answer, ...]) -> None:
    assert served(damaged[:1]) == [DENSE.served_sglang(damaged[0])]
    assert damaged[0].tokens != alone.first[0].tokens


def test_files_that_were_cut_short_are_a_miss(alone: Alone, damaged: tuple[Answer, ...]) -> None:
    assert served(damaged[1:]) == [0]
    assert damaged[1].tokens == alone.first[1].tokens
