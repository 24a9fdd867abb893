"""Pages of one group: page 0 is the null page, all others are free, held, or kept until a copy has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ucm_core.errors import StoreError
from ucm_core.spec.layout import ABSENT_PAGE

__all__ = ["PagePool"]


class PagePool:
    """Hands out page numbers of one group, the longest unused first. For one thread.

    >>> pool = PagePool(4)
    >>> pool.take(2), pool.free_count, pool.take(2)
    ([1, 2], 1, None)
    """

    def __init__(self, pages: int) -> None:
        """All pages but the null page are free."""
        self.pages = pages
        """Pages that the memory has, the null page included."""
        self._free = deque(range(ABSENT_PAGE + 1, pages))
        self._held: set[int] = set()

    @property
    def free_count(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def held_count(self) -> int:
        """Pages that somebody has."""
        return len(self._held)

    def take(self, count: int) -> list[int] | None:
        """Take ``count`` pages; None, and nothing is taken, when there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self._held.update(taken)
        return taken

    def give_back(self, pages: Iterable[int]) -> None:
        """Free pages, each once; the null page is nobody's. StoreError for a page that nobody holds."""
        for page in pages:
            if page == ABSENT_PAGE:
                continue
            if page not in self._held:
                raise StoreError(f"page {page} was given back and nobody holds it; each page is freed once")
            self._held.discard(page)
            self._free.append(page)
