"""SGLang and vLLM on one checkpoint, without UCM: the same greedy tokens, and none of them a close call.

So the tokens of either engine say whether what it was given from a cache was right.
"""

import pytest

from e2e.harness import Answer
from e2e.pair import SHARED, Alone, Pair, served_again

CLOSE_CALL = 1e-2
"""Logits that differ by less may change places with the order in which an engine adds up."""

pytestmark = pytest.mark.parametrize("family", SHARED)


@pytest.fixture
def sglang(pair: Pair, family: str) -> Alone:
    return pair.sglang_alone(family)


@pytest.fixture
def vllm(pair: Pair, family: str) -> Alone:
    return pair.vllm_alone(family)


def all_of(alone: Alone) -> tuple[Answer, ...]:
    return alone.first + alone.longer + alone.other


def tokens_of(alone: Alone) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in all_of(alone)]


def test_sglang_agrees_with_itself(sglang: Alone, family: str) -> None:
    assert sglang.again.tokens == sglang.other[0].tokens


def test_sglang_takes_all_whole_pages_from_its_own_cache(sglang: Alone, family: str) -> None:
    assert [answer.cached_tokens for answer in all_of(sglang)] == [0] * 5
    assert sglang.again.cached_tokens == served_again(sglang.again)
    assert sglang.again.external_tokens == 0


def test_both_engines_give_the_same_tokens(sglang: Alone, vllm: Alone, family: str) -> None:
    assert tokens_of(sglang) == tokens_of(vllm)


def test_tokens_vary(sglang: Alone, family: str) -> None:
    """An answer of one token over and over would hide a wrong cache."""
    assert all(len(set(tokens)) > 4 for tokens in tokens_of(sglang))


def test_no_step_is_a_close_call(sglang: Alone, vllm: Alone, family: str) -> None:
    answers = all_of(sglang) + all_of(vllm)
    assert all(len(answer.margins) == len(answer.tokens) for answer in answers)
    assert min(margin for answer in answers for margin in answer.margins) > CLOSE_CALL
