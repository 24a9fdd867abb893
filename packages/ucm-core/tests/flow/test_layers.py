"""What layers need and finish, against the unit map asked layer by layer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import SpecError
from ucm_core.flow.layers import LayerShards, Shard, Shards, plan_layers, runs
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_core.spec.units import UnitMap

PARTS = (Part("x", (4,), "int8"),)


def table(**rows: tuple[int, ...]) -> SpecTable:
    return SpecTable(
        tuple(SpecRow(name, RowKind.CHAIN, 64, layers, PARTS) for name, layers in rows.items()), 64
    )


@st.composite
def unit_maps(draw: st.DrawFn) -> UnitMap:
    """One to three rows over twelve layers; some layers of a row share a tensor, some follow."""
    layer = st.integers(0, 11)
    rows = {
        f"row{k}": tuple(sorted(draw(st.sets(layer, min_size=1)))) for k in range(draw(st.integers(1, 3)))
    }
    shared = []
    for name, layers in rows.items():
        group = tuple(sorted(draw(st.sets(st.sampled_from(layers)))))
        shared += [(name, group)] if len(group) > 1 else []
    owned = sorted({layer for layers in rows.values() for layer in layers})
    follows = {layer: draw(st.sampled_from(owned)) for layer in range(12, 12 + draw(st.integers(0, 2)))}
    return UnitMap(table(**rows), shared=shared, follows=follows)


def flat(joined: Iterable[Shards]) -> list[Shard]:
    return [shard for run in joined for shard in run]


@given(unit_maps())
def test_every_unit_is_brought_once_and_finished_once(units: UnitMap) -> None:
    plan = plan_layers(units)
    everything = sorted((row.name, unit) for row in units.table.rows for unit in range(len(row.units)))
    assert [each.layer for each in plan] == list(units.layers)
    assert sorted(flat(run for each in plan for run in each.brings)) == everything
    assert sorted(flat(run for each in plan for run in each.finishes)) == everything


@given(unit_maps())
def test_a_unit_is_brought_for_the_first_layer_that_needs_it(units: UnitMap) -> None:
    before: set[Shard] = set()
    for each in plan_layers(units):
        own = set(flat(each.brings))
        assert set(each.needs) == set(units.units_of(each.layer)) | set(units.await_before(each.layer))
        assert own == set(each.needs) - before
        before |= own


@given(unit_maps())
def test_what_a_layer_writes_it_finishes_or_rewrites(units: UnitMap) -> None:
    for each in plan_layers(units):
        finished = set(units.save_after(each.layer))
        assert set(flat(each.finishes)) == finished
        assert set(flat(each.rewrites)) == set(units.units_of(each.layer)) - finished


def test_a_stage_counts_from_its_own_first_unit() -> None:
    units = UnitMap(table(full=(0, 1, 2, 3), window=(1, 3)))
    plan = plan_layers(units, [2, 3], first_units={"full": 2, "window": 1})
    assert plan[1] == LayerShards(
        layer=3,
        needs=(("full", 1), ("window", 0)),
        brings=(Shards("full", 1, 2), Shards("window", 0, 1)),
        finishes=(Shards("full", 1, 2), Shards("window", 0, 1)),
        rewrites=(),
    )


def test_a_tensor_that_layers_share_moves_in_one_piece() -> None:
    plan = plan_layers(UnitMap(table(full=(0, 1, 2)), shared=[("full", (0, 1, 2))]))
    assert plan[0].brings == plan[2].finishes == (Shards("full", 0, 3),)
    assert plan[1].brings == plan[1].finishes == ()


def test_a_layer_that_follows_needs_what_was_brought_and_writes_nothing() -> None:
    plan = plan_layers(UnitMap(table(full=(0, 1)), follows={2: 0}))
    assert plan[2] == LayerShards(2, needs=(("full", 0),), brings=(), finishes=(), rewrites=())


@pytest.mark.parametrize("layers", [[1, 0], [0, 0, 1]])
def test_layers_that_do_not_ascend_are_refused(layers: list[int]) -> None:
    with pytest.raises(SpecError, match="ascend and differ"):
        plan_layers(UnitMap(table(full=(0, 1))), layers)


def test_a_unit_before_the_stages_first_is_refused() -> None:
    with pytest.raises(SpecError, match=r"row 'full': layer 0 has unit 0, but the stage begins at unit 2"):
        plan_layers(UnitMap(table(full=(0, 5))), first_units={"full": 2})


@given(st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 9))))
def test_runs_hold_the_same_shards_and_never_touch(shards: set[tuple[str, int]]) -> None:
    joined = runs(shards)
    assert sorted(shard for run in joined for shard in run) == sorted(shards)
    assert not {(run.row, run.begin) for run in joined} & {(run.row, run.end) for run in joined}
