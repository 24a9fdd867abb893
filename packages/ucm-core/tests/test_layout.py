"""Engine layouts: pieces against a token-by-token oracle, and the table of the native call."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_core.errors import LayoutError
from ucm_core.spec.layout import PART_COLUMNS, PIECE_COLUMNS, EngineLayout, PartLayout, block_pieces

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
