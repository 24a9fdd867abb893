"""The snapshot store: recurrent states, each whole and each usable at one position only.

A state is stored as one object of the row: one shard per unit, in it the row's parts in the row's order,
without padding. The row fixes the part list; whoever puts or gets a state names every part, with its exact
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.errors import LayoutError, SpecError
from ucm_core.flow.copy import BufferBlocks, Span
from ucm_core.flow.ticket import Ticket
from ucm_core.spec.keys import Keys
from ucm_core.spec.table import RowKind, SpecRow
from ucm_core.store.absent import ObjectStore
from ucm_core.store.arrays import Int64s, Mask
from ucm_core.store.donation import Donation

State = Mapping[str, npt.NDArray[np.generic]]
"""A state: for every part of the row a C-contiguous array of ``units`` times the part's bytes, any dtype."""


class SnapshotStore:
    """States of one snapshot row over its block store.

    ``get`` copies, so what it returned can be changed without changing what is stored; ``put`` copies before
    it returns, so the source can be changed as well; ``reserve`` hands out memory for a donation and takes it
    away at commit.
    """

    def __init__(self, row: SpecRow, blocks: ObjectStore) -> None:
        if row.kind is not RowKind.SNAPSHOT:
            raise SpecError(
                f"row {row.name} is of kind {row.kind.name}; a snapshot store takes SNAPSHOT rows"
            )
        self.blocks = blocks
        """The objects behind the states, for copies by engine layout."""
        self._fields = _fields(row)
        self._units = blocks.geometry.shards

    def put(self, key: Keys, state: State) -> Ticket:
        """Keep ``state`` under ``key`` (``uint8[32]``); a present one stays as it is.

        Raises `ucm_core.LayoutError` for a missing, extra or wrong-size part, before anything is stored.
        """
        return self.blocks.save(key[None], _StateCopy(self._fields, self._checked(state)))

    def get(self, key: Keys, out: State) -> Ticket:
        """Fill every part of ``out`` with the state under ``key``; use it when the ticket is ``ok``.

        Raises `ucm_core.LayoutError` as `put` does, and for a part that is read-only.
        """
        parts = self._checked(out)
        for name, part in parts.items():
            if not part.flags.writeable:
                raise LayoutError(f"part {name!r} is read-only; a state is copied into it")
        return self.blocks.load(key[None], _StateCopy(self._fields, parts))

    def exists(self, keys: Keys) -> Mask:
        """``bool[n]``: which of the states ``uint8[n, 32]`` are stored."""
        return self.blocks.lookup(keys)

    def names(self) -> Iterator[Keys]:
        """Names of the states on the medium; see `ucm_core.store.block.BlockStore.names`."""
        return self.blocks.names()

    def drop(self, keys: Keys) -> None:
        """Remove states."""
        self.blocks.drop(keys)

    def reserve(self, key: Keys) -> StateDonation | None:
        """Memory to write a state into, zero-copy; None when it is stored already.

        Raises `ucm_core.NoSpace` when the ring has no slot to give.
        """
        donation = self.blocks.reserve(key)
        return None if donation is None else StateDonation(donation, self._fields, units=self._units)

    def _checked(self, state: State) -> dict[str, npt.NDArray[np.uint8]]:
        expected = {field.name: self._units * field.size_bytes for field in self._fields}
        for name in sorted(state.keys() | expected.keys()):
            have = _bytes_of(state[name]) if name in state else "nothing"
            need = f"{expected[name]} bytes" if name in expected else "no such part"
            if have != need:
                raise LayoutError(f"part {name!r}: the state has {have}, the row needs {need}")
        return {name: _as_bytes(name, part, self._units) for name, part in state.items()}


class StateDonation:
    """A state that is written in place (`ucm_core.store.donation.Donation` by part instead of by shard)."""

    def __init__(self, donation: Donation, fields: tuple[_Field, ...], *, units: int) -> None:
        self._donation = donation
        self._fields = {field.name: field for field in fields}
        # What nobody asked for still holds bytes of whatever lay there before.
        self._unwritten = {(unit, field.name) for unit in range(units) for field in fields}

    def part(self, name: str, unit: int = 0) -> memoryview:
        """Writable bytes of one part of one unit; raises ``ValueError`` when used after commit or abort."""
        if name not in self._fields:
            raise LayoutError(f"part {name!r}: no such part; the row has {', '.join(self._fields)}")
        field = self._fields[name]
        view = self._donation.view(unit, begin=field.begin, end=field.end)
        self._unwritten.discard((unit, name))
        return view

    def commit(self) -> Ticket:
        """Store the state; every part of every unit must have been written. See `Donation.commit`.

        Raises `ucm_core.LayoutError` naming the first part that was never asked for; nothing is stored then.
        """
        if self._unwritten:
            unit, name = min(self._unwritten)
            raise LayoutError(
                f"part {name!r} of unit {unit} was never written, and {len(self._unwritten) - 1} more parts;"
                " write every part before commit, or abort"
            )
        return self._donation.commit()

    def abort(self) -> None:
        """Give the memory back; nothing becomes readable."""
        self._donation.abort()


@dataclass(frozen=True, slots=True)
class _Field:
    """Bytes ``[begin, end)`` of every unit."""

    name: str
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


class _StateCopy:
    """One state as source and target: each part is copied as an array ``[1, units, part bytes]``."""

    def __init__(self, fields: tuple[_Field, ...], parts: Mapping[str, npt.NDArray[np.uint8]]) -> None:
        unit_bytes = fields[-1].end
        self._copies = [
            BufferBlocks(parts[field.name][None], offset=field.begin, unit_bytes=unit_bytes)
            for field in fields
        ]

    def gather(self, index: Int64s, address: Int64s, *, span: Span | None = None) -> None:
        for copy in self._copies:
            copy.gather(index, address, span=span)

    def scatter(self, index: Int64s, address: Int64s, *, span: Span | None = None) -> None:
        for copy in self._copies:
            copy.scatter(index, address, span=span)


def _fields(row: SpecRow) -> tuple[_Field, ...]:
    fields, begin = [], 0
    for part in row.parts:
        end = begin + row.part_bytes(part)
        fields.append(_Field(part.name, begin, end))
        begin = end
    return tuple(fields)


def _bytes_of(part: object) -> str:
    if isinstance(part, np.ndarray) and not part.dtype.hasobject:
        return f"{part.nbytes} bytes"
    return f"a {type(part).__name__} that is no array of bytes"


def _as_bytes(name: str, part: npt.NDArray[np.generic], units: int) -> npt.NDArray[np.uint8]:
    if not part.flags.c_contiguous:
        raise LayoutError(f"part {name!r} has strides {part.strides}; it must be C-contiguous")
    return part.reshape(-1).view(np.uint8).reshape(units, -1)
