"""Paged memory of one row on one rank, as an engine has it, and what it tells the cache about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.flow.copy import EngineBlocks
from ucm_core.spec.layout import ABSENT_PAGE, EngineLayout, PartLayout, block_pieces, in_entries
from ucm_core.spec.rows import RowKind
from ucm_core.spec.segments import Slice
from ucm_core.store.geometry import Geometry
from ucm_core.testing.engine.model import Digests, Origin, content
from ucm_core.testing.engine.work import Copy

__all__ = ["Cells", "PagedMemory"]

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

GARBAGE = 0xEE
"""What freed pages are filled with: whoever still reads them is found out."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Where entries lie and which bytes belong there."""

    pages: Int64s
    """Page of each entry, ``int64[n]``."""
    places: Int64s
    """Entry within its page, ``int64[n]``."""
    digests: Digests
    """Digest of the prefix that ends with each entry's last token, ``uint64[n]``."""


class PagedMemory:
    """All pages of one row on one rank: ``uint8[units, pages, entries, entry_bytes]``, parts side by side.

    ``pages`` counts the null page. A page of a chain row holds ``page_tokens`` tokens of all context ranks,
    of a snapshot row one state.
    """

    def __init__(self, held: Slice, *, pages: int, page_tokens: int) -> None:
        self.slice = held
        """What this rank holds of the row."""
        self.row = held.row
        """The row as this rank holds it."""
        self.state = self.row.kind is RowKind.SNAPSHOT
        """Whether a page is a state."""
        self.entry_tokens = 1 if self.state else self.row.parts[0].tokens_per_entry
        """Tokens that one entry stands for; of all parts."""
        self._page_tokens = 1 if self.state else page_tokens // held.segment.context[1]
        self._page_entries = self._page_tokens // self.entry_tokens
        self._entry_bytes = sum(part.entry_bytes for part in self.row.parts)
        self._origins = {layer: Origin(self.row.name, layer, held.segment.heads) for layer in self.row.units}
        self._unit = {layer: unit for unit, layer in enumerate(self.row.units)}
        shape = (len(self.row.units), pages, self._page_entries, self._entry_bytes)
        self._memory = np.full(shape, GARBAGE, dtype=np.uint8)
        self._layout = _Layout(EngineLayout(self._page_tokens, self._part_layouts()).table)

    def cells(self, table: Sequence[int], digests: Digests, *, begin: int, end: int) -> Cells:
        """The entries of this rank whose last token is in ``[begin, end)`` of a request.

        ``table[k]`` is the page of the tokens ``[k, k + 1) x page_tokens`` of all ranks.
        """
        coordinate, size = self.slice.segment.context
        # entry e of this rank is entry e x size + coordinate of all ranks, and ends where that one ends
        first, last = (-(-(at // self.entry_tokens - coordinate) // size) for at in (begin, end))
        entries = np.arange(max(first, 0), max(last, 0), dtype=np.int64)
        ends = (entries * size + coordinate + 1) * self.entry_tokens
        pages = np.array(table, dtype=np.int64)[entries // self._page_entries]
        return Cells(pages, entries % self._page_entries, digests[ends - 1])

    def state_cells(self, pages: Sequence[int], digests: Digests) -> Cells:
        """States in these pages, at the positions of ``digests``."""
        return Cells(np.array(pages, dtype=np.int64), np.zeros(len(pages), dtype=np.int64), digests)

    def write(self, layer: int, cells: Cells, *, spoil: int = 0) -> None:
        """Compute ``layer``: the right bytes to all cells; ``spoil`` changes every one of them."""
        right = self._right(layer, cells)
        self._memory[self._unit[layer], cells.pages, cells.places] = (
            right ^ np.uint8(spoil) if spoil else right
        )

    def wrong(self, layer: int, cells: Cells) -> int:
        """Read all cells of ``layer``; how many do not hold what they must, null pages included."""
        found = self._memory[self._unit[layer], cells.pages, cells.places]
        same = (found == self._right(layer, cells)).all(axis=1) & (cells.pages != ABSENT_PAGE)
        return len(same) - int(np.count_nonzero(same))

    def spoil(self, pages: Sequence[int]) -> None:
        """Fill pages that were given back with garbage."""
        self._memory[:, pages] = GARBAGE

    def blocks(self, copy: Copy, row: str) -> EngineBlocks:
        """Where the objects of ``copy`` lie: source and target for the cache."""
        pages, numbers = copy.pages[row], np.array(copy.blocks[row], dtype=np.int64)
        # states count as blocks of one token each, in pages of their own
        tokens = 1 if self.state else self.row.block_tokens
        begins = np.arange(len(numbers)) if self.state else numbers * tokens
        pieces = block_pieces(begins, tokens, page_ids=pages, page_tokens=self._page_tokens)
        return EngineBlocks([self._layout], in_entries(pieces, self.entry_tokens))

    def _right(self, layer: int, cells: Cells) -> Bytes:
        return content(cells.digests, self._origins[layer], self._entry_bytes)

    def _part_layouts(self) -> tuple[PartLayout, ...]:
        """Each part of each unit: a head of bytes, one after the other in the entry, apart in the payload."""
        stride, layouts = Geometry.of_row(self.row).stride, []
        unit_stride, page_stride, entry_stride, _ = self._memory.strides
        for unit in range(len(self.row.units)):
            base, offset = self._memory.ctypes.data + unit * unit_stride, unit * stride
            for part in self.row.parts:
                size = part.entry_bytes
                layouts.append(
                    PartLayout(base, page_stride, entry_stride, size, 1, 1, size, 1, canonical_offset=offset)
                )
                base, offset = base + size, offset + self.row.part_bytes(part)
        return tuple(layouts)


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """An `EngineLayout` that was made once, for every copy."""

    table: Int64s
