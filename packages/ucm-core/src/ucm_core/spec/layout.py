"""Where an engine keeps the elements of a block, and how that maps to canonical bytes.

Canonical bytes of a unit are its parts in row order, each token-major ``[tokens, heads, dim]`` without
padding. An engine's page may hold another number of tokens than a block and any strides; the native gather
and scatter copy between the two from the tables made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.errors import LayoutError

__all__ = ["PART_COLUMNS", "PIECE_COLUMNS", "EngineLayout", "PartLayout"]

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
"""Columns of ``EngineLayout.pieces``."""


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
    """Bytes from one token of a page to the next."""
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

    def pieces(
        self,
        block_begin_token: int,
        block_tokens: int,
        *,
        page_ids: Sequence[int] | npt.NDArray[np.integer],
        from_token: int = 0,
        block_count: int = 1,
    ) -> npt.NDArray[np.int64]:
        """Cut ``block_count`` consecutive blocks into pieces that each lie in one block and one page.

        ``page_ids[i]`` holds the request's tokens ``[i*page_tokens, (i+1)*page_tokens)``. Tokens before
        ``from_token`` (a position in the request) are left out: what the engine holds is never written over.
        Returns ``int64[pieces, 5]``, see PIECE_COLUMNS; ``payload_index`` counts the blocks from 0.
        Raises LayoutError when a page is missing.
        """
        begin = max(block_begin_token, from_token)
        end = block_begin_token + block_count * block_tokens
        self._check_range(block_begin_token, block_tokens, -(-end // self.page_tokens), len(page_ids))
        if begin >= end:
            return np.empty((0, len(PIECE_COLUMNS)), np.int64)
        # Every piece is [starts[i], ends[i]); cuts are page edges, block edges and the two outer ends.
        page_edges = np.arange(begin // self.page_tokens + 1, -(-end // self.page_tokens)) * self.page_tokens
        block_edges = np.arange(block_begin_token, end, block_tokens)
        starts = np.unique(np.concatenate([[begin], page_edges, block_edges[block_edges > begin]])).astype(
            np.int64
        )
        ends = np.append(starts[1:], end)
        index, token_in_block = np.divmod(starts - block_begin_token, block_tokens)
        page, token_in_page = np.divmod(starts, self.page_tokens)
        ids = np.asarray(page_ids, np.int64)[page]
        return np.stack([index, token_in_block, ids, token_in_page, ends - starts], axis=1)

    def _check_range(self, begin: int, block_tokens: int, pages_needed: int, pages: int) -> None:
        if begin < 0 or block_tokens < 1:
            raise LayoutError(f"a block begins at a token and holds some, got {begin} and {block_tokens}")
        if pages_needed > pages:
            raise LayoutError(
                f"the blocks from token {begin} need {pages_needed} pages of the request, it has {pages}"
            )
