"""Paths from the root of an engine's tree: tokens in, digests out, step by step.

The digests are those of `ucm_core.spec.keys.PrefixChain`, which are SGLang's page hashes. Under EAGLE an
engine's position i is the pair (t[i], t[i+1]), so n tokens have n - 1 positions and a page of P positions
hashes the 2P ids of its pairs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm_core.errors import IdentityError, SpecError, shown
from ucm_core.spec.identity import ModelIdentity, canonical_json
from ucm_core.spec.keys import DIGEST_BYTES, PrefixChain, RequestIdentity, Tokens
from ucm_position_key.spans import check_size

__all__ = ["Digests", "KeyView", "PositionPath", "digests_of"]

Digests = npt.NDArray[np.uint8]
"""Prefix digests or object keys, ``uint8[n, 32]``."""

_NEVER = (1 << 31) - 1
"""Tokens of a grain that no path fills: a chain of such grains reads containers and hashes nothing."""
_PAGE_HASH = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_HEX_DIGITS = b"0123456789abcdef"


class KeyView(Enum):
    """What one position of an engine's key is."""

    PLAIN = 1
    """A token."""
    BIGRAM = 2
    """A token and the next one, as EAGLE keys them; in a namespace of their own, see `identity_of`."""

    @property
    def ids_per_position(self) -> int:
        """Token ids that one position hashes."""
        return self.value

    def positions(self, token_count: int) -> int:
        """Return how many positions ``token_count`` tokens have.

        >>> KeyView.PLAIN.positions(64), KeyView.BIGRAM.positions(64), KeyView.BIGRAM.positions(0)
        (64, 63, 0)
        """
        return max(token_count - self.value + 1, 0)

    def identity_of(self, model: ModelIdentity) -> ModelIdentity:
        """Return the identity whose namespace holds this view's objects: plain keys are in the model's own.

        A page of P pairs hashes 2P ids, as a plain page of 2P tokens does; so pairs are told apart by the
        namespace, through the run options. IdentityError for run options that are no mapping.
        """
        if self is KeyView.PLAIN:
            return model
        options = json.loads(model.run_options)
        if not isinstance(options, dict | None):
            raise IdentityError(f"run_options are {shown(options)}, must be a mapping to name a key view in")
        return replace(model, run_options=canonical_json({**(options or {}), "key_view": self.name.lower()}))


class PositionPath:
    """The tokens from a tree's root to some node, and the digest at each grain end; appending never rehashes.

    Not thread-safe. ``grain_tokens`` are positions; where they are an engine's page, digests are its hashes.
    """

    def __init__(
        self, identity: RequestIdentity | None = None, *, grain_tokens: int, view: KeyView = KeyView.PLAIN
    ) -> None:
        """Start at the root; SpecError or IdentityError for what the chain refuses."""
        check_size("grain_tokens", grain_tokens)
        self.grain_tokens = grain_tokens
        self.view = view
        self._chain = PrefixChain(identity, grain_tokens=grain_tokens * view.ids_per_position)
        self._first: npt.NDArray[Any] = np.empty(0, np.uint32)  # under BIGRAM: the first token, once there

    @property
    def identity(self) -> RequestIdentity:
        """What separates equal tokens."""
        return self._chain.identity

    @property
    def positions(self) -> int:
        """Positions so far, those of an unfinished grain included."""
        return self._chain.token_count // self.view.ids_per_position

    @property
    def token_count(self) -> int:
        """Tokens so far."""
        return self.positions + len(self._first)

    @property
    def digests(self) -> Digests:
        """One digest per whole grain, ``uint8[grains, 32]``, read-only; stays valid and unchanged."""
        return self._chain.digests

    @property
    def page_hashes(self) -> tuple[str, ...]:
        """The digests as SGLang spells those of its pages: 64 hexadecimal digits, lower case."""
        return tuple(digest.tobytes().hex() for digest in self.digests)

    def extend(self, tokens: Tokens) -> None:
        """Append tokens; IdentityError (and no change) when one is negative or not an integer."""
        if self.view is KeyView.PLAIN:
            return self._chain.extend(tokens)
        ids = np.concatenate([self._last(), _read(tokens)])
        if not len(ids):
            return None
        self._chain.extend(np.repeat(ids, 2)[1:-1])
        self._first = self._first if len(self._first) else ids[:1].copy()
        return None

    def truncate(self, token_count: int) -> None:
        """Keep the first tokens, for example up to where another path branches; SpecError for too few."""
        if not 0 <= token_count <= self.token_count:
            raise SpecError(f"cannot truncate a path of {self.token_count} tokens to {shown(token_count)}")
        self._chain.truncate(self.view.positions(token_count) * self.view.ids_per_position)
        self._first = self._first[:token_count]

    def tokens(self) -> npt.NDArray[Any]:
        """Return a copy of the tokens, as they were appended."""
        ids = self._chain.token_ids(0, self._chain.token_count)
        if self.view is KeyView.PLAIN:
            return ids
        return np.concatenate([self._first, ids[1::2]])

    def _last(self) -> npt.NDArray[Any]:
        """The last token, or none: the first of the next pair."""
        count = self._chain.token_count
        return self._chain.token_ids(count - 1, count) if count else self._first


def digests_of(page_hashes: Sequence[str]) -> Digests:
    """Return ``uint8[pages, 32]`` of page hashes; IdentityError for what is no hash, a placeholder for one.

    >>> digests_of(["0f" * 32]).tolist() == [[15] * 32]
    True
    """
    for number, text in enumerate(() if _are_hashes(page_hashes) else page_hashes):
        if not isinstance(text, str) or not _PAGE_HASH.fullmatch(text):
            raise IdentityError(
                f"page hash {number} is {shown(text)}, must be {2 * DIGEST_BYTES} lower-case hex digits"
            )
    return np.frombuffer(bytes.fromhex("".join(page_hashes)), np.uint8).reshape(-1, DIGEST_BYTES)


def _are_hashes(texts: Sequence[str]) -> bool:
    """Whether they certainly are, in a tenth of the time that one after the other takes."""
    if {*map(type, texts)} != {str} or {*map(len, texts)} != {2 * DIGEST_BYTES}:
        return False
    joined = "".join(texts)
    return joined.isascii() and not joined.encode().translate(None, _HEX_DIGITS)


def _read(tokens: Tokens) -> npt.NDArray[Any]:
    """Return ids as the chain reads them, whatever the container."""
    reader = PrefixChain(grain_tokens=_NEVER)
    reader.extend(tokens)
    return reader.token_ids(0, reader.token_count)
