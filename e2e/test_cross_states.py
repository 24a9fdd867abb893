"""A Mamba2 hybrid between a real vLLM and SGLang's real pools: each has what only the other kept.

SGLang computes Mamba2 on a GPU only (its `layers/attention/mamba/mamba.py` imports no convolution for a CPU),
so its model is not there. What keeps something of it is: pools in the shapes and types that SGLang makes of
the same checkpoint, its radix tree, UCM at either place. What comes to them is compared with vLLM's own
blocks and with what a state is by definition; the other way vLLM computes on with what they kept.
"""

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from e2e.answers import served, tokens_of
from e2e.harness import Blocks
from e2e.pair import Pair
from e2e.pools import Values
from e2e.recurrence import first_state
from e2e.runs import Runs
from e2e.states import ALTERED, FAMILY, MODEL, OWN, SEAMS, TYPES, CrossedStates, cross_states, prompts

STATES = tuple(f"model.layers.{layer}.mixer" for layer in (0, 1, 3))
ATTENTION = "model.layers.2.self_attn.attn"
TOLERANCE = 1e-4
"""Of the largest value of a state of the first layer, computed by different code in float32."""


@pytest.fixture(scope="module")
def crossed(runs: Runs, pair: Pair) -> CrossedStates:
    return cross_states(runs, pair.pools("states"))


def depth(values: Values) -> int:
    """Tokens that values are of."""
    return len(values["k"][0])


@pytest.mark.parametrize("seam", SEAMS)
def test_sglang_is_given_all_up_to_the_deepest_state_that_vllm_kept(
    crossed: CrossedStates, seam: str
) -> None:
    assert list(map(depth, crossed.given[seam])) == [MODEL.served_again(length) for length in MODEL.lengths]


@pytest.mark.parametrize("seam", SEAMS)
def test_its_pools_have_what_vllm_had_value_by_value(runs: Runs, crossed: CrossedStates, seam: str) -> None:
    for values, blocks in zip(crossed.given[seam], runs.saved(FAMILY).blocks, strict=True):
        found = as_in_vllm(values)
        assert found == {block: blocks.get(block) for block in found}


def as_in_vllm(values: Values) -> Blocks:
    """The digests that vLLM's blocks have where they hold these values, in vLLM's own order."""
    size = MODEL.engine_block_tokens
    count = depth(values) // size
    states = zip(STATES, values["conv"], values["ssm"], strict=True)
    found = {(layer, count - 1): digest(conv.T, ssm) for layer, conv, ssm in states}
    keys, others = (values[name][0].reshape(count, size, *values[name].shape[2:]) for name in ("k", "v"))
    for block, (k, v) in enumerate(zip(keys, others, strict=True)):
        heads = zip(k.transpose(1, 2, 0), v.transpose(1, 0, 2), strict=True)
        found[ATTENTION, block] = digest(*(part for head in heads for part in head))
    return found


def digest(*parts: NDArray[np.float32]) -> str:
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


@pytest.mark.parametrize("seam", SEAMS)
def test_a_state_in_its_pools_is_what_a_state_is(runs: Runs, crossed: CrossedStates, seam: str) -> None:
    """In SGLang's order: convolutions by channel, of each its inputs, the latest last."""
    for values, prompt in zip(crossed.given[seam], prompts(runs), strict=True):
        for name, right in first_state(runs.checkpoint(FAMILY), prompt.tokens[: depth(values)]).items():
            assert np.abs(values[name][0] - right).max() < TOLERANCE * np.abs(right).max()


@pytest.mark.parametrize("how", TYPES)
def test_only_where_it_keeps_them_as_vllm_does_it_is_given_anything(crossed: CrossedStates, how: str) -> None:
    assert crossed.restorable[how] == (MODEL.served_again(MODEL.lengths[0]) if how == OWN else 0)


def test_vllm_resumes_what_sglang_kept_at_either_place(crossed: CrossedStates) -> None:
    assert served(crossed.own) == [0, 0]
    assert served(crossed.read) == [MODEL.served_again(length) for length in MODEL.lengths]
    assert tokens_of(crossed.read) == tokens_of(crossed.own)


@pytest.mark.parametrize("name", ALTERED)
def test_what_was_kept_altered_is_what_vllm_computes_with(crossed: CrossedStates, name: str) -> None:
    assert served([crossed.altered[name]]) == [MODEL.served_again(MODEL.lengths[0])]
    assert crossed.altered[name].tokens != crossed.own[0].tokens


def test_vllm_is_served_nothing_that_sglang_kept_in_another_type(crossed: CrossedStates) -> None:
    assert crossed.rounded_restorable == MODEL.served_again(MODEL.lengths[0])
    assert served([crossed.rounded]) == [0]
    assert crossed.rounded.tokens == crossed.own[0].tokens
