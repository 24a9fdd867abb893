"""Engine blocks that a failed synchronous load left with garbage, until somebody writes them again.

vLLM shares blocks of equal prefixes between requests, also while one of them is still loading them. When that
load fails, vLLM makes one request compute them again and lets the others count on that. That one may be
preempted or aborted before it has, or have computed only some of them when the others go on. So every step is
looked at by itself: who reads garbage in it is named, whoever was to write it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ucm_vllm.block_tables import NULL_PAGE


@dataclass(frozen=True, slots=True)
class PageUse:
    """One request in one step: of its tokens it reads ``[0, begin)`` and writes ``[begin, end)``.

    Drafted tokens are among those: what stays of them is read by the next step, the rest is written again.
    """

    request_id: str
    tables: Sequence[Sequence[int]]
    """Per engine group its blocks, in order of tokens."""
    begin_tokens: int
    end_tokens: int

    def read(self, page_tokens: int) -> Sequence[int]:
        """Blocks of the first group that hold any token it reads."""
        return self.tables[0][: -(-self.begin_tokens // page_tokens)]

    def written(self, page_tokens: int) -> Sequence[int]:
        """Blocks of the first group that hold any token it writes."""
        return self.tables[0][self.begin_tokens // page_tokens : -(-self.end_tokens // page_tokens)]


class BrokenPages:
    """Garbage blocks of the only engine group (loads of several groups fail by request instead)."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        """Tokens of one engine block."""
        self._sound: dict[int, int] = {}  # per broken page the tokens at its beginning that are right again
        self._step: list[PageUse] = []

    def __len__(self) -> int:
        return len(self._sound)

    @property
    def pages(self) -> frozenset[int]:
        """All that hold garbage now."""
        return frozenset(self._sound)

    def renew(self, table: Sequence[int], *, local_tokens: int) -> None:
        """VLLM gave ``table`` to a request that shares ``[0, local_tokens)``; who had the rest is gone."""
        for page in table[-(-local_tokens // self.page_tokens) :]:
            self._sound.pop(page, None)

    def begin_step(self, uses: Iterable[PageUse]) -> dict[str, frozenset[int]]:
        """By request the pages that it would read as garbage; who reads none heals what it writes.

        A step may read what it writes: each layer writes all of its tokens before it reads any.
        """
        # who writes a token begins at or before it, who reads it after it
        self._step = sorted(uses, key=lambda use: use.begin_tokens)
        return {use.request_id: garbage for use in self._step if (garbage := self._run(use))}

    def fail(self, pages: Collection[int]) -> None:
        """``pages`` could not be filled in the last step, so what was computed on them is garbage too."""
        self._sound |= dict.fromkeys(self._downstream(pages) | frozenset(pages), 0)

    def exposed(self, pages: Collection[int]) -> frozenset[int]:
        """Blocks that the last step computes from ``pages``, directly or not, and that others read in it."""
        computed = self._downstream(pages)
        read = (computed.intersection(use.read(self.page_tokens)) for use in self._step if computed)
        return frozenset().union(*read)

    def _downstream(self, pages: Collection[int]) -> frozenset[int]:
        garbage = set(pages)
        for use in self._step if pages else ():
            if not garbage.isdisjoint(use.read(self.page_tokens)):
                garbage.update(use.written(self.page_tokens))
        return frozenset(garbage - {NULL_PAGE, *pages})

    def _run(self, use: PageUse) -> frozenset[int]:
        if not self._sound:
            return frozenset()
        garbage = frozenset(self._garbage(use))
        for index, page in enumerate(use.written(self.page_tokens), use.begin_tokens // self.page_tokens):
            begin = index * self.page_tokens
            kept = max(0, use.begin_tokens - begin)
            if garbage:
                self._sound[page] = min(self._sound.get(page, kept), kept)
            elif page in self._sound:
                self._heal(page, kept, use.end_tokens - begin)
        return garbage

    def _garbage(self, use: PageUse) -> Iterator[int]:
        for index, page in enumerate(use.read(self.page_tokens)):
            needed = min(self.page_tokens, use.begin_tokens - index * self.page_tokens)
            if self._sound.get(page, needed) < needed:
                yield page

    def _heal(self, page: int, begin: int, end: int) -> None:
        """Tokens ``[begin, end)`` of ``page`` are right, and those before if the page was not begun anew."""
        known = self._sound.pop(page)
        right = max(end, known if begin else 0)
        if right < self.page_tokens:
            self._sound[page] = right
