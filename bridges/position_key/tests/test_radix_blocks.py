"""TensorRT-LLM's keys of blocks: there and back, any grain, windows that have moved on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import formula, index_of

from ucm_core.errors import IdentityError, SpecError
from ucm_core.spec.keys import LoraIdentity, RequestIdentity
from ucm_position_key import KeyView, PositionPath, RadixBlock, Span, path_of_blocks, radix_blocks, targets

SALTED = RequestIdentity(cache_salt="t1", lora=LoraIdentity("fr", "5e" * 32))
identities = st.sampled_from([RequestIdentity(), RequestIdentity(cache_salt="t1"), SALTED])
tokens = st.lists(st.integers(0, 2**33), max_size=40)


@given(tokens, identities, st.integers(1, 9), st.integers(1, 9))
def test_a_path_is_its_blocks_and_blocks_are_their_path(ids, identity, size, grain):
    path = PositionPath(identity, grain_tokens=grain)
    path.extend(ids)
    blocks = radix_blocks(path, size)
    assert [token for block in blocks for token in block.tokens] == ids
    back = path_of_blocks(blocks, tokens_per_block=size, grain_tokens=grain)
    seed = identity.seed if ids else b""
    assert back.digests.tolist() == formula(ids, grain, seed).tolist() == path.digests.tolist()
    assert radix_blocks(back, size) == blocks


few = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@given(st.lists(few, min_size=1, max_size=4), st.integers(1, 8), st.integers(1, 4))
def test_blocks_are_nodes_of_one_index_whatever_their_size(paths, size, grain):
    index = index_of(grain)
    for ids in paths:
        path = index.pools.path()
        path.extend(ids)
        for begin in range(0, len(ids), size):
            end, above = min(begin + size, len(ids)), tuple(ids[:begin]) or None
            if (name := tuple(ids[:end])) not in index:
                own = path.digests[begin // grain : end // grain]
                index.insert(name, own, end=end, parent=above)
    for ids in paths:
        digests = formula(ids, grain)
        for number, spans in enumerate(index.locate("full", index.pools.keys("full", digests))):
            assert [p for span in spans for p in range(span.begin, span.end)] == [
                *range(number * grain, (number + 1) * grain)
            ]
            assert all(span.node[: span.end] == tuple(ids[: span.end]) for span in spans)
    index.check_integrity()


def test_equal_tokens_under_two_salts_share_no_digest():
    ids = tuple(range(32))
    plain, salted = (
        path_of_blocks([RadixBlock(ids, identity)], tokens_per_block=32, grain_tokens=16).page_hashes
        for identity in (RequestIdentity(), SALTED)
    )
    assert not {*plain} & {*salted}


def test_the_last_block_may_be_short_and_no_other():
    short = [RadixBlock((1, 2)), RadixBlock((3,))]
    assert path_of_blocks(short, tokens_per_block=2, grain_tokens=1).token_count == 3
    with pytest.raises(SpecError, match="block 0 of 2 has 1 tokens, must have 2 to 2"):
        path_of_blocks(short[::-1], tokens_per_block=2, grain_tokens=1)


@pytest.mark.parametrize("size", [0, 3])
def test_a_block_that_is_empty_or_too_long_is_refused(size):
    with pytest.raises(SpecError, match=f"block 0 of 1 has {size} tokens, must have 1 to 2"):
        path_of_blocks([RadixBlock(tuple(range(size)))], tokens_per_block=2, grain_tokens=1)


def test_a_path_of_two_identities_is_refused():
    blocks = [RadixBlock((1, 2)), RadixBlock((3, 4), SALTED)]
    with pytest.raises(IdentityError, match="blocks 0 and 1 of one path"):
        path_of_blocks(blocks, tokens_per_block=2, grain_tokens=2)


def test_an_adapter_of_unknown_content_is_refused():
    vague = RequestIdentity(lora=LoraIdentity("fr", None))
    with pytest.raises(IdentityError, match="not cached"):
        path_of_blocks([RadixBlock((1, 2), vague)], tokens_per_block=2, grain_tokens=2)


def test_a_path_of_pairs_has_no_blocks():
    with pytest.raises(SpecError, match="by pairs"):
        radix_blocks(PositionPath(grain_tokens=2, view=KeyView.BIGRAM), 2)


def test_pages_keep_their_place_when_a_window_has_moved_on():
    assert list(targets([-1, -1, 7, 0, -1, 3], 32)) == [
        (7, Span(64, 96)), (0, Span(96, 128)), (3, Span(160, 192))
    ]  # fmt: skip


@pytest.mark.parametrize("size", [0, -1, None])
def test_blocks_of_nothing_are_refused(size):
    path = PositionPath(grain_tokens=2)
    for call in (
        lambda: radix_blocks(path, size),
        lambda: path_of_blocks([], tokens_per_block=size, grain_tokens=2),
        lambda: list(targets([1], size)),
    ):
        with pytest.raises(SpecError, match="tokens_per_block is"):
            call()
