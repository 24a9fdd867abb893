"""What each layer of a stage waits for and finishes, in shards of the handles that a step brings.

Made once from the unit map; the pipeline only looks things up. Positions count the stage's layers in the
order in which the engine computes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ucm_core.errors import SpecError, shown
from ucm_core.spec.rows import is_number
from ucm_core.spec.units import UnitMap

__all__ = ["LayerShards", "Shard", "Shards", "plan_layers", "runs"]

Shard = tuple[str, int]
"""(row name, shard of its handles)."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Neighbouring shards ``[begin, end)`` of one row."""

    row: str
    begin: int
    end: int

    @property
    def slice(self) -> slice:
        """As `UnitLoad.submit` takes them."""
        return slice(self.begin, self.end)

    def __iter__(self) -> Iterator[Shard]:
        """Each of them."""
        return ((self.row, shard) for shard in range(self.begin, self.end))


@dataclass(frozen=True, slots=True)
class LayerShards:
    """What one layer has to do with shards."""

    layer: int
    """Its global number."""
    needs: tuple[Shard, ...]
    """What must have landed before it computes."""
    brings: tuple[Shards, ...]
    """What of this no earlier layer needs: what is submitted for its sake."""
    finishes: tuple[Shards, ...]
    """What is final once it has computed."""
    rewrites: tuple[Shards, ...]
    """What it writes and another layer finishes: a tensor that they share."""


def plan_layers(
    units: UnitMap, layers: Sequence[int] | None = None, *, first_units: Mapping[str, int] | None = None
) -> tuple[LayerShards, ...]:
    """Return what each of ``layers`` needs and finishes, by position; None stands for all of the map.

    ``first_units`` is, by row, the global number of the unit that is shard 0 of this stage's handles.
    SpecError for layers that do not ascend, and for a unit before the first.
    """
    ordered = units.layers if layers is None else tuple(layers)
    if not all(map(is_number, ordered)) or list(ordered) != sorted(set(ordered)):
        raise SpecError(f"the layers of a stage are numbers that ascend and differ, got {shown(ordered)}")
    first = _first_units(units, first_units or {})
    plans: list[LayerShards] = []
    known: set[Shard] = set()
    for layer in ordered:
        own = _shards(units.units_of(layer), first, layer)
        needs = tuple(dict.fromkeys((*own, *_shards(units.await_before(layer), first, layer))))
        brings = runs(shard for shard in needs if shard not in known)
        known.update(needs)
        finishes = _shards(units.save_after(layer), first, layer)
        rewrites = runs(shard for shard in own if shard not in finishes)
        plans.append(LayerShards(layer, needs, brings, runs(finishes), rewrites))
    return tuple(plans)


def _first_units(units: UnitMap, first_units: Mapping[str, int]) -> Mapping[str, int]:
    names = [row.name for row in units.table.rows]
    for name, unit in first_units.items():
        if name not in names:
            raise SpecError(f"first_units names {name!r}, which is no row; rows are {', '.join(names)}")
        if not is_number(unit):
            raise SpecError(f"row {name!r}: its first unit is {shown(unit)}, which is no number of a unit")
    return first_units


def _shards(units: Iterable[tuple[str, int]], first: Mapping[str, int], layer: int) -> tuple[Shard, ...]:
    shards = tuple((row, unit - first.get(row, 0)) for row, unit in units)
    for row, shard in shards:
        if shard < 0:
            raise SpecError(
                f"row {row!r}: layer {layer} has unit {shard + first[row]}, but the stage begins at unit"
                f" {first[row]}"
            )
    return shards


def runs(shards: Iterable[Shard]) -> tuple[Shards, ...]:
    """Join neighbours: one call moves a tensor that several layers share."""
    joined: list[Shards] = []
    for row, shard in sorted(shards):
        if joined and (joined[-1].row, joined[-1].end) == (row, shard):
            joined[-1] = Shards(row, joined[-1].begin, shard + 1)
        else:
            joined.append(Shards(row, shard, shard + 1))
    return tuple(joined)
