"""Pages of any size against blocks of any size: pure arithmetic over half-open spans of positions.

A block belongs to the span in which it *ends*. So the spans of a path, which lie one behind the other, share
out the blocks of the path: each to exactly one span, whatever the sizes, and what is behind the last block
end is the tail.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucm_core.errors import SpecError, shown
from ucm_core.spec.rows import is_count

__all__ = [
    "Piece",
    "Span",
    "blocks_ending_in",
    "check_size",
    "page_warning",
    "pieces",
    "tail_of",
    "whole_blocks",
]

_HEADER_BYTES = 4096
"""Of the header page that every stored object has, see DESIGN.md 7."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Positions ``[begin, end)`` of a path."""

    begin: int
    """First position."""
    end: int
    """One past the last; equal to ``begin`` for an empty span."""

    def __post_init__(self) -> None:
        """Raise SpecError for a reversed or negative span."""
        if not 0 <= self.begin <= self.end:
            raise SpecError(f"a span is [begin, end) with 0 <= begin <= end, got [{self.begin}, {self.end})")

    @property
    def count(self) -> int:
        """Positions in it."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a span that lies in one page."""

    page: int
    """Number of the page in the path."""
    begin: int
    """First position, counted from the page's begin."""
    end: int
    """One past the last, counted from the page's begin."""


def blocks_ending_in(span: Span, block_tokens: int) -> range:
    """Return the blocks whose last position lies in ``span``.

    >>> blocks_ending_in(Span(16, 80), 32)
    range(0, 2)
    """
    check_size("block_tokens", block_tokens)
    return range(span.begin // block_tokens, span.end // block_tokens)


def whole_blocks(span: Span, block_tokens: int) -> range:
    """Return the blocks of which no position lies outside ``span``.

    >>> whole_blocks(Span(16, 80), 32), whole_blocks(Span(5, 9), 32)
    (range(1, 2), range(0, 0))
    """
    check_size("block_tokens", block_tokens)
    first, last = -(-span.begin // block_tokens), span.end // block_tokens
    return range(first, last) if first < last else range(0)


def tail_of(span: Span, block_tokens: int) -> Span:
    """Return what of ``span`` is behind the last block end: positions that have no block yet.

    >>> tail_of(Span(16, 80), 32), tail_of(Span(70, 80), 32), tail_of(Span(0, 64), 32)
    (Span(begin=64, end=80), Span(begin=70, end=80), Span(begin=64, end=64))
    """
    check_size("block_tokens", block_tokens)
    return Span(max(span.begin, span.end // block_tokens * block_tokens), span.end)


def pieces(span: Span, page_tokens: int) -> tuple[Piece, ...]:
    """Return ``span`` cut at the begins of pages, in order; their counts add up to the span's.

    It serves both ways: the engine's pages behind a block, and the blocks behind a page.

    >>> pieces(Span(24, 48), 16)
    (Piece(page=1, begin=8, end=16), Piece(page=2, begin=0, end=16))
    """
    check_size("page_tokens", page_tokens)
    pages = range(span.begin // page_tokens, -(-span.end // page_tokens)) if span.count else range(0)
    return tuple(
        Piece(page, max(span.begin - page * page_tokens, 0), min(span.end - page * page_tokens, page_tokens))
        for page in pages
    )


def page_warning(page_tokens: int, unit_bytes: int) -> str | None:
    """Return what to tell the user about a costly page size, or None; ``unit_bytes`` are a unit's per page.

    An object has a header page and every unit is rounded up to whole pages on disk.
    """
    check_size("page_tokens", page_tokens)
    if page_tokens > 1:
        return None
    return (
        f"page size 1: every token is an object of its own, with a header of {_HEADER_BYTES} bytes and each "
        f"unit's {unit_bytes} bytes rounded up to {-(-unit_bytes // _HEADER_BYTES) * _HEADER_BYTES}; choose "
        "a page size of 64 where the engine allows it"
    )


def check_size(name: str, size: int) -> None:
    """SpecError unless ``size`` is a count of at least 1."""
    if not is_count(size):
        raise SpecError(f"{name} is {shown(size)}, must be at least 1")
