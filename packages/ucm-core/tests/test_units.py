"""Units, stages and segments: EXAMPLES 7 and the public cases C-13, number for number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import SpecError
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_core.spec.units import Segment, StageUnits, UnitMap, stage_ranges, stage_units

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


def test_a_segment_names_a_slice_never_a_rank():
    assert Segment().name == "hx.u0-0.c0-1"
    assert Segment(heads=(4, 8), units=(7, 16), context=(1, 2)).name == "h4-8.u7-16.c1-2"


@given(*[st.tuples(st.none() | st.tuples(st.integers(0, 99), st.integers(99, 200)), st.integers(0, 99))] * 2)
def test_segment_names_are_injective(left, right):
    first, second = (Segment(heads=heads, units=(0, units)) for heads, units in (left, right))
    assert (first.name == second.name) == (first == second)


@pytest.mark.parametrize(
    "fields", [{"heads": (3, 2)}, {"units": (-1, 2)}, {"context": (2, 2)}, {"context": (0, 0)}]
)
def test_a_segment_outside_its_range_is_refused(fields):
    with pytest.raises(SpecError):
        Segment(**fields)
