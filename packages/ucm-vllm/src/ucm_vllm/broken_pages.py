"""Engine blocks that a failed synchronous load left with garbage, until somebody writes them again.

vLLM shares blocks of equal prefixes between requests, also while one of them is still loading them. When that
load fails, vLLM makes its owner compute the blocks again; a request that merely shares them goes on, and what
it computed meanwhile must not be stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucm_vllm.block_tables import NULL_PAGE
from ucm_vllm.request_records import RequestRecord


class BrokenPages:
    """Garbage blocks of the only engine group (loads of several groups fail by request instead)."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        """Tokens of one engine block."""
        self._pages: set[int] = set()

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> frozenset[int]:
        """All that hold garbage now."""
        return frozenset(self._pages)

    def add(self, pages: frozenset[int], tables: Sequence[Sequence[int]]) -> None:
        """``pages`` failed, and for each table of that step whatever it names after the first of them."""
        if not pages:
            return
        self._pages |= pages
        for table in tables:
            self._taint(table)

    def review(self, record: RequestRecord, table: Sequence[int], *, end_tokens: int) -> None:
        """``record`` is computed up to ``end_tokens``: what it writes heals, what it borrowed taints it."""
        if not self._pages:
            return
        broken = [index for index, page in enumerate(table) if page in self._pages]
        if any(index * self.page_tokens < record.local_tokens for index in broken):
            record.trusted = False
        if not record.trusted:
            self._taint(table)  # what it writes is computed on garbage, and others may share it
            return
        healed = (index for index in broken if (index + 1) * self.page_tokens <= end_tokens)
        self._pages.difference_update([table[index] for index in healed])

    def _taint(self, table: Sequence[int]) -> None:
        first = next((index for index, page in enumerate(table) if page in self._pages), len(table))
        self._pages.update(page for page in table[first:] if page != NULL_PAGE)
