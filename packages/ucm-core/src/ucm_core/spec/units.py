"""From layers to units and shards: prefix sums over the real pipeline partition.

A unit is what one access fetches; its number counts over the row's own layers of all stages. A row of a
window has the units of any other row: the window says which blocks a boundary needs, not what one access is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ucm_core.errors import SpecError
from ucm_core.spec.table import RowKind, SpecTable

__all__ = ["StageUnits", "UnitMap", "stage_ranges", "stage_units"]

Unit = tuple[str, int]
"""(row name, unit number)."""


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
        """Build the map; SpecError when a layer is claimed in two contradicting ways.

        With a ``partition`` also where layers of two stages share or follow: the bytes are not there.
        """
        self.table = table
        self._ranges = () if partition is None else stage_ranges(partition)
        self._units = _units_by_layer(table)
        self._await = dict(self._units)
        self._save = dict(self._units)
        self._shared: set[Unit] = set()
        self._follows: set[int] = set()
        self._stages = (
            {} if partition is None else {row.name: stage_units(row.units, partition) for row in table.rows}
        )
        for row_name, layers in shared:
            self._share(row_name, tuple(layers))
        for layer, source in (follows or {}).items():
            self._follow(layer, source)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that wait for a unit or own one, ascending."""
        return tuple(sorted(self._await))

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

    def check_layers(self, registered: Mapping[str, int], *, stage: int | None = None) -> None:
        """SpecError unless the engine's ``registered`` layers (name -> global number) are those of the table.

        Each has a name, belongs to a row or follows a layer that does, and every cached layer of the table is
        among them; of those in pipeline ``stage``, where one is given.
        """
        claims = Counter(layer for row in self.table.rows for layer in row.units)
        claims.update(self._follows)
        for layer, names in _by_layer(registered).items():
            if len(names) > claims[layer]:
                raise SpecError(
                    f"layer {layer} is registered as {', '.join(map(repr, names))} and in {claims[layer]}"
                    f" rows of the table, which has layers 0 to {max(claims)}: each needs a row of its own"
                )
        missing = sorted(self._owners(stage) - set(registered.values()))
        if missing:
            (row_name, _), *_ = self._units[missing[0]]
            raise SpecError(
                f"row {row_name!r}: layer {missing[0]} is none of the {len(registered)} layers that the"
                f" engine registered; {len(missing)} layers are missing"
            )

    def _owners(self, stage: int | None) -> set[int]:
        """The layers with units, of one stage or of all."""
        if stage is None:
            return set(self._units)
        if not 0 <= stage < len(self._ranges):
            raise SpecError(f"there are {len(self._ranges)} stages here, asked for stage {stage}")
        begin, end = self._ranges[stage]
        return {layer for layer in self._units if begin <= layer < end}

    def _check_one_stage(self, what: str, layers: Sequence[int]) -> None:
        ends = [end for _, end in self._ranges]
        if len({bisect_right(ends, layer) for layer in layers}) > 1:
            raise SpecError(f"{what} {', '.join(map(str, layers))}, which are in different pipeline stages")

    def _share(self, row_name: str, layers: tuple[int, ...]) -> None:
        units = self.table.row(row_name).units
        missing = [layer for layer in layers if layer not in units]
        if missing or len(layers) < 2 or list(layers) != sorted(set(layers)):
            raise SpecError(
                f"row {row_name!r}: a shared tensor needs ascending layers of the row, got {layers}"
            )
        self._check_one_stage(f"row {row_name!r}: a tensor is shared by layers", layers)
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
        self._check_one_stage("one follows the other of layers", (source, layer))
        self._follows.add(layer)
        self._await[layer] = self._units[source]


def _units_by_layer(table: SpecTable) -> dict[int, tuple[Unit, ...]]:
    owned: dict[int, tuple[Unit, ...]] = {}
    for row in (row for row in table.rows if row.kind is not RowKind.NONE):
        for number, layer in enumerate(row.units):
            owned[layer] = (*owned.get(layer, ()), (row.name, number))
    return owned


def _by_layer(registered: Mapping[str, int]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, layer in registered.items():
        if not name:
            raise SpecError(f"layer {layer} is registered without a name, so no hook can mean it")
        names.setdefault(layer, []).append(name)
    return names


def _without(units: tuple[Unit, ...], removed: tuple[Unit, ...]) -> tuple[Unit, ...]:
    return tuple(unit for unit in units if unit not in removed)
