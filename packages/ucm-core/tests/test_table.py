"""Spec tables: exact sums, a digest over meaning only, and validation that names the row and the numbers."""

import dataclasses
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import SpecError
from ucm_core.spec.table import (
    MAX_ALIGNMENT_TOKENS,
    Part,
    RankRule,
    RowKind,
    SpecRow,
    SpecTable,
    alignment_of,
)

K = Part("k", (2, 32), "bfloat16")
V = Part("v", (2, 16), "bfloat16")
FULL = SpecRow("full", RowKind.CHAIN, 64, (0, 2), (K, V))
WINDOW = SpecRow("window-48", RowKind.CHAIN, 128, (1, 3), (K, V), window=48)
STATE = SpecRow(
    "state", RowKind.SNAPSHOT, 64, (4,), (Part("conv", (3, 5), "bfloat16"), Part("ssm", (2, 3), "float32"))
)
SCALE = SpecRow("scale", RowKind.FOLLOWER, 64, (0, 2), (Part("s", (1,), "float32"),), follows="full")
CROSS = SpecRow("cross", RowKind.NONE, 0, (5,), ())
TABLE = SpecTable((FULL, WINDOW, STATE, SCALE, CROSS), 64)


def changed(row, **fields):
    return dataclasses.replace(row, **fields)


def with_row(row):
    return SpecTable(tuple(row if other.name == row.name else other for other in TABLE.rows), 64)


def test_bytes_are_exact_sums_of_unequal_parts():
    assert FULL.part_bytes(K) == 64 * 2 * 32 * 2
    assert FULL.part_bytes(V) == 64 * 2 * 16 * 2
    assert FULL.unit_bytes == 64 * (128 + 64)
    assert FULL.block_bytes == 2 * FULL.unit_bytes
    assert STATE.unit_bytes == STATE.block_bytes == 3 * 5 * 2 + 2 * 3 * 4


def test_a_compressed_block_holds_one_entry_per_several_tokens():
    row = SpecRow("c16", RowKind.CHAIN, 512, (0,), (Part("e", (512,), "float8_e4m3fn", tokens_per_entry=16),))
    assert row.unit_bytes == 512 // 16 * 512


def test_rows_are_found_by_kind_and_by_name():
    assert TABLE.chain_rows == (FULL, WINDOW)
    assert TABLE.snapshot_rows == (STATE,)
    assert TABLE.follower_rows == (SCALE,)
    assert TABLE.row("state") is STATE
    with pytest.raises(SpecError, match="no row 'fool' in the table; it has full, window-48"):
        TABLE.row("fool")


def test_alignment_is_the_lcm_of_chain_rows_only():
    assert TABLE.alignment_tokens == 128
    assert SpecTable((changed(STATE, block_tokens=48),), 16).alignment_tokens == 16


# Public cases C-31: exact lcm, nothing assumes powers of two.
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([16, 24], 48),
        ([528, 544], 17_952),
        ([544, 256], 4_352),
        ([1056, 3584, 64], 118_272),
        ([2**20], 2**20),
    ],
)
def test_alignment_is_exact(sizes, expected):
    assert alignment_of(sizes) == expected


def test_alignment_above_the_limit_is_refused_with_both_numbers():
    with pytest.raises(SpecError, match=r"2010624 tokens, above the limit of 1048576") as caught:
        alignment_of([16, 24, 528, 544, 1056, 3584])
    assert "16, 24, 528, 544, 1056, 3584" in str(caught.value)


def test_a_table_above_the_limit_is_refused_when_it_is_made():
    rows = tuple(changed(FULL, name=f"r{size}", block_tokens=size) for size in (528, 544, 1056, 3584))
    with pytest.raises(SpecError, match="above the limit"):
        SpecTable(rows, 16)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=4))
def test_alignment_is_divided_by_every_size_or_refused(sizes):
    if math.lcm(*sizes) > MAX_ALIGNMENT_TOKENS:
        with pytest.raises(SpecError, match=str(math.lcm(*sizes))):
            alignment_of(sizes)
    else:
        assert all(alignment_of(sizes) % size == 0 for size in sizes)


DEPLOYMENT = [
    changed(FULL, rank_rule=RankRule.ALL_UNION),
    changed(STATE, block_tokens=128),
    changed(STATE, interval=256),
    changed(WINDOW, extra=2),
]


@pytest.mark.parametrize("row", DEPLOYMENT)
def test_deployment_facts_do_not_change_the_digest(row):
    assert with_row(row).digest == TABLE.digest


def test_row_order_does_not_change_the_digest():
    assert SpecTable(TABLE.rows[::-1], 64).digest == TABLE.digest
    assert len(TABLE.digest) == 32


MEANING = [
    changed(FULL, units=(0, 3)),
    changed(FULL, parts=(V, K)),
    changed(FULL, parts=(changed(K, name="q"), V)),
    changed(FULL, parts=(changed(K, shape=(32, 2)), V)),
    changed(FULL, parts=(changed(K, dtype="float16"), V)),
    changed(FULL, parts=(changed(K, tokens_per_entry=2), V)),
    changed(FULL, window=48),
    changed(WINDOW, window=49),
    changed(WINDOW, window=None),
    changed(WINDOW, block_tokens=64),
    changed(STATE, parts=STATE.parts[:1]),
]


@pytest.mark.parametrize("row", MEANING)
def test_whatever_the_bytes_mean_changes_the_digest(row):
    assert with_row(row).digest != TABLE.digest


def test_kind_name_and_source_change_the_digest():
    pair = (FULL, changed(FULL, name="other"))
    tables = [
        SpecTable((FULL,), 64),
        SpecTable((changed(FULL, name="fuller"),), 64),
        SpecTable((changed(FULL, kind=RowKind.SNAPSHOT),), 64),
        SpecTable((*pair, SCALE), 64),
        SpecTable((*pair, changed(SCALE, follows="other")), 64),
    ]
    assert len({table.digest for table in tables}) == len(tables)


