"""Where stored objects come from: remembered while somebody follows the events, since keys do not tell."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ucm_core.coordinator.lookups import names_of
from ucm_core.spec.keys import Keys, PrefixChain
from ucm_core.spec.table import SpecRow

MAX_ORIGINS = 65_536
"""Blocks remembered, the latest; about 4 bytes per token."""

_Entry = tuple[bytes, bytes | None, int, npt.NDArray[Any]]
"""An `Origin` with its tokens as an array: a tenth of the memory."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a block in its request."""

    digest: bytes
    """Of everything up to the block's end, 32 bytes; the same for every row, engine and namespace."""
    parent: bytes | None
    """Of everything before the block; None at the beginning of a request."""
    begin_tokens: int
    """Tokens before the block."""
    tokens: tuple[int, ...]
    """The block's own token ids; for a state those of the last step of its grid."""


class Origins:
    """The latest blocks that were to be stored, by row and object name. Thread-safe."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = MAX_ORIGINS if capacity is None else capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, bytes], _Entry] = OrderedDict()

    def remember(self, chain: PrefixChain, row: SpecRow, *, keys: Keys, begin_block: int) -> None:
        """``keys`` (``uint8[n, 32]``) are the blocks from ``begin_block`` on of ``row`` in ``chain``."""
        size = row.block_tokens
        with self._lock:
            for block, name in enumerate(names_of(keys), begin_block):
                begin, end = block * size, (block + 1) * size
                parent = chain.digest_at(begin) if begin else None
                entry = chain.digest_at(end), parent, begin, chain.token_ids(begin, end)
                self._known[row.name, name] = entry
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)

    def of(self, row_name: str, name: bytes) -> Origin | None:
        """The origin of an object (16 bytes of its key); None when it is not remembered, or never was."""
        entry = self._known.get((row_name, name))
        if entry is None:
            return None
        digest, parent, begin, ids = entry
        return Origin(digest, parent, begin, tuple(ids.tolist()))
