"""Engine layouts: pieces against a token-by-token oracle, and the table of the native call."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_core.errors import LayoutError
from ucm_core.spec.layout import PART_COLUMNS, PIECE_COLUMNS, EngineLayout, PartLayout

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


def layout(page_tokens):
    return EngineLayout(page_tokens, (PART,))


def expand(pieces):
    """Each token that pieces copy: (block, token in block) -> (page, token in page)."""
    moves = {}
    for index, token_in_block, page, token_in_page, count in pieces.tolist():
        assert count > 0
        for step in range(count):
            assert (index, token_in_block + step) not in moves
            moves[index, token_in_block + step] = (page, token_in_page + step)
    return moves


@given(
    page_tokens=st.integers(1, 20),
    block_tokens=st.integers(1, 24),
    first_block=st.integers(0, 6),
    block_count=st.integers(1, 5),
    from_token=st.integers(0, 200),
    seed=st.integers(0, 999),
)
@settings(max_examples=400, deadline=None)
def test_pieces_move_every_token_to_its_place_exactly_once(
    page_tokens, block_tokens, first_block, block_count, from_token, seed
):
    begin, end = first_block * block_tokens, (first_block + block_count) * block_tokens
    page_ids = np.random.default_rng(seed).permutation(1000)[: -(-end // page_tokens)]
    pieces = layout(page_tokens).pieces(
        begin, block_tokens, page_ids=page_ids, from_token=from_token, block_count=block_count
    )
    expected = {
        ((token - begin) // block_tokens, (token - begin) % block_tokens): (
            page_ids[token // page_tokens],
            token % page_tokens,
        )
        for token in range(max(begin, from_token), end)
    }
    assert pieces.dtype == np.int64
    assert pieces.shape == (len(pieces), len(PIECE_COLUMNS))
    assert expand(pieces) == expected


def test_pieces_stay_inside_one_page_and_one_block_and_are_as_long_as_they_can_be():
    pieces = layout(16).pieces(24, 24, page_ids=[9, 8, 7, 6, 5], block_count=2)
    assert pieces.tolist() == [
        [0, 0, 8, 8, 8],
        [0, 8, 7, 0, 16],
        [1, 0, 6, 0, 16],
        [1, 16, 5, 0, 8],
    ]


def test_what_the_engine_holds_is_left_out():
    # Case C-29: engine page 16, block 64, 80 local tokens, block [64, 128): pages 5, 6 and 7 only.
    pieces = layout(16).pieces(64, 64, page_ids=range(100, 108), from_token=80)
    assert pieces.tolist() == [[0, 16, 105, 0, 16], [0, 32, 106, 0, 16], [0, 48, 107, 0, 16]]


def test_nothing_is_left_when_the_engine_holds_everything():
    assert layout(16).pieces(0, 64, page_ids=range(4), from_token=64).shape == (0, 5)


@pytest.mark.parametrize(
    ("begin", "block_tokens", "message"),
    [
        (64, 64, "need 8 pages of the request, it has 7"),
        (-64, 64, "begins at a token"),
        (0, 0, "begins at a token"),
    ],
)
def test_a_block_outside_the_page_table_is_refused(begin, block_tokens, message):
    with pytest.raises(LayoutError, match=message):
        layout(16).pieces(begin, block_tokens, page_ids=range(7))


def test_the_table_has_the_columns_in_order():
    table = layout(16).table
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
