"""From blocks of a row to places in the engine: pieces of pages, computed from the engine's block tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NULL_PAGE = 0
"""vLLM's placeholder block: it stands for tokens that the engine does not keep."""

PAYLOAD, TOKEN_IN_BLOCK, PAGE, TOKEN_IN_PAGE, TOKENS = range(5)
"""Columns of a piece, as `ucm_core.flow.copy.EngineBlocks` reads them."""


def block_pieces(
    first_tokens: Int64s, block_tokens: int, *, table: Sequence[int], page_tokens: int, from_token: int = 0
) -> Int64s:
    """Where the tokens ``[first, first + block_tokens)`` of each block lie, ``int64[pieces, 5]``.

    Payload ``i`` is the block that begins at ``first_tokens[i]``. Tokens below ``from_token`` are left out:
    the engine holds them. Pages past the end of ``table`` are null pages.

    >>> block_pieces(np.array([64]), 64, table=[7, 8, 9], page_tokens=48, from_token=80).tolist()
    [[0, 16, 8, 32, 16], [0, 32, 9, 0, 32]]
    """
    ends = (first_tokens + block_tokens)[:, None]
    lows = np.maximum(first_tokens, from_token)[:, None]
    # a block overlaps at most this many pages; pages that it does not reach come out empty below
    page = lows // page_tokens + np.arange(block_tokens // page_tokens + 2)
    low = np.maximum(page * page_tokens, lows)
    high = np.minimum((page + 1) * page_tokens, ends)
    payload = np.broadcast_to(np.arange(len(first_tokens))[:, None], page.shape)
    rows = np.stack(
        [payload, low - first_tokens[:, None], _pages(table, page), low - page * page_tokens, high - low],
        axis=-1,
    )
    pieces: Int64s = np.ascontiguousarray(rows[high > low].astype(np.int64))
    return pieces


def state_pieces(pages: Sequence[int]) -> Int64s:
    """One piece per state: payload ``i`` is the whole of ``pages[i]``."""
    pieces = np.zeros((len(pages), 5), dtype=np.int64)
    pieces[:, PAYLOAD] = np.arange(len(pages))
    pieces[:, PAGE] = pages
    pieces[:, TOKENS] = 1
    return pieces


def held(pieces: Int64s) -> Int64s:
    """The pieces that lie in real pages."""
    real: Int64s = pieces[pieces[:, PAGE] != NULL_PAGE]
    return real


def whole(pieces: Int64s, count: int) -> Mask:
    """Which of ``count`` payloads have no piece in a null page."""
    mask = np.ones(count, dtype=np.bool_)
    mask[pieces[pieces[:, PAGE] == NULL_PAGE, PAYLOAD]] = False
    return mask


def of_payloads(pieces: Int64s, mask: Mask) -> Int64s:
    """The pieces of the payloads in ``mask``, renumbered in order."""
    chosen = pieces[mask[pieces[:, PAYLOAD]]].copy()
    chosen[:, PAYLOAD] = (np.cumsum(mask) - 1)[chosen[:, PAYLOAD]]
    return chosen


def _pages(table: Sequence[int], page: Int64s) -> Int64s:
    known = np.asarray(table if len(table) else [NULL_PAGE], dtype=np.int64)
    found: Int64s = np.where(page < len(table), known[np.minimum(page, len(known) - 1)], NULL_PAGE)
    return found
