"""Segments: which slice of a row each rank of an engine holds, and which of equal holders writes it.

A segment names a slice (heads, units, context coordinate), never a rank: ranks that hold equal bytes name the
same one, and an engine that is cut in the same way finds it whatever else differs. Data-parallel replicas run
other requests on the same model, so they are no part of it.

How a row is cut: a pipeline stage holds the units of its own layers. Tensor parallelism deals the heads of an
``intersection`` row to its ranks in order, ``heads / ranks`` each, or one head to several neighbouring
ranks where there are more ranks than heads; an ``all_union`` row is whole on every rank. Context parallelism
deals the entries of a block out: among neighbouring tensor ranks that hold the same heads (decode context),
and among ranks of its own (prefill context). States are not dealt out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from ucm_core.errors import SpecError, shown
from ucm_core.spec.keys import Keys
from ucm_core.spec.rows import Part, RankRule, RowKind, SpecRow, as_tuple, is_count
from ucm_core.spec.table import SpecTable
from ucm_core.spec.units import stage_units

__all__ = [
    "Parallelism",
    "Rank",
    "Segment",
    "Share",
    "Slice",
    "segments_of",
    "slice_of",
    "slices_of",
    "writers",
]


@dataclass(frozen=True, slots=True)
class Segment:
    """Which slice of the model wrote the bytes.

    >>> Segment(heads=(0, 2), units=(0, 4)).name
    'h0-2.u0-4.c0-1'
    """

    heads: tuple[int, int] | None = None
    """Heads ``[begin, end)``; None = all of them."""
    units: tuple[int, int] = (0, 0)
    """Units ``[begin, end)`` of the row that this pipeline stage holds."""
    context: tuple[int, int] = (0, 1)
    """(coordinate, size) of context parallelism."""

    def __post_init__(self) -> None:
        """Raise SpecError for reversed ranges or a coordinate outside its size."""
        for name, span in (("heads", self.heads), ("units", self.units)):
            if span is not None and not 0 <= span[0] <= span[1]:
                raise SpecError(f"segment {name} [{span[0]}, {span[1]}) is no half-open range from 0")
        if not 0 <= self.context[0] < self.context[1]:
            raise SpecError(f"context coordinate {self.context[0]} is outside a context of {self.context[1]}")

    @property
    def name(self) -> str:
        """File-name safe and injective."""
        heads = "hx" if self.heads is None else f"h{self.heads[0]}-{self.heads[1]}"
        return f"{heads}.u{self.units[0]}-{self.units[1]}.c{self.context[0]}-{self.context[1]}"


@dataclass(frozen=True, slots=True)
class Rank:
    """Where one process stands in an engine."""

    tensor: int = 0
    """Tensor-parallel rank."""
    stage: int = 0
    """Pipeline stage."""
    prefill_context: int = 0
    """Prefill-context rank."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How an engine cuts the model over its ranks."""

    tensor: int = 1
    """Tensor-parallel ranks."""
    partition: tuple[int, ...] | None = None
    """The real layers per pipeline stage; None = one stage with all of them."""
    decode_context: int = 1
    """Decode-context ranks: they lie inside the tensor ranks and add none."""
    prefill_context: int = 1
    """Prefill-context ranks."""

    def __post_init__(self) -> None:
        """Raise SpecError for sizes that are no counts, or a decode context that does not fit."""
        if self.partition is not None:
            object.__setattr__(self, "partition", as_tuple(self.partition, "the partition"))
        for name in ("tensor", "decode_context", "prefill_context"):
            if not is_count(getattr(self, name)):
                raise SpecError(f"{name} = {shown(getattr(self, name))} ranks; at least 1")
        if self.tensor % self.decode_context:
            raise SpecError(
                f"decode_context = {self.decode_context} does not divide tensor = {self.tensor}: its ranks"
                f" lie inside the tensor ranks"
            )

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return 1 if self.partition is None else len(self.partition)

    @property
    def context(self) -> int:
        """Ranks that the entries of a block are dealt out to."""
        return self.decode_context * self.prefill_context

    def ranks(self) -> Iterator[Rank]:
        """Every rank, by stage, then prefill context, then tensor rank: the order in which engines count."""
        sizes = product(range(self.stages), range(self.prefill_context), range(self.tensor))
        return (Rank(tensor, stage, context) for stage, context, tensor in sizes)


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank holds of one row."""

    segment: Segment
    """Its name; ``segment.units[0]`` is the global number of shard 0."""
    row: SpecRow
    """The row as the rank holds it: its layers, its heads, and of a block's tokens those dealt to it."""
    replica: int
    """Which of the `replicas` ranks that hold equal bytes this is."""
    replicas: int
    """Ranks that hold equal bytes; one of them writes, see `writers`."""


