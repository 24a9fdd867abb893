"""Pages against blocks: every oracle here counts positions one by one."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ucm_core.errors import SpecError
from ucm_position_key import Span, blocks_ending_in, page_warning, pieces, tail_of, whole_blocks

sizes = st.integers(1, 40)
spans = st.tuples(st.integers(0, 200), st.integers(0, 200)).map(lambda edges: Span(*sorted(edges)))


@given(spans, sizes)
@example(Span(16, 80), 32)
def test_a_block_ends_where_its_last_position_is(span, size):
    expected = [p // size for p in range(span.begin, span.end) if p % size == size - 1]
    assert list(blocks_ending_in(span, size)) == expected


@given(spans, sizes)
def test_a_whole_block_has_every_position_inside(span, size):
    inside = set(range(span.begin, span.end))
    expected = [b for b in range(210) if set(range(b * size, (b + 1) * size)) <= inside]
    assert list(whole_blocks(span, size)) == expected


@given(spans, sizes)
@example(Span(70, 80), 32)
def test_the_tail_is_what_comes_after_the_last_block_end(span, size):
    ends = [p + 1 for p in range(span.begin, span.end) if p % size == size - 1]
    assert tail_of(span, size) == Span(max([span.begin, *ends]), span.end)


@given(spans, sizes)
@example(Span(20, 40), 16)
def test_pieces_are_the_span_page_by_page(span, size):
    found = [(piece.page, p) for piece in pieces(span, size) for p in range(piece.begin, piece.end)]
    assert found == [divmod(p, size) for p in range(span.begin, span.end)]
    assert len({piece.page for piece in pieces(span, size)}) == len(pieces(span, size))


@given(st.lists(st.integers(1, 50), max_size=8), sizes)
def test_spans_of_a_path_share_out_its_blocks(lengths, size):
    edges = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    parts = [Span(begin, end) for begin, end in pairwise(edges)]
    blocks = [block for part in parts for block in blocks_ending_in(part, size)]
    assert blocks == list(range(edges[-1] // size))


@given(sizes, sizes, st.integers(0, 20))
def test_blocks_in_pages_and_pages_in_blocks_are_one_relation(page, block, number):
    span = Span(number * block, (number + 1) * block)
    for piece in pieces(span, page):
        back = pieces(Span(piece.page * page, (piece.page + 1) * page), block)
        (own,) = (other for other in back if other.page == number)
        assert number * block + own.begin == piece.page * page + piece.begin
        assert own.end - own.begin == piece.end - piece.begin


@pytest.mark.parametrize(("page", "block", "count"), [(32, 64, 2), (128, 64, 1), (16, 24, 2), (64, 64, 1)])
def test_the_pages_behind_the_second_block(page, block, count):
    assert len(pieces(Span(block, 2 * block), page)) == count


@pytest.mark.parametrize(("begin", "end"), [(2, 1), (-1, 1)])
def test_a_reversed_span_is_refused(begin, end):
    with pytest.raises(SpecError, match=rf"got \[{begin}, {end}\)"):
        Span(begin, end)


@pytest.mark.parametrize("size", [0, -1, 1.0, None])
@pytest.mark.parametrize("question", [blocks_ending_in, whole_blocks, tail_of, pieces])
def test_a_size_of_nothing_is_refused(question, size):
    with pytest.raises(SpecError, match="must be at least 1"):
        question(Span(0, 8), size)


def test_pages_of_one_token_are_warned_about_with_their_cost():
    assert page_warning(2, 512) is None
    message = page_warning(1, 5000)
    assert "header of 4096 bytes" in message
    assert "5000 bytes rounded up to 8192" in message
