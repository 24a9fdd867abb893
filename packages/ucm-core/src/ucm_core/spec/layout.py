"""Where an engine keeps the elements of a block, and how that maps to canonical bytes.

Canonical bytes of a unit are its parts in row order, each token-major ``[tokens, heads, dim]`` without
padding. An engine's page may hold another number of tokens than a block and any strides; the native gather
and scatter copy between the two from the tables made here.

A compressed part has one entry per several tokens. Its layout counts entries where another counts tokens:
``token_stride`` leads from one entry to the next, and `in_entries` turns pieces of tokens into pieces of
entries. Parts that compress differently need a layout each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.errors import LayoutError

__all__ = [
    "ABSENT_PAGE",
    "PART_COLUMNS",
    "PIECE_COLUMNS",
    "EngineLayout",
    "PartLayout",
    "block_pieces",
    "in_entries",
]

PART_COLUMNS = (
    "base",
    "page_stride",
    "token_stride",
    "head_stride",
    "dim_stride",
    "heads",
    "dim",
    "item_bytes",
    "canonical_offset",
)
"""Columns of ``EngineLayout.table``."""

PIECE_COLUMNS = ("payload_index", "token_in_block", "page_id", "token_in_page", "token_count")
"""Columns of what ``block_pieces`` returns."""

_TOKEN_COLUMNS = [PIECE_COLUMNS.index(name) for name in ("token_in_block", "token_in_page", "token_count")]

ABSENT_PAGE = 0
"""The page of tokens that an engine does not keep. Engines reserve page 0 and never give it to a request."""


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One part of one unit in the engine's memory; all strides are in bytes.

    Element (page p, token t, head h, dim d) lies at
    ``base + p*page_stride + t*token_stride + h*head_stride + d*dim_stride``, and for token T of the block at
    ``canonical_offset + ((T*heads + h)*dim + d)*item_bytes`` of the payload.
    """

    base: int
    """Address of page 0."""
    page_stride: int
    """Bytes from one page to the next."""
    token_stride: int
    """Bytes from one token of a page (one entry of a compressed part) to the next."""
    head_stride: int
    """Bytes from one head to the next."""
    dim_stride: int
    """Bytes from one element of a head vector to the next."""
    heads: int
    """Heads in this segment."""
    dim: int
    """Elements per head."""
    item_bytes: int
    """Bytes per element."""
    canonical_offset: int
    """Where the part begins in the block's payload (shard x stride + offset in the unit)."""

    def __post_init__(self) -> None:
        """Raise LayoutError for counts or offsets that describe no memory."""
        if self.base <= 0 or self.canonical_offset < 0:
            raise LayoutError(
                f"a part needs an address and an offset, got {self.base} and {self.canonical_offset}"
            )
        if min(self.heads, self.dim, self.item_bytes) < 1:
            raise LayoutError(
                f"a part [{self.heads} heads, {self.dim}] of {self.item_bytes} bytes holds nothing"
            )


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """All parts of a block in the engine's memory; one page table addresses them all."""

    page_tokens: int
    """Tokens per page of the engine; need not divide or be divided by the block."""
    parts: tuple[PartLayout, ...]
    """Parts of all units of the segment."""

    def __post_init__(self) -> None:
        """Raise LayoutError for an empty layout."""
        object.__setattr__(self, "parts", tuple(self.parts))
        if self.page_tokens < 1 or not self.parts:
            raise LayoutError(
                f"a layout needs pages and parts, got {self.page_tokens} tokens and {len(self.parts)} parts"
            )

    @property
    def table(self) -> npt.NDArray[np.int64]:
        """``int64[parts, 9]`` for the native call, see PART_COLUMNS."""
        return np.array([astuple(part) for part in self.parts], np.int64)


def block_pieces(
    first_tokens: npt.NDArray[np.int64],
    block_tokens: int,
    *,
    page_ids: Sequence[int],
    page_tokens: int,
    from_token: int = 0,
) -> npt.NDArray[np.int64]:
    """Cut blocks into pieces that lie in one block and one page: ``int64[pieces, 5]``, see PIECE_COLUMNS.

    Payload ``i`` is the block of the request's tokens ``[first_tokens[i], first_tokens[i] + block_tokens)``;
    ``page_ids[k]`` holds ``[k*page_tokens, (k+1)*page_tokens)``. Tokens below ``from_token`` (a position in
    the request) are left out: what the engine holds is never written over. Pages past the end of ``page_ids``
    are ABSENT_PAGE; so may be some of ``page_ids``, and the caller leaves their pieces out.

    >>> block_pieces(np.array([64]), 64, page_ids=[7, 8, 9], page_tokens=48, from_token=80).tolist()
    [[0, 16, 8, 32, 16], [0, 32, 9, 0, 32]]
    """
    ends = (first_tokens + block_tokens)[:, None]
    lows = np.maximum(first_tokens, from_token)[:, None]
    # a block overlaps at most this many pages; pages that it does not reach come out empty below
    page = lows // page_tokens + np.arange(block_tokens // page_tokens + 2)
    low = np.maximum(page * page_tokens, lows)
    high = np.minimum((page + 1) * page_tokens, ends)
    payload = np.broadcast_to(np.arange(len(first_tokens))[:, None], page.shape)
    ids = _ids(page_ids, page)
    rows = np.stack(
        [payload, low - first_tokens[:, None], ids, low - page * page_tokens, high - low], axis=-1
    )
    pieces: npt.NDArray[np.int64] = np.ascontiguousarray(rows[high > low].astype(np.int64))
    return pieces


def in_entries(pieces: npt.NDArray[np.int64], tokens_per_entry: int) -> npt.NDArray[np.int64]:
    """Return ``pieces`` counted in entries of ``tokens_per_entry`` tokens: ``int64[pieces, 5]``.

    LayoutError where a piece begins or ends inside an entry, because the block, the page or what the engine
    holds does: an entry is there whole or not at all.

    >>> in_entries(np.array([[0, 64, 7, 0, 64]]), 4).tolist()
    [[0, 16, 7, 0, 16]]
    """
    if tokens_per_entry < 1:
        raise LayoutError(f"an entry of {tokens_per_entry} tokens; at least 1")
    counted = pieces.copy()
    tokens = counted[:, _TOKEN_COLUMNS]
    cut = np.flatnonzero((tokens % tokens_per_entry).any(axis=1))
    if cut.size:
        _, begin, page, begin_in_page, count = pieces[cut[0]].tolist()
        raise LayoutError(
            f"tokens [{begin}, {begin + count}) of a block, at token {begin_in_page} of page {page}, cut an "
            f"entry of {tokens_per_entry} tokens; blocks, pages and local tokens must be multiples of it"
        )
    counted[:, _TOKEN_COLUMNS] = tokens // tokens_per_entry
    return counted


def _ids(page_ids: Sequence[int], page: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    known = np.asarray(page_ids if len(page_ids) else [ABSENT_PAGE], dtype=np.int64)
    found: npt.NDArray[np.int64] = np.where(
        page < len(page_ids), known[np.minimum(page, len(known) - 1)], ABSENT_PAGE
    )
    return found
