"""Origins: the latest blocks that were to be stored, with parents and tokens, bounded."""

from __future__ import annotations

import pytest
from models import FULL, GRAIN, STATE

from ucm_core.coordinator.origins import Origin, Origins
from ucm_core.errors import SpecError
from ucm_core.spec.keys import PrefixChain, object_keys


def chain_of(tokens: list[int]) -> PrefixChain:
    chain = PrefixChain(grain_tokens=GRAIN)
    chain.extend(tokens)
    return chain


TOKENS = list(range(5, 5 + 4 * GRAIN))
CHAIN = chain_of(TOKENS)
KEYS = object_keys(bytes(range(32)), CHAIN.block_digests(GRAIN))


def test_a_block_knows_its_parent_and_its_tokens() -> None:
    origins = Origins()
    origins.remember(CHAIN, FULL, keys=KEYS[1:3], begin_block=1)
    first, second = (origins.of("full", KEYS[block, :16].tobytes()) for block in (1, 2))
    assert first == Origin(
        CHAIN.digest_at(2 * GRAIN), CHAIN.digest_at(GRAIN), GRAIN, tuple(TOKENS[GRAIN : 2 * GRAIN])
    )
    assert second is not None
    assert second.parent == first.digest


def test_the_first_block_has_no_parent_and_what_was_not_saved_has_no_origin() -> None:
    origins = Origins()
    origins.remember(CHAIN, STATE, keys=KEYS[:1], begin_block=0)
    first = origins.of("state", KEYS[0, :16].tobytes())
    assert first is not None
    assert first.parent is None
    assert origins.of("state", KEYS[1, :16].tobytes()) is None
    assert origins.of("full", KEYS[0, :16].tobytes()) is None


def test_the_oldest_are_forgotten() -> None:
    origins = Origins(capacity=3)
    origins.remember(CHAIN, FULL, keys=KEYS, begin_block=0)
    assert [origins.of("full", key[:16].tobytes()) is None for key in KEYS] == [True, False, False, False]


def test_later_tokens_of_the_chain_change_nothing_that_is_remembered() -> None:
    chain, origins = chain_of(TOKENS), Origins()
    origins.remember(chain, FULL, keys=KEYS, begin_block=0)
    chain.truncate(0)
    chain.extend([2**40] * len(TOKENS))
    last = origins.of("full", KEYS[3, :16].tobytes())
    assert last is not None
    assert last.tokens == tuple(TOKENS[3 * GRAIN :])


@pytest.mark.parametrize("span", [(-1, 2), (3, 2), (0, 4 * GRAIN + 1)])
def test_tokens_that_a_chain_does_not_have_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(SpecError, match=f"of a chain of {4 * GRAIN} tokens"):
        CHAIN.token_ids(*span)