BAD_ROWS = [
    ({"name": ""}, "needs a name"),
    ({"name": 5}, "needs a name, got 5"),
    ({"name": "\ud800"}, "needs a name"),
    ({"kind": "chain"}, "'chain', which is no RowKind"),
    ({"rank_rule": "intersection"}, "which is no RankRule"),
    ({"block_tokens": 0}, "block_tokens is 0"),
    ({"block_tokens": 1 << 21}, "block_tokens is 2097152, .* at most 1048576"),
    ({"block_tokens": 2.5}, "block_tokens is 2.5"),
    ({"units": ()}, "layer numbers"),
    ({"units": (-1, 2)}, "layer numbers"),
    ({"units": (0.5, 1)}, "layer numbers"),
    ({"units": (0, 1 << 40)}, "layer numbers"),
    ({"units": 5}, "units is 5; give a sequence"),
    ({"parts": ("k",)}, "'k', which is no Part"),
    ({"units": (0, 2, 2)}, "2 is before 2"),
    ({"units": (2, 0)}, "2 is before 0"),
    ({"parts": ()}, "without parts"),
    ({"parts": (K, K)}, "'k' twice"),
    ({"window": 0}, "window is 0"),
    ({"window": 1 << 40}, "window is"),
    ({"extra": -1}, "extra is -1"),
    ({"extra": 1.5}, "extra is 1.5"),
    ({"extra": float("nan")}, "extra is nan"),
    ({"interval": 64}, "interval 64 is for snapshot rows"),
    ({"follows": "other"}, "follows='other'"),
    ({"kind": RowKind.FOLLOWER}, "follows=None"),
    ({"parts": (changed(K, tokens_per_entry=48),)}, "block_tokens 64 is no multiple of tokens_per_entry 48"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_ROWS)
def test_a_row_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        changed(FULL, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"interval": 96}, "interval 96 is no multiple of its grid 64"),
        ({"interval": 0}, "interval 0"),
        ({"interval": 64.0}, "interval 64.0"),
        ({"block_tokens": (1 << 62) + 16}, "at most 1048576"),
        ({"window": 5}, "window 5"),
        ({"parts": (changed(K, tokens_per_entry=4),)}, "a state has no tokens_per_entry"),
    ],
)
def test_a_snapshot_row_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        changed(STATE, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "needs a name"),
        ({"shape": ()}, "shape of positive ints"),
        ({"shape": (2, 0)}, "shape of positive ints"),
        ({"shape": 5}, "shape is 5; give a sequence"),
        ({"name": 5}, "needs a name"),
        ({"dtype": "auto"}, "not a resolved type"),
        ({"tokens_per_entry": 0}, "must be at least 1"),
    ],
)
def test_a_part_that_describes_no_bytes_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        changed(K, **fields)


@pytest.mark.parametrize(
    ("rows", "grain", "message"),
    [
        ((FULL, FULL), 64, "'full' twice"),
        (None, 64, "rows is None"),
        ((5,), 64, "the row 5, which is no SpecRow"),
        ((FULL,), 0, "grain_tokens is 0"),
        ((FULL,), 48, "block_tokens 64 is no multiple of grain_tokens 48"),
        ((SCALE,), 64, "follows 'full', a row that the table does not have"),
        ((STATE, changed(SCALE, follows="state")), 64, "follows 'state', a snapshot row; only a chain row"),
        ((CROSS, changed(SCALE, follows="cross")), 64, "follows 'cross', a none row; only a chain row"),
        ((FULL, SCALE, changed(SCALE, name="s2", follows="scale")), 64, "follows 'scale', a follower row"),
        ((changed(SCALE, follows="scale"),), 64, "follows 'scale', a follower row"),
        ((FULL, changed(SCALE, block_tokens=128)), 64, "128 and follows 'full' with 64"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(rows, grain, message):
    with pytest.raises(SpecError, match=message):
        SpecTable(rows, grain)


def test_nothing_is_replicated_when_context_ranks_deal_out_the_tokens():
    # Case C-32: a block id of 16 tokens under 2 x 2 context ranks covers 64, said by the row itself.
    replicated = SpecTable((changed(FULL, rank_rule=RankRule.ALL_UNION), STATE), 64)
    assert replicated.under_context(1) == replicated
    sharded = replicated.under_context(4)
    assert {row.rank_rule for row in sharded.rows} == {RankRule.INTERSECTION}
    assert sharded.digest == replicated.digest
    with pytest.raises(SpecError, match="a context of 0 ranks"):
        replicated.under_context(0)


def test_a_block_is_dealt_out_to_context_ranks_in_whole_entries():
    compressed = changed(FULL, block_tokens=512, parts=(changed(K, tokens_per_entry=128),))
    assert SpecTable((compressed,), 64).under_context(4).row("full").block_tokens == 512
    with pytest.raises(SpecError, match=r"4 entries a block .* 3 context ranks; .* multiple of 384"):
        SpecTable((compressed,), 64).under_context(3)
    follower = changed(SCALE, block_tokens=192, parts=(changed(K, tokens_per_entry=64),))
    with pytest.raises(SpecError, match=r"row 'scale', part 'k': 3 entries .* 4 context ranks"):
        SpecTable((changed(FULL, block_tokens=192), follower), 64).under_context(4)


def test_a_table_survives_pickling():
    copy = pickle.loads(pickle.dumps(TABLE))
    assert copy == TABLE
    assert copy.digest == TABLE.digest


def test_values_are_frozen():
    for value, field in ((K, "name"), (FULL, "units"), (TABLE, "rows")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, "other")
