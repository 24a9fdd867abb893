"""Segments: who holds which heads, units and entries of a row, and which of equal holders writes (C-11)."""

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ucm_core.errors import SpecError
from ucm_core.spec.presets.stress import x_hybrid_96
from ucm_core.spec.segments import (
    Parallelism,
    Rank,
    Segment,
    segments_of,
    slice_of,
    slices_of,
    writers,
)
from ucm_core.spec.table import Part, RankRule, RowKind, SpecRow
from ucm_core.spec.units import stage_units


def row(heads=6, layers=(0, 1), *, rule=RankRule.INTERSECTION, block=64, kind=RowKind.CHAIN):
    parts = (Part("k", (heads, 4), "int8"), Part("scale", (heads,), "float32"))
    return SpecRow("full", kind, block, layers, parts, rank_rule=rule)


WHOLE = {"rule": RankRule.ALL_UNION}


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


def heads_of(given, **sizes):
    return [segment.heads for segment in segments_of(given, Parallelism(**sizes))]


def test_c11_heads_are_dealt_out_in_order_and_replicated_rows_are_whole():
    assert heads_of(row(), tensor=3) == [(0, 2), (2, 4), (4, 6)]
    assert heads_of(row(), tensor=2) == [(0, 3), (3, 6)]
    assert heads_of(row(), tensor=6) == list(pairwise(range(7)))
    assert heads_of(row(), tensor=1) == [None]
    assert {heads for size in (1, 2, 3, 6) for heads in heads_of(row(**WHOLE), tensor=size)} == {None}


def test_a_head_is_held_by_neighbouring_ranks_where_there_are_more_ranks_than_heads():
    held = [slice_of(row(2), Parallelism(8), rank=Rank(tensor)) for tensor in range(8)]
    assert [one.segment.heads for one in held] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert [one.replica for one in held] == [0, 1, 2, 3] * 2
    assert {one.replicas for one in held} == {4}
    assert held[0].row.parts == (Part("k", (1, 4), "int8"), Part("scale", (1,), "float32"))


def test_a_stage_holds_the_units_of_its_own_layers_and_names_their_global_numbers():
    layers, partition = (10, 15, 20, 25), (7, 9, 14)  # C-13
    held = [
        slice_of(row(layers=layers), Parallelism(partition=partition), rank=Rank(stage=s)) for s in range(3)
    ]
    assert held[0] is None
    assert [one.segment.units for one in held[1:]] == [(0, 2), (2, 4)]
    assert [one.row.units for one in held[1:]] == [(10, 15), (20, 25)]


def test_decode_context_deals_entries_to_the_ranks_that_hold_the_same_heads():
    cut = Parallelism(8, decode_context=2)
    held = [slice_of(row(2), cut, rank=Rank(tensor)) for tensor in range(8)]
    assert [(one.segment.heads[0], one.segment.context, one.replica) for one in held[:4]] == [
        (0, (0, 2), 0), (0, (1, 2), 0), (0, (0, 2), 1), (0, (1, 2), 1)
    ]  # fmt: skip
    assert held[0].replicas == 2
    assert held[0].row.unit_bytes * 2 * 2 == row(2).unit_bytes


def test_a_latent_row_under_context_parallelism_is_replicated_nowhere():
    cut = Parallelism(8, decode_context=8, prefill_context=2)
    names = [segment.name for segment in segments_of(row(**WHOLE), cut)]
    assert sorted(names) == sorted(f"hx.u0-2.c{place}-16" for place in range(16))
    assert {slice_of(row(**WHOLE), cut, rank=rank).replicas for rank in cut.ranks()} == {1}


def test_states_are_cut_by_heads_and_not_dealt_out():
    state = x_hybrid_96().row("mamba2")
    held = slice_of(state, Parallelism(8, (48, 48), prefill_context=2), rank=Rank(3, 1, prefill_context=1))
    assert held.segment == Segment((48, 64), (10, 20))
    assert [part.shape for part in held.row.parts] == [(3, 1280), (16, 64, 128)]
    assert (held.replica, held.replicas) == (1, 2)


def test_what_a_rank_of_x_hybrid_96_holds_under_tp_8_and_pp_2():
    table, cut = x_hybrid_96(), Parallelism(8, (48, 48))
    held = slices_of(table, cut, rank=Rank(tensor=5, stage=1))
    assert {name: one.segment.name for name, one in held.items()} == {
        "mla": "hx.u8-16.c0-1", "csa_c16": "hx.u8-16.c0-1", "swa": "h5-6.u12-24.c0-1",
        "indexer": "hx.u2-4.c0-1", "scale": "hx.u8-16.c0-1",
        "mamba2": "h80-96.u10-20.c0-1", "kda_perslot": "h20-24.u4-8.c0-1",
    }  # fmt: skip
    assert {name: one.replicas for name, one in held.items() if one.replicas > 1} == dict.fromkeys(
        ("mla", "csa_c16", "indexer", "scale"), 8
    )
    assert held["mla"].row.block_bytes == 524_288  # EXAMPLES 8
    assert held["swa"].row.unit_bytes * 8 == table.row("swa").unit_bytes
    assert sum(len(segments_of(one, cut)) for one in table.rows) == 4 * 2 + 3 * 16


