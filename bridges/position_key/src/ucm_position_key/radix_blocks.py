"""The third coordinate system: TensorRT-LLM's radix tree of blocks.

There a node is one block of ``tokens_per_block`` tokens, keyed by its own tokens under its parent and by the
request's salt and adapter; the last block of a path may be short. An ordinal i always means the tokens
``[i * tokens_per_block, (i + 1) * tokens_per_block)``: a page that a window has left behind is a negative
index *in place*. Media are not translated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ucm_core.errors import IdentityError, SpecError
from ucm_core.spec.keys import RequestIdentity
from ucm_position_key.paths import KeyView, PositionPath
from ucm_position_key.spans import Span, check_size

__all__ = ["RadixBlock", "path_of_blocks", "radix_blocks", "targets"]


@dataclass(frozen=True, slots=True)
class RadixBlock:
    """The key of one block under its parent."""

    tokens: tuple[int, ...]
    """Its own tokens; fewer than ``tokens_per_block`` only at the end of a path."""
    identity: RequestIdentity = field(default_factory=RequestIdentity)
    """Salt and adapter: equal in all blocks of a path."""


def radix_blocks(path: PositionPath, tokens_per_block: int) -> tuple[RadixBlock, ...]:
    """Return the keys of a path's blocks, the last perhaps short; SpecError for a path of pairs.

    >>> path = PositionPath(grain_tokens=2)
    >>> path.extend([7, 8, 9])
    >>> [block.tokens for block in radix_blocks(path, 2)]
    [(7, 8), (9,)]
    """
    check_size("tokens_per_block", tokens_per_block)
    if path.view is not KeyView.PLAIN:
        raise SpecError("blocks are keyed by tokens, and this path by pairs of tokens")
    tokens = path.tokens().tolist()
    begins = range(0, len(tokens), tokens_per_block)
    return tuple(RadixBlock(tuple(tokens[at : at + tokens_per_block]), path.identity) for at in begins)


def path_of_blocks(blocks: Sequence[RadixBlock], *, tokens_per_block: int, grain_tokens: int) -> PositionPath:
    """Return the path that the blocks lie on, hashed by ``grain_tokens``, which need not divide a block.

    IdentityError for blocks of two identities, SpecError for a short block before the last.
    """
    check_size("tokens_per_block", tokens_per_block)
    for number, (before, after) in enumerate(pairwise(blocks)):
        if before.identity != after.identity:
            raise IdentityError(
                f"blocks {number} and {number + 1} of one path have the identities {before.identity} "
                f"and {after.identity}"
            )
    for number, block in enumerate(blocks):
        least = tokens_per_block if number + 1 < len(blocks) else 1
        if not least <= len(block.tokens) <= tokens_per_block:
            raise SpecError(
                f"block {number} of {len(blocks)} has {len(block.tokens)} tokens, must have {least} to "
                f"{tokens_per_block}"
            )
    path = PositionPath(blocks[0].identity if blocks else None, grain_tokens=grain_tokens)
    path.extend([token for block in blocks for token in block.tokens])
    return path


def targets(pages: Sequence[int], tokens_per_block: int) -> Iterator[tuple[int, Span]]:
    """Yield (page index, tokens) of a layer group's pages, without those that a window has left behind.

    >>> list(targets([-1, 5], 32))
    [(5, Span(begin=32, end=64))]
    """
    check_size("tokens_per_block", tokens_per_block)
    for ordinal, page in enumerate(pages):
        if page >= 0:
            yield page, Span(ordinal * tokens_per_block, (ordinal + 1) * tokens_per_block)
