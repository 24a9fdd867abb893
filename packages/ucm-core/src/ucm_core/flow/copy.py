"""Copies between memory that somebody owns and payloads in the store.

A store asks a `BlockSource` for bytes and hands bytes to a `BlockTarget`; both speak of objects by their
index in the batch and of payloads by address. The two here cover plain arrays (`BufferBlocks`) and an
engine's paged memory (`EngineBlocks`); both end in one strided native copy with the GIL released.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.errors import LayoutError

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

Strides = list[tuple[Int64s, Int64s]]
"""Parts ``int64[p, 9]`` and pieces ``int64[n, 5]`` of each layout, as the native copies take them."""

PAGE_BYTES = 4096
_CANONICAL_OFFSET = 8  # the column of a part that says where it begins in a payload

Span = tuple[int, int]
"""Bytes ``[begin, end)`` of a payload: whole shards."""


class BlockSource(Protocol):
    """Where the payloads of a save come from."""

    def gather(self, index: Int64s, address: Int64s, *, span: Span | None = None) -> None:
        """Write the payload of object ``index[i]`` of the batch to the memory at ``address[i]``.

        With ``span`` only those bytes of each payload; only they may be written then. Returns when the bytes
        are there; may be called on any thread, several times, in any order, and more than once for one
        object. Must not keep an address after returning. What it raises makes the objects ``INVALID``.
        """


class BlockTarget(Protocol):
    """Where the payloads of a load go."""

    def scatter(self, index: Int64s, address: Int64s, *, span: Span | None = None) -> None:
        """Copy the payload at ``address[i]`` to where object ``index[i]`` of the batch belongs.

        Same terms as `BlockSource.gather`; of a payload only ``span`` can be read. It is never called for
        what failed.
        """


class EngineBlocks:
    """Engine memory as source and target: one layout and its pieces per engine group of the row.

    ``pieces`` are rows of ``(payload_index, token_in_block, page_id, token_in_page, token_count)``, as
    `ucm_core.spec.layout.EngineLayout.pieces` makes them; ``payload_index`` is the object's index in the
    batch. One array serves all layouts, or each layout has its own. The caller keeps the engine's tensors
    alive until the ticket is done; ``block_tokens`` lets `gather` refuse an object that its pieces do not
    cover.
    """

    def __init__(
        self,
        layouts: Sequence[_Layout],
        pieces: Int64s | Sequence[Int64s],
        *,
        block_tokens: int | None = None,
    ) -> None:
        each = [pieces] * len(layouts) if isinstance(pieces, np.ndarray) else list(pieces)
        if len(each) != len(layouts):
            raise LayoutError(f"{len(layouts)} layouts but {len(each)} arrays of pieces; give one for each")
        self._groups = [
            (_Parts(layout.table), _Pieces(part)) for layout, part in zip(layouts, each, strict=True)
        ]
        self._block_tokens = block_tokens

    def gather(self, index: Int64s, address: Int64s, *, span: Span | None = None) -> None:
        """Copy out of the engine; see `BlockSource.gather`."""
        for table, pieces in self.strides(index, span, written=False):
            _native.gather(table, pieces, address)

    def scatter(self, index: Int64s, address: Int64s, *, span: Span | None = None) -> None:
        """Copy into the engine; see `BlockTarget.scatter`."""
        for table, pieces in self.strides(index, span, written=True):
            _native.scatter(table, pieces, address)

    def strides(self, index: Int64s | None, span: Span | None = None, *, written: bool) -> Strides:
        """As `strides_of`, of ``span`` only where one is given."""
        found = [(parts.of(span), pieces.of(index)) for parts, pieces in self._groups]
        if not written and index is not None:
            for _, pieces in found:
                self._check_cover(pieces, index)
        return found

    def _check_cover(self, pieces: Int64s, index: Int64s) -> None:
        if self._block_tokens is None:
            return
        tokens = np.bincount(pieces[:, 0], weights=pieces[:, 4], minlength=len(index))
        short = np.flatnonzero(tokens != self._block_tokens)
        if short.size:
            raise LayoutError(
                f"the pieces of object {int(index[short[0]])} cover {int(tokens[short[0]])} tokens"
                f" of a block of {self._block_tokens}"
            )


class BufferBlocks:
    """An array ``uint8[objects, shards, shard_bytes]`` as source and target, its last axis contiguous.

    The array must be writable to be a target. Shard ``k`` of a payload begins at ``k`` times the unit's bytes
    rounded up to whole pages; the padding is the store's. A unit is ``shard_bytes`` long unless
    ``unit_bytes`` says that it is longer; the array is then the part of every unit that begins at ``offset``.

    >>> import numpy as np
    >>> blocks = BufferBlocks(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    >>> blocks.stride
    4096
    """

    def __init__(self, payloads: Bytes, *, offset: int = 0, unit_bytes: int | None = None) -> None:
        if payloads.dtype != np.uint8 or payloads.ndim != 3:
            raise LayoutError(
                f"payloads {payloads.dtype}{list(payloads.shape)}: need uint8[objects, shards, shard_bytes]"
            )
        if payloads.size and payloads.strides[2] != 1:
            raise LayoutError(f"the last axis has a stride of {payloads.strides[2]} bytes; it must be 1")
        self.payloads = payloads
        unit_bytes = payloads.shape[2] if unit_bytes is None else unit_bytes
        if not 0 <= offset <= unit_bytes - payloads.shape[2]:
            raise LayoutError(
                f"{payloads.shape[2]} bytes at {offset} do not fit a unit of {unit_bytes} bytes"
            )
        self.stride = -(-unit_bytes // PAGE_BYTES) * PAGE_BYTES
        self._parts = _Parts(self._layout(offset))

    def gather(self, index: Int64s, address: Int64s, *, span: Span | None = None) -> None:
        """Copy out of the array; see `BlockSource.gather`."""
        ((table, pieces),) = self.strides(index, span, written=False)
        _native.gather(table, pieces, address)

    def scatter(self, index: Int64s, address: Int64s, *, span: Span | None = None) -> None:
        """Copy into the array; see `BlockTarget.scatter`."""
        ((table, pieces),) = self.strides(index, span, written=True)
        _native.scatter(table, pieces, address)

    def strides(self, index: Int64s | None, span: Span | None = None, *, written: bool) -> Strides:
        """As `strides_of`, of ``span`` only where one is given."""
        if written and not self.payloads.flags.writeable:
            raise LayoutError("the array is read-only; a target must be writable")
        return [(self._parts.of(span), self._pieces(index))]

    def _layout(self, offset: int) -> Int64s:
        """One part per shard; an object is a page of one token, a shard one head of ``shard_bytes`` items."""
        _, shards, shard_bytes = self.payloads.shape
        page, shard, _ = self.payloads.strides
        base = self.payloads.ctypes.data
        rows = [
            (base + k * shard, page, shard_bytes, shard_bytes, 1, 1, shard_bytes, 1, k * self.stride + offset)
            for k in range(shards)
        ]
        return np.array(rows, dtype=np.int64).reshape(shards, 9)

    def _pieces(self, index: Int64s | None) -> Int64s:
        objects = self.payloads.shape[0]
        if index is None:
            return _in_order(objects)
        if len(index) and (index.min() < 0 or index.max() >= objects):
            raise LayoutError(f"object {int(index.max())} of an array that holds {objects}")
        pieces = _in_order(len(index)).copy()
        pieces[:, 2] = index
        return pieces


class _Layout(Protocol):
    """What `EngineBlocks` needs of an engine layout: its parts as ``int64[parts, 9]``."""

    @property
    def table(self) -> Int64s: ...


class _Parts:
    """Parts of a layout, and those of them that lie in some shards."""

    def __init__(self, table: Int64s) -> None:
        self._table = table
        self._of: dict[Span, Int64s] = {}

    def of(self, span: Span | None) -> Int64s:
        """The parts whose bytes in a payload begin in ``span``."""
        if span is None:
            return self._table
        found = self._of.get(span)
        if found is None:
            offset = self._table[:, _CANONICAL_OFFSET]
            found = self._of[span] = self._table[(span[0] <= offset) & (offset < span[1])]
        return found


class _Pieces:
    """Pieces sorted by object, so that any selection of objects is a few slices."""

    def __init__(self, pieces: Int64s) -> None:
        order = np.argsort(pieces[:, 0], kind="stable")
        self._sorted = np.ascontiguousarray(pieces[order])

    def of(self, index: Int64s | None) -> Int64s:
        """The pieces of ``index[i]``, renumbered to payload ``i``; None = all, and their own numbers."""
        if index is None:
            return self._sorted
        first = int(index[0]) if len(index) else 0
        if np.array_equal(index, np.arange(first, first + len(index))):  # most often
            begin, end = np.searchsorted(self._sorted[:, 0], (first, first + len(index)))
            together: Int64s = self._sorted[begin:end]
            return together - (first, 0, 0, 0, 0) if first else together
        begins = np.searchsorted(self._sorted[:, 0], index, side="left")
        count = np.searchsorted(self._sorted[:, 0], index, side="right") - begins
        # object i has the rows [begins[i], begins[i] + count[i]); all of them flattened: begins plus a
        # running offset
        offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        selected: Int64s = self._sorted[np.repeat(begins, count) + offset]
        selected[:, 0] = np.repeat(np.arange(len(index)), count)
        return selected


def strides_of(
    blocks: BlockSource | BlockTarget | None, index: Int64s | None, *, written: bool
) -> Strides | None:
    """How objects ``index`` lie in memory, so that a ring can copy them without asking again.

    Object ``index[i]`` is payload ``i`` there. None: all objects, object ``i`` payload ``i``; whether memory
    covers them is then not asked. ``written``: as a target. The result is None where only ``blocks`` itself
    can copy: of a class that is not of this module, also a derived one, nothing is known.
    """
    if type(blocks) is BufferBlocks or type(blocks) is EngineBlocks:
        return blocks.strides(index, written=written)
    return None


_ORDER = np.zeros((4096, 5), dtype=np.int64)
_ORDER[:, 0] = _ORDER[:, 2] = np.arange(len(_ORDER))
_ORDER[:, 4] = 1
_ORDER.flags.writeable = False


def _in_order(count: int) -> Int64s:
    """Pieces of ``count`` objects, each one page of one token; not to be written to."""
    if count <= len(_ORDER):
        return _ORDER[:count]
    pieces = np.zeros((count, 5), dtype=np.int64)
    pieces[:, 0] = pieces[:, 2] = np.arange(count)
    pieces[:, 4] = 1
    return pieces