@st.composite
def cuts(draw):
    """A row and a way to cut it that fits."""
    heads, tensor = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    assume(heads % tensor == 0 or tensor % heads == 0)
    rule = draw(st.sampled_from(RankRule))
    copies = tensor if rule is RankRule.ALL_UNION else max(1, tensor // heads)
    decode = draw(st.sampled_from([size for size in range(1, copies + 1) if copies % size == 0]))
    layers = tuple(sorted(draw(st.sets(st.integers(0, 11), min_size=1))))
    first = draw(st.integers(0, 12))
    given = row(heads, layers, rule=rule, block=64 * 9)
    return given, Parallelism(tensor, (first, 12 - first), decode, draw(st.integers(1, 3)))


@given(cuts())
def test_segments_share_nothing_leave_nothing_out_and_have_as_many_holders_as_they_say(case):
    given, cut = case
    held = [found for rank in cut.ranks() if (found := slice_of(given, cut, rank=rank)) is not None]
    holders = Counter(one.segment for one in held)
    assert all(holders[one.segment] == one.replicas for one in held)
    assert len({(one.segment, one.replica) for one in held}) == len(held)
    heads = range(given.parts[0].shape[0])
    cells = Counter(
        (head, unit, segment.context[0])
        for segment in holders
        for head, unit in product(range(*segment.heads) if segment.heads else heads, range(*segment.units))
    )
    assert cells == Counter(product(heads, range(len(given.units)), range(cut.context)))


@given(cuts())
def test_the_bytes_of_all_segments_are_those_of_the_block(case):
    given, cut = case
    assert sum(held.block_bytes for held in segments_of(given, cut).values()) == given.block_bytes


@given(cuts())
def test_a_shard_is_the_global_unit_less_the_segments_first(case):
    given, cut = case
    for rank in cut.ranks():
        if (found := slice_of(given, cut, rank=rank)) is not None:
            begin = found.segment.units[0]
            assert [given.units.index(layer) - begin for layer in found.row.units] == [
                *range(len(found.row.units))
            ]
            assert begin == stage_units(given.units, cut.partition)[rank.stage].first_unit


@pytest.mark.parametrize(
    ("given", "cut", "rank", "message"),
    [
        (row(), Parallelism(4), Rank(), "row 'full': 6 heads cannot be dealt out evenly to 4 tensor ranks"),
        (row(), Parallelism(4, decode_context=4), Rank(), "6 heads cannot be dealt"),
        (row(), Parallelism(2, decode_context=2), Rank(), "decode_context = 2, but 1 of the 2 tensor ranks"),
        (row(block=63, **WHOLE), Parallelism(2, decode_context=2), Rank(), "63 entries a block cannot be"),
        (row(2, kind=RowKind.SNAPSHOT), Parallelism(4), Rank(), "2 heads cannot be dealt"),
        (row(), Parallelism(2), Rank(2), "tensor rank 2 is outside of 2"),
        (row(), Parallelism(2), Rank(stage=1), "stage rank 1 is outside of 1"),
        (row(), Parallelism(2), Rank(prefill_context=-1), "prefill_context rank -1 is outside of 1"),
        (row(layers=(0, 9)), Parallelism(partition=(4, 4)), Rank(), "layer 9 is past the partition's 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_evenly_is_refused(given, cut, rank, message):
    with pytest.raises(SpecError, match=message):
        slice_of(given, cut, rank=rank)


def test_a_part_that_does_not_divide_with_the_heads_is_refused():
    parts = (Part("conv", (3, 10), "int8"), Part("ssm", (4, 2), "int8"))
    with pytest.raises(SpecError, match="part 'conv': 10 cannot be cut into 4 equal slices"):
        slice_of(SpecRow("state", RowKind.SNAPSHOT, 64, (0,), parts), Parallelism(4), rank=Rank())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 0}, "tensor = 0 ranks"),
        ({"prefill_context": True}, "prefill_context = True ranks"),
        ({"tensor": 4, "decode_context": 3}, "decode_context = 3 does not divide tensor = 4"),
        ({"partition": 7}, "the partition"),
    ],
)
def test_a_parallelism_that_is_none_is_refused(sizes, message):
    with pytest.raises(SpecError, match=message):
        Parallelism(**sizes)


def test_rows_that_are_not_cached_have_no_segment():
    cross = SpecRow("cross", RowKind.NONE, 0, (0,), ())
    assert segments_of(cross, Parallelism(4)) == {}


KEYS = np.random.default_rng(11).integers(0, 256, (500, 32), dtype=np.uint8)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_one_of_n_holders_writes_an_object_and_the_next_after_every_failure(replicas):
    turns = [writers(KEYS, replicas, failed=failed) for failed in range(replicas)]
    ids = [int.from_bytes(key[8:16].tobytes(), "little") for key in KEYS]
    assert turns[0].tolist() == [number % replicas for number in ids]
    assert all(((later - first) % replicas == 1 % replicas).all() for first, later in pairwise(turns))
    assert (np.sort(np.array(turns), axis=0) == np.arange(replicas)[:, None]).all()


def test_writing_is_shared_evenly():
    counts = np.bincount(writers(KEYS, 4), minlength=4)
    # binomial: 500 objects, a quarter each: 125 expected, standard deviation below 10
    assert (abs(counts - 125) < 50).all()


@pytest.mark.parametrize("replicas", [0, -1, True])
def test_no_holders_are_refused(replicas):
    with pytest.raises(SpecError, match="holders of equal bytes; at least 1"):
        writers(KEYS, replicas)
