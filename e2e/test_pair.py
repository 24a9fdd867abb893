"""What SGLang and vLLM compute of one checkpoint themselves: the same greedy tokens, and no close call.

So in float32 the tokens of either engine say whether what it was given from a cache was right.
"""

import pytest

from e2e.answers import tokens_of
from e2e.crossing import ANSWER_TOKENS, Crossed
from e2e.harness import Answer
from e2e.pair import Alone, Pair
from e2e.shared import DENSE, EXACT, SHARED

CLOSE_CALL = 1e-2
"""Logits that differ by less may change places with the order in which an engine adds up."""


@pytest.fixture
def alone(pair: Pair) -> Alone:
    return pair.alone()


@pytest.fixture
def crossed(pair: Pair, name: str) -> Crossed:
    return pair.crossed(name)


def all_of(alone: Alone) -> tuple[Answer, ...]:
    return alone.first + alone.longer + alone.other


def require_clear(answers: tuple[Answer, ...]) -> None:
    """No step of any answer is a close call."""
    assert all(len(answer.margins) == len(answer.tokens) for answer in answers)
    assert min(margin for answer in answers for margin in answer.margins) > CLOSE_CALL


def test_sglang_agrees_with_itself(alone: Alone) -> None:
    assert alone.again.tokens == alone.other[0].tokens


def test_sglang_takes_all_whole_pages_from_its_own_cache(alone: Alone) -> None:
    assert [answer.cached_tokens for answer in all_of(alone)] == [0] * 5
    assert alone.again.cached_tokens == DENSE.served_sglang(alone.again)
    assert alone.again.external_tokens == 0


def test_no_step_of_sglang_alone_is_a_close_call(alone: Alone) -> None:
    require_clear(all_of(alone))


def test_with_ucm_engines_compute_what_sglang_computes_without(pair: Pair, alone: Alone) -> None:
    right = [tokens[:ANSWER_TOKENS] for tokens in tokens_of(alone.first + alone.other)]
    crossed = pair.crossed(DENSE.name)
    assert tokens_of(crossed.sglang.cold) == right
    assert tokens_of(crossed.vllm.cold) == right


@pytest.mark.parametrize("name", SHARED)
def test_under_a_salt_of_its_own_an_engine_computes_everything(crossed: Crossed, name: str) -> None:
    answers = crossed.vllm.cold + crossed.sglang.cold + crossed.vllm.batch + crossed.sglang.batch
    assert {answer.cached_tokens for answer in answers} == {0}


@pytest.mark.parametrize("name", EXACT)
def test_both_engines_give_the_same_tokens_in_batches_of_any_shape(crossed: Crossed, name: str) -> None:
    right = tokens_of(crossed.sglang.cold)
    for own in (crossed.sglang, crossed.vllm):
        assert tokens_of(own.cold) == tokens_of(own.warm) == tokens_of(own.batch) == right


@pytest.mark.parametrize("name", EXACT)
def test_tokens_vary(crossed: Crossed, name: str) -> None:
    """An answer of one token over and over would hide a wrong cache."""
    assert all(len(set(tokens)) > 3 for tokens in tokens_of(crossed.sglang.cold))


@pytest.mark.parametrize("name", EXACT)
def test_no_step_is_a_close_call(crossed: Crossed, name: str) -> None:
    require_clear(crossed.sglang.cold + crossed.vllm.cold)