def slice_of(row: SpecRow, parallel: Parallelism, *, rank: Rank) -> Slice | None:
    """What ``rank`` holds of ``row``; None where its stage has no layer of the row, or the row is not cached.

    ``row`` is that of the model's table: what `SpecTable.under_context` says follows from ``parallel``.
    Raises SpecError, with both numbers, for a rank outside ``parallel`` and for heads, states or entries that
    cannot be dealt out evenly.
    """
    _check_rank(parallel, rank)
    units = _units(row, parallel, rank.stage)
    if row.kind is RowKind.NONE or units[0] == units[1]:
        return None
    heads, copies = _heads(row, parallel.tensor, rank.tensor)
    held = _with_heads(row, heads)
    held = replace(held, units=row.units[units[0] : units[1]])
    copy = rank.tensor % copies  # which of the tensor ranks with these heads
    if row.kind is RowKind.SNAPSHOT:
        copy, copies = copy + copies * rank.prefill_context, copies * parallel.prefill_context
        return Slice(Segment(heads, units), held, copy, copies)
    replica, coordinate = divmod(copy, parallel.decode_context)
    if copies % parallel.decode_context:
        raise SpecError(
            f"row {row.name!r}: decode_context = {parallel.decode_context}, but {copies} of the"
            f" {parallel.tensor} tensor ranks hold the same heads"
        )
    coordinate += rank.prefill_context * parallel.decode_context
    segment = Segment(heads, units, (coordinate, parallel.context))
    return Slice(segment, _dealt(held, parallel.context), replica, copies // parallel.decode_context)


def slices_of(table: SpecTable, parallel: Parallelism, *, rank: Rank) -> dict[str, Slice]:
    """What ``rank`` holds, by row name; rows of which it holds nothing are left out. Raises as `slice_of`."""
    held = {row.name: slice_of(row, parallel, rank=rank) for row in table.rows}
    return {name: found for name, found in held.items() if found is not None}


def segments_of(row: SpecRow, parallel: Parallelism) -> dict[Segment, SpecRow]:
    """Every segment of ``row`` and the row as its holders hold it; a block is there when all of them are."""
    held = (slice_of(row, parallel, rank=rank) for rank in parallel.ranks())
    return {found.segment: found.row for found in held if found is not None}


@dataclass(frozen=True, slots=True)
class Share:
    """Which segments a process serves: those of one rank, to load and save them, or all, to ask for them."""

    parallel: Parallelism = field(default_factory=Parallelism)
    """How the engine is cut."""
    rank: Rank | None = None
    """One of its ranks; None = all of them, as the scheduler sees them."""

    def slices(self, row: SpecRow) -> tuple[Slice, ...]:
        """What it serves of ``row``: one slice per segment. Raises as `slice_of`."""
        if self.rank is None:
            return tuple(
                Slice(segment, held, 0, 1) for segment, held in segments_of(row, self.parallel).items()
            )
        held = slice_of(row, self.parallel, rank=self.rank)
        return () if held is None else (held,)


def writers(keys: Keys, replicas: int, *, failed: int = 0) -> npt.NDArray[np.int64]:
    """Which of ``replicas`` holders of equal bytes writes each object: ``int64[n]`` for ``uint8[n, 32]``.

    It is (id mod replicas), the id being the last 8 bytes of the object's name, little-endian; after
    ``failed`` of them could not, the next in turn. Every holder decides the same without a word.

    >>> writers(np.arange(64, dtype=np.uint8).reshape(2, 32), 4).tolist()
    [0, 0]
    """
    if not is_count(replicas):
        raise SpecError(f"{shown(replicas)} holders of equal bytes; at least 1")
    numbers = np.ascontiguousarray(keys[:, 8:16]).view("<u8")[:, 0]
    return ((numbers + np.uint64(failed)) % np.uint64(replicas)).astype(np.int64)


def _check_rank(parallel: Parallelism, rank: Rank) -> None:
    for name, place, size in (
        ("tensor", rank.tensor, parallel.tensor),
        ("stage", rank.stage, parallel.stages),
        ("prefill_context", rank.prefill_context, parallel.prefill_context),
    ):
        if not 0 <= place < size:
            raise SpecError(f"{name} rank {place} is outside of {size}")


def _units(row: SpecRow, parallel: Parallelism, stage: int) -> tuple[int, int]:
    if parallel.partition is None:
        return 0, len(row.units)
    held = stage_units(row.units, parallel.partition)[stage]
    return held.first_unit, held.first_unit + held.unit_count


def _heads(row: SpecRow, ranks: int, rank: int) -> tuple[tuple[int, int] | None, int]:
    """(heads of tensor rank ``rank``, tensor ranks that hold the same); None = all heads."""
    if row.rank_rule is RankRule.ALL_UNION or ranks == 1:
        return None, ranks
    count = head_count(row)
    share, copies = max(1, count // ranks), max(1, ranks // count)
    if (count % ranks and ranks % count) or (copies > 1 and row.kind is RowKind.SNAPSHOT):
        raise SpecError(f"row {row.name!r}: {count} heads cannot be dealt out evenly to {ranks} tensor ranks")
    begin = rank // copies * share
    return ((begin, begin + share) if share < count else None), copies


def head_count(row: SpecRow) -> int:
    """Heads that tensor parallelism deals out: of the first part; of a state's last, its recurrent matrix.

    A part's heads are its first axis, those of a convolution window ("conv") its channels, the last one.
    """
    part = row.parts[-1] if row.kind is RowKind.SNAPSHOT else row.parts[0]
    return part.shape[_head_axis(part)]


def _head_axis(part: Part) -> int:
    return len(part.shape) - 1 if part.name == "conv" else 0


def _with_heads(row: SpecRow, heads: tuple[int, int] | None) -> SpecRow:
    if heads is None:
        return row
    return replace(row, parts=tuple(_sliced(row, part, heads[1] - heads[0]) for part in row.parts))


def _sliced(row: SpecRow, part: Part, held: int) -> Part:
    axis, count = _head_axis(part), head_count(row)
    size, rest = divmod(part.shape[axis] * held, count)
    if rest:
        raise SpecError(
            f"row {row.name!r}, part {part.name!r}: {part.shape[axis]} cannot be cut into {count // held}"
            f" equal slices"
        )
    return replace(part, shape=(*part.shape[:axis], size, *part.shape[axis + 1 :]))


def _dealt(row: SpecRow, context: int) -> SpecRow:
    """The row with the entries that one of ``context`` ranks holds of each block."""
    if context == 1:
        return row
    for part in row.parts:
        if row.part_entries(part) % context:
            raise SpecError(
                f"row {row.name!r}, part {part.name!r}: {row.part_entries(part)} entries a block cannot be"
                f" dealt out evenly to {context} context ranks"
            )
    return replace(row, block_tokens=row.block_tokens // context)
