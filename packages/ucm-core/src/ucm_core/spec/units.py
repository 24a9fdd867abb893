"""From layers to units, shards and segments: prefix sums over the real pipeline partition.

A unit is what one access fetches; its number counts over the row's own layers of all stages. A segment names
a slice of the model (heads, units, context-parallel coordinate), never a rank: ranks that hold equal bytes
name the same one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ucm_core.errors import SpecError
from ucm_core.spec.table import RowKind, SpecTable

__all__ = ["Segment", "StageUnits", "UnitMap", "stage_ranges", "stage_units"]

Unit = tuple[str, int]
"""(row name, unit number)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Which slice of the model wrote the bytes.

    >>> Segment(heads=(0, 2), units=(0, 4)).name
    'h0-2.u0-4.c0-1'
    """

    heads: tuple[int, int] | None = None
    """Heads ``[begin, end)``; None where tensor parallelism replicates the row."""
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
class StageUnits:
    """The units of one row that one pipeline stage holds."""

    first_layer: int
    """First global layer of the stage."""
    unit_count: int
    """Units of the row in this stage."""
    first_unit: int
    """Global number of the first of them."""


def stage_ranges(partition: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the layers ``[begin, end)`` of each stage of the real ``partition`` (layers per stage).

    >>> stage_ranges([50, 46])
    ((0, 50), (50, 96))
    """
    if not partition or min(partition) < 0:
        raise SpecError(f"a partition is layers per stage, got {list(partition)}")
    ends = tuple(accumulate(partition))
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def stage_units(row_layers: Sequence[int], partition: Sequence[int]) -> tuple[StageUnits, ...]:
    """Return what each stage holds of a row with the ascending global ``row_layers``."""
    ranges = stage_ranges(partition)
    if row_layers and row_layers[-1] >= ranges[-1][1]:
        raise SpecError(f"layer {row_layers[-1]} is past the partition's {ranges[-1][1]} layers")
    spans = ((begin, bisect_left(row_layers, begin), bisect_left(row_layers, end)) for begin, end in ranges)
    return tuple(StageUnits(begin, last - first, first) for begin, first, last in spans)


class UnitMap:
    """Which units to wait for before a layer and to save after it; read-only.

    ``shared`` lists tensors that several layers of a row share, as (row name, layers): such a tensor is
    awaited before its first layer and saved once, after its last. ``follows`` maps a layer without a unit of
    its own to the layer whose bytes it reads: waiting for it waits for that unit, and it saves nothing.
    """

    def __init__(
        self,
        table: SpecTable,
        partition: Sequence[int] | None = None,
        *,
        shared: Sequence[tuple[str, Sequence[int]]] = (),
        follows: Mapping[int, int] | None = None,
    ) -> None:
        """Build the map; SpecError when a layer is claimed in two contradicting ways."""
        self.table = table
        self._units = _units_by_layer(table)
        self._await = dict(self._units)
        self._save = dict(self._units)
        self._shared: set[Unit] = set()
        self._stages = (
            {} if partition is None else {row.name: stage_units(row.units, partition) for row in table.rows}
        )
        for row_name, layers in shared:
            self._share(row_name, tuple(layers))
        for layer, source in (follows or {}).items():
            self._follow(layer, source)

    def units_of(self, layer: int) -> tuple[Unit, ...]:
        """Return the units that ``layer`` owns, one per row that contains it."""
        return self._units.get(layer, ())

    def await_before(self, layer: int) -> tuple[Unit, ...]:
        """Return the units that must have landed before ``layer`` computes and are not awaited earlier."""
        return self._await.get(layer, ())

    def save_after(self, layer: int) -> tuple[Unit, ...]:
        """Return the units whose bytes are final once ``layer`` has computed."""
        return self._save.get(layer, ())

    def stage(self, row_name: str, stage: int) -> StageUnits:
        """Return what pipeline ``stage`` holds of a row; SpecError without a partition or past its end."""
        stages = self._stages.get(row_name, ())
        if not 0 <= stage < len(stages):
            raise SpecError(f"row {row_name!r} has {len(stages)} stages here, asked for stage {stage}")
        return stages[stage]

    def _share(self, row_name: str, layers: tuple[int, ...]) -> None:
        units = self.table.row(row_name).units
        missing = [layer for layer in layers if layer not in units]
        if missing or len(layers) < 2 or list(layers) != sorted(set(layers)):
            raise SpecError(
                f"row {row_name!r}: a shared tensor needs ascending layers of the row, got {layers}"
            )
        whole = tuple((row_name, units.index(layer)) for layer in layers)
        if not self._shared.isdisjoint(whole):
            raise SpecError(f"row {row_name!r}: a layer of {layers} is in two shared tensors")
        self._shared.update(whole)
        for layer in layers:
            self._await[layer] = _without(self._await[layer], whole)
            self._save[layer] = _without(self._save[layer], whole)
        self._await[layers[0]] += whole
        self._save[layers[-1]] += whole

    def _follow(self, layer: int, source: int) -> None:
        if layer in self._units:
            raise SpecError(
                f"layer {layer} follows layer {source} but has units {self._units[layer]} of its own"
            )
        if source not in self._units:
            raise SpecError(f"layer {layer} follows layer {source}, which has no unit")
        self._await[layer] = self._units[source]


def _units_by_layer(table: SpecTable) -> dict[int, tuple[Unit, ...]]:
    owned: dict[int, tuple[Unit, ...]] = {}
    for row in (row for row in table.rows if row.kind is not RowKind.NONE):
        for number, layer in enumerate(row.units):
            owned[layer] = (*owned.get(layer, ()), (row.name, number))
    return owned


def _without(units: tuple[Unit, ...], removed: tuple[Unit, ...]) -> tuple[Unit, ...]:
    return tuple(unit for unit in units if unit not in removed)
