"""Process A serves prompts and ends; process B, fresh, serves them again, longer ones, and different ones.

Every token is that of vLLM without UCM, and B computes no more prompt tokens than the design allows.
"""

import pytest

from e2e.answers import served, tokens_of
from e2e.harness import Blocks
from e2e.models import MODELS, Model
from e2e.runs import Plain, Resumed, Runs

pytestmark = pytest.mark.parametrize("family", MODELS)


@pytest.fixture
def model(family: str) -> Model:
    return MODELS[family]


@pytest.fixture
def plain(runs: Runs, family: str) -> Plain:
    return runs.plain(family)


@pytest.fixture
def resumed(runs: Runs, family: str) -> Resumed:
    return runs.resumed(family)


def whole_blocks(model: Model, blocks: Blocks, *, served_tokens: int) -> Blocks:
    """The blocks of which every byte was loaded: what comes after was computed."""
    count = served_tokens // model.engine_block_tokens
    return {
        (layer, index): digest
        for (layer, index), digest in blocks.items()
        if index < count and not layer.startswith(model.partly_loaded)
    }


def test_the_engine_agrees_with_itself_so_that_tokens_are_an_oracle(plain: Plain) -> None:
    assert tokens_of(plain.own_first) == tokens_of(plain.first)
    assert tokens_of(plain.own_longer) == tokens_of(plain.longer)


def test_saving_changes_no_token(runs: Runs, plain: Plain, family: str) -> None:
    assert tokens_of(runs.saved(family).first) == tokens_of(plain.first)
    assert served(runs.saved(family).first) == [0, 0]


def test_the_same_prompts_give_the_same_tokens(plain: Plain, resumed: Resumed) -> None:
    assert tokens_of(resumed.first) == tokens_of(plain.first)


def test_the_same_prompts_compute_less_than_a_block_and_the_tail(model: Model, resumed: Resumed) -> None:
    assert served(resumed.first) == [model.served_again(length) for length in model.lengths]
    assert all(0 < a.computed_tokens < model.alignment_tokens + 1 for a in resumed.first)


def test_longer_prompts_give_the_same_tokens(plain: Plain, resumed: Resumed) -> None:
    assert tokens_of(resumed.longer) == tokens_of(plain.longer)


def test_longer_prompts_resume_from_the_deepest_common_point(model: Model, resumed: Resumed) -> None:
    assert served(resumed.longer) == [model.served_longer(length) for length in model.lengths]


def test_different_prompts_are_computed_and_right(plain: Plain, resumed: Resumed) -> None:
    assert served(resumed.other) == [0]
    assert tokens_of(resumed.other) == tokens_of(plain.other)


def test_first_logprobs_lie_within_the_engines_own_spread(plain: Plain, resumed: Resumed) -> None:
    pairs = zip(resumed.first + resumed.longer, plain.first + plain.longer, strict=True)
    assert max(abs(ours.logprobs[0] - theirs.logprobs[0]) for ours, theirs in pairs) <= plain.spread


def test_every_loaded_block_holds_the_bytes_that_were_saved(
    runs: Runs, model: Model, resumed: Resumed
) -> None:
    saved = runs.saved(model.family).blocks
    for computed, seen, answer in zip(saved, resumed.blocks, resumed.first, strict=True):
        loaded = whole_blocks(model, seen, served_tokens=answer.external_tokens)
        assert loaded, "no block to compare"
        assert loaded == {block: computed.get(block) for block in loaded}
