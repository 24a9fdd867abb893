"""A model whose every stored byte is known: a function of the whole prefix, the row, the layer and the heads.

It stands for a language model in the reference engine. The bytes of an entry depend on the digest of all
tokens up to its last one, so bytes of another prefix, position, layer, head range or row never pass for them;
the next token depends on the digest as well, so one sequence has one continuation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["Digests", "Origin", "PrefixModel", "content"]

Bytes = npt.NDArray[np.uint8]
Digests = npt.NDArray[np.uint64]
"""One per position, ``uint64[n]``: of all tokens up to and with the one at that position."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class Origin:
    """Which bytes of an entry or a state: all that is not the prefix."""

    row: str
    """Name of the spec row."""
    layer: int
    """Global number of the layer."""
    heads: tuple[int, int] | None = None
    """The head range of the segment; None = all of them."""


@dataclass(frozen=True, slots=True)
class PrefixModel:
    """Digests of prefixes and the tokens that follow them.

    >>> model = PrefixModel()
    >>> one, other = model.digests([1, 2, 3]), model.digests([9, 2, 3])
    >>> bool((one == other).any())
    False
    """

    vocabulary: int = 1000
    """Tokens are below it."""
    seed: bytes = field(default=b"", repr=False)
    """Another seed is another model: all its bytes differ."""

    def digests(self, tokens: Sequence[int], *, after: int | None = None) -> Digests:
        """The digest at each position of ``tokens``, which follow the prefix of digest ``after``."""
        state = hashlib.blake2b(b"prefix" + self.seed, digest_size=8).digest()
        state = state if after is None else int(after).to_bytes(8, "little")
        found = bytearray()
        for token in tokens:
            state = hashlib.blake2b(state + int(token).to_bytes(4, "little"), digest_size=8).digest()
            found += state
        return np.frombuffer(bytes(found), dtype="<u8")

    def next_token(self, digest: int) -> int:
        """The token that follows the prefix of this digest."""
        return int(digest) % self.vocabulary


def content(digests: Digests, origin: Origin, size_bytes: int) -> Bytes:
    """The right bytes at each of ``digests``, ``uint8[n, size_bytes]``: splitmix64 of digest and origin."""
    state = (digests ^ _seed(origin))[:, None] + _steps(-(-size_bytes // 8))
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    state ^= state >> np.uint64(31)
    found: Bytes = state.view(np.uint8)[:, :size_bytes]
    return found


@lru_cache
def _steps(words: int) -> Digests:
    return _STEP * np.arange(1, words + 1, dtype=np.uint64)


@lru_cache(maxsize=1 << 14)
def _seed(origin: Origin) -> np.uint64:
    text = f"{origin.row}\0{origin.layer}\0{origin.heads}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))
