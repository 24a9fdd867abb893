"""Units and stages: EXAMPLES 7 and the public cases C-13, number for number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import SpecError
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_core.spec.units import StageUnits, UnitMap, stage_ranges, stage_units

PARTS = (Part("x", (4,), "int8"),)


def table(**rows):
    """Chain rows by name, each with its layers."""
    return SpecTable(
        tuple(SpecRow(name, RowKind.CHAIN, 64, layers, PARTS) for name, layers in rows.items()), 64
    )


@pytest.mark.parametrize(
    ("partition", "layers", "first_layer", "unit_count", "first_unit"),
    [
        ([7, 9, 14], range(30), [0, 7, 16], [7, 9, 14], [0, 7, 16]),
        ([7, 9, 14], [10, 15, 20, 25], [0, 7, 16], [0, 2, 2], [0, 0, 2]),
        ([15, 15], [10, 15, 20, 25], [0, 15], [1, 3], [0, 1]),
        ([50, 46], range(96), [0, 50], [50, 46], [0, 50]),
    ],
)
def test_stages_are_prefix_sums_over_the_real_partition(
    partition, layers, first_layer, unit_count, first_unit
):
    expected = tuple(map(StageUnits, first_layer, unit_count, first_unit))
    assert stage_units(tuple(layers), partition) == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.data())
def test_every_unit_is_in_exactly_one_stage_and_in_order(partition, data):
    layers = sorted(data.draw(st.sets(st.integers(0, max(sum(partition) - 1, 0))))) if sum(partition) else []
    placed = []
    for (begin, end), stage in zip(stage_ranges(partition), stage_units(layers, partition), strict=True):
        units = range(stage.first_unit, stage.first_unit + stage.unit_count)
        assert all(begin <= layers[unit] < end for unit in units)
        assert stage.first_layer == begin
        placed += units
    assert placed == list(range(len(layers)))


@pytest.mark.parametrize("partition", [[], [4, -1]])
def test_a_partition_that_is_none_is_refused(partition):
    with pytest.raises(SpecError, match="a partition is layers per stage"):
        stage_ranges(partition)


def test_a_layer_past_the_partition_is_refused():
    with pytest.raises(SpecError, match="layer 30 is past the partition's 30 layers"):
        stage_units([29, 30], [7, 9, 14])


def test_units_count_over_the_rows_own_layers():
    units = UnitMap(table(full=(1, 4, 7), window=(0, 2, 4)))
    assert units.units_of(4) == (("full", 1), ("window", 2))
    assert units.units_of(3) == ()
    assert units.await_before(7) == units.save_after(7) == (("full", 2),)


def test_a_tensor_shared_by_a_row_is_awaited_before_its_first_layer_and_saved_once_after_its_last():
    units = UnitMap(table(linear=(3, 7, 11), full=(0, 7)), shared=[("linear", (3, 7, 11))])
    whole = (("linear", 0), ("linear", 1), ("linear", 2))
    assert [units.await_before(layer) for layer in (3, 7, 11)] == [whole, (("full", 1),), ()]
    assert [units.save_after(layer) for layer in (3, 7, 11)] == [(), (("full", 1),), whole]


def test_a_layer_that_follows_another_waits_for_its_unit_and_saves_nothing():
    units = UnitMap(table(full=(19, 20)), follows={21: 20, 22: 20})
    assert units.units_of(21) == units.save_after(21) == ()
    assert units.await_before(21) == units.await_before(22) == (("full", 1),)


def test_rows_that_are_not_cached_have_no_units():
    rows = (*table(full=(0,)).rows, SpecRow("cross", RowKind.NONE, 0, (1,), ()))
    assert UnitMap(SpecTable(rows, 64)).units_of(1) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"follows": {1: 9}}, "layer 1 follows layer 9, which has no unit"),
        ({"follows": {2: 0}}, "layer 2 follows layer 0 but has units"),
        ({"shared": [("full", (0, 5))]}, "a shared tensor needs ascending layers"),
        ({"shared": [("full", (2, 0))]}, "a shared tensor needs ascending layers"),
        ({"shared": [("full", (0,))]}, "a shared tensor needs ascending layers"),
        ({"shared": [("full", (0, 2)), ("full", (2, 3))]}, "in two shared tensors"),
        ({"shared": [("fool", (0, 2))]}, "no row 'fool'"),
        ({"partition": [2, 1]}, "layer 3 is past the partition's 3 layers"),
    ],
)
def test_contradicting_claims_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        UnitMap(table(full=(0, 2, 3)), **options)


def test_a_stage_is_told_by_row():
    units = UnitMap(table(full=(0, 2, 3)), [2, 2])
    assert units.stage("full", 1) == StageUnits(2, 2, 1)
    with pytest.raises(SpecError, match="has 2 stages here, asked for stage 2"):
        units.stage("full", 2)
    with pytest.raises(SpecError, match="has 0 stages"):
        UnitMap(table(full=(0,))).stage("full", 0)


@pytest.mark.parametrize(
    "options", [{"shared": [("full", (0, 2, 3))]}, {"follows": {5: 2}}], ids=["shared", "follows"]
)
def test_bytes_of_another_stage_are_not_there_to_share_or_follow(options):
    made = table(full=(0, 2, 3))
    assert UnitMap(made, [1, 5], **options | {"shared": ()})  # layers 2 and 5 are in one stage
    assert UnitMap(made, [6], **options)
    with pytest.raises(SpecError, match="which are in different pipeline stages"):
        UnitMap(made, [3, 3], **options)


def names(*layers):
    return {f"layers.{layer}": layer for layer in layers}


def test_the_engines_layers_are_those_of_the_table():
    units = UnitMap(table(full=(0, 2, 3), scale=(3,)), [2, 2], follows={1: 0})
    units.check_layers(names(0, 1, 2, 3) | {"layers.3.scale": 3})
    units.check_layers(names(2, 3), stage=1)


@pytest.mark.parametrize(
    ("registered", "message"),
    [
        (names(0, 2), "row 'full': layer 3 is none of the 2 layers that the engine registered; 1 layers are"),
        ({}, "row 'full': layer 0 is none of the 0 layers .* 3 layers are missing"),
        (names(0, 2, 3, 4), r"layer 4 is registered as 'layers\.4' and in 0 rows .* layers 0 to 3"),
        (names(0, 2, 3) | {"other": 3}, r"layer 3 is registered as 'layers\.3', 'other' and in 1 rows"),
        (names(0, 2) | {"": 3}, "layer 3 is registered without a name"),
    ],
)
def test_layers_that_are_not_those_of_the_table_are_refused(registered, message):
    with pytest.raises(SpecError, match=message):
        UnitMap(table(full=(0, 2, 3))).check_layers(registered)


@pytest.mark.parametrize("stage", [-1, 2])
def test_layers_of_a_stage_that_does_not_exist_are_refused(stage):
    with pytest.raises(SpecError, match=f"there are 2 stages here, asked for stage {stage}"):
        UnitMap(table(full=(0, 2, 3)), [2, 2]).check_layers(names(0), stage=stage)
