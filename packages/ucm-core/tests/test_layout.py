"""Engine layouts: pieces against a token-by-token oracle, and the table of the native call."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_core.errors import LayoutError
from ucm_core.flow.copy import EngineBlocks
from ucm_core.spec.layout import (
    PART_COLUMNS,
    PIECE_COLUMNS,
    EngineLayout,
    PartLayout,
    block_pieces,
    in_entries,
)

PART = PartLayout(
    base=4096,
    page_stride=8192,
    token_stride=64,
    head_stride=1024,
    dim_stride=2,
    heads=8,
    dim=32,
    item_bytes=2,
    canonical_offset=0,
)


def places(pieces):
    """Each token that pieces copy: (payload, token in block) -> (page, token in page)."""
    moves = {}
    for payload, token_in_block, page, token_in_page, count in pieces.tolist():
        assert count > 0
        for step in range(count):
            assert (payload, token_in_block + step) not in moves
            moves[payload, token_in_block + step] = (page, token_in_page + step)
    return moves


def expected_places(first_tokens, block_tokens, *, page_ids, page_tokens, from_token):
    """The oracle: token by token."""
    found = {}
    for payload, first in enumerate(first_tokens):
        for token in range(max(first, from_token), first + block_tokens):
            page = token // page_tokens
            page_id = page_ids[page] if page < len(page_ids) else 0
            found[payload, token - first] = (page_id, token % page_tokens)
    return found


@given(
    page_tokens=st.integers(1, 20),
    block_tokens=st.integers(1, 24),
    blocks=st.lists(st.integers(0, 9), max_size=5, unique=True),
    from_token=st.integers(0, 200),
    pages=st.integers(0, 250),
)
@settings(max_examples=400, deadline=None)
def test_pieces_move_every_token_to_its_place_exactly_once(
    page_tokens, block_tokens, blocks, from_token, pages
):
    where = {
        "page_ids": np.random.default_rng(pages).permutation(1000)[:pages].tolist(),
        "page_tokens": page_tokens,
        "from_token": from_token,
    }
    first_tokens = np.array(blocks, np.int64) * block_tokens
    pieces = block_pieces(first_tokens, block_tokens, **where)
    assert pieces.dtype == np.int64
    assert pieces.shape == (len(pieces), len(PIECE_COLUMNS))
    assert places(pieces) == expected_places(first_tokens.tolist(), block_tokens, **where)


def test_pieces_stay_inside_one_page_and_one_block_and_are_as_long_as_they_can_be():
    pieces = block_pieces(np.array([24, 48]), 24, page_ids=[9, 8, 7, 6, 5], page_tokens=16)
    assert pieces.tolist() == [
        [0, 0, 8, 8, 8],
        [0, 8, 7, 0, 16],
        [1, 0, 6, 0, 16],
        [1, 16, 5, 0, 8],
    ]


def test_what_the_engine_holds_is_left_out():
    # Case C-29: engine page 16, block 64, 80 local tokens, block [64, 128): pages 5, 6 and 7 only.
    pieces = block_pieces(np.array([64]), 64, page_ids=range(100, 108), page_tokens=16, from_token=80)
    assert pieces.tolist() == [[0, 16, 105, 0, 16], [0, 32, 106, 0, 16], [0, 48, 107, 0, 16]]


def test_nothing_is_left_when_the_engine_holds_everything():
    pieces = block_pieces(np.array([0]), 64, page_ids=range(1, 5), page_tokens=16, from_token=64)
    assert pieces.shape == (0, 5)


def test_pages_past_the_table_are_absent():
    assert block_pieces(np.array([64]), 64, page_ids=[5], page_tokens=64).tolist() == [[0, 0, 0, 0, 64]]
    assert block_pieces(np.array([0]), 64, page_ids=[], page_tokens=64)[:, 2].tolist() == [0]


def test_the_table_has_the_columns_in_order():
    table = EngineLayout(16, (PART,)).table
    assert table.dtype == np.int64
    assert table.tolist() == [[getattr(PART, column) for column in PART_COLUMNS]]


@pytest.mark.parametrize(
    "fields", [{"base": 0}, {"canonical_offset": -1}, {"heads": 0}, {"dim": 0}, {"item_bytes": 0}]
)
def test_a_part_that_is_no_memory_is_refused(fields):
    values = {column: getattr(PART, column) for column in PART_COLUMNS}
    with pytest.raises(LayoutError):
        PartLayout(**(values | fields))


@pytest.mark.parametrize(("page_tokens", "parts"), [(0, (PART,)), (16, ())])
def test_a_layout_without_pages_or_parts_is_refused(page_tokens, parts):
    with pytest.raises(LayoutError):
        EngineLayout(page_tokens, parts)


@given(
    ratio=st.integers(1, 6),
    page_entries=st.integers(1, 6),
    block_entries=st.integers(1, 8),
    blocks=st.lists(st.integers(0, 6), max_size=4, unique=True),
    from_entry=st.integers(0, 30),
)
@settings(max_examples=200, deadline=None)
def test_pieces_of_a_compressed_part_move_every_entry_once(
    ratio, page_entries, block_entries, blocks, from_entry
):
    first = np.array(blocks, np.int64) * block_entries
    where = {"page_ids": list(range(7, 60)), "page_tokens": page_entries * ratio}
    tokens = block_pieces(first * ratio, block_entries * ratio, **where, from_token=from_entry * ratio)
    expected = {}
    for payload, begin in enumerate(first.tolist()):
        for entry in range(max(begin, from_entry), begin + block_entries):
            page, inside = divmod(entry, page_entries)
            expected[payload, entry - begin] = (where["page_ids"][page] if page < 53 else 0, inside)
    assert places(in_entries(tokens, ratio)) == expected


@pytest.mark.parametrize(("block_tokens", "page_tokens", "from_token"), [(12, 8, 0), (16, 6, 0), (16, 8, 17)])
def test_an_entry_is_never_cut(block_tokens, page_tokens, from_token):
    where = {"page_ids": range(9), "page_tokens": page_tokens, "from_token": from_token}
    pieces = block_pieces(np.array([block_tokens]), block_tokens, **where)
    with pytest.raises(LayoutError, match="cut an entry of 8 tokens; blocks, pages and local tokens"):
        in_entries(pieces, 8)


def test_pieces_of_entries_need_a_size_and_leave_the_given_ones_alone():
    pieces = block_pieces(np.array([0]), 64, page_ids=[3], page_tokens=64)
    with pytest.raises(LayoutError, match="an entry of 0 tokens"):
        in_entries(pieces, 0)
    assert in_entries(pieces, 16).tolist() == [[0, 0, 3, 0, 4]]
    assert pieces.tolist() == [[0, 0, 3, 0, 64]]
    assert in_entries(pieces[:0], 16).shape == (0, 5)


def test_compressed_entries_travel_between_strided_pages_and_canonical_blocks():
    # 4 tokens an entry; pages of 2 entries of 3 items each, padded to 8 items; blocks of 16 tokens
    pool = np.arange(6 * 2 * 8, dtype=np.int16).reshape(6, 2, 8)
    part = PartLayout(
        pool.ctypes.data,
        pool.strides[0],
        pool.strides[1],
        6,
        2,
        heads=1,
        dim=3,
        item_bytes=2,
        canonical_offset=0,
    )
    tokens = block_pieces(np.array([0, 16]), 16, page_ids=[5, 2, 4, 1], page_tokens=8)
    payloads = np.zeros((2, 4, 3), np.int16)
    addresses = payloads.ctypes.data + np.arange(2, dtype=np.int64) * payloads.strides[0]
    blocks = EngineBlocks([EngineLayout(2, (part,))], in_entries(tokens, 4), block_tokens=4)
    blocks.gather(np.arange(2), addresses)
    assert payloads.reshape(8, 3).tolist() == pool[[5, 2, 4, 1], :, :3].reshape(8, 3).tolist()
    pool[...] = -1
    blocks.scatter(np.arange(2), addresses)
    assert pool[[5, 2, 4, 1], :, :3].reshape(8, 3).tolist() == payloads.reshape(8, 3).tolist()
    assert (pool[[0, 3]] == -1).all()
