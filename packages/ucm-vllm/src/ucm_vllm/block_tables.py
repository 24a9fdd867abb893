"""Pieces of vLLM's pages: which of them hold something, and those of a state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ucm_core.spec.layout import ABSENT_PAGE

Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NULL_PAGE = ABSENT_PAGE
"""vLLM's placeholder block: it stands for tokens that the engine does not keep."""

PAYLOAD, TOKEN_IN_BLOCK, PAGE, TOKEN_IN_PAGE, TOKENS = range(5)
"""Columns of a piece, as `ucm_core.flow.copy.EngineBlocks` reads them."""


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
