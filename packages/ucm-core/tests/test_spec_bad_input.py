"""Bad input to rows and tables: every field swept, one clear error with the number, nothing half made."""

import dataclasses

import pytest

from ucm_core.errors import SpecError
from ucm_core.spec.rows import MAX_BLOCK_BYTES
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable

HUGE = 1 << 40
PART = Part("k", (2, 32), "bfloat16")
ROWS = {
    RowKind.CHAIN: SpecRow("r", RowKind.CHAIN, 64, (0, 2), (PART,)),
    RowKind.SNAPSHOT: SpecRow("r", RowKind.SNAPSHOT, 64, (0, 2), (PART,)),
    RowKind.FOLLOWER: SpecRow("r", RowKind.FOLLOWER, 64, (0, 2), (PART,), follows="s"),
    RowKind.NONE: SpecRow("r", RowKind.NONE, 0, (0, 2), ()),
}
NO_COUNTS = (-1, -HUGE, HUGE, 1.5, float("nan"), "64", True)


def refusal(make, *arguments, **fields):
    with pytest.raises(SpecError) as caught:
        make(*arguments, **fields)
    return str(caught.value)


@pytest.mark.parametrize("value", [*NO_COUNTS, 0, None])
@pytest.mark.parametrize("kind", [RowKind.CHAIN, RowKind.SNAPSHOT, RowKind.FOLLOWER])
def test_a_block_size_or_grid_that_is_no_count_is_refused(kind, value):
    message = refusal(dataclasses.replace, ROWS[kind], block_tokens=value)
    assert message.startswith(f"row 'r': block_tokens is {value!r}, must be at least 1 and at most 1048576")


@pytest.mark.parametrize("value", [*NO_COUNTS, 0])
@pytest.mark.parametrize("kind", RowKind)
def test_a_window_that_is_no_count_is_refused(kind, value):
    assert f"window is {value!r}" in refusal(dataclasses.replace, ROWS[kind], window=value)


@pytest.mark.parametrize("kind", [RowKind.SNAPSHOT, RowKind.FOLLOWER, RowKind.NONE])
def test_a_window_is_for_chain_rows(kind):
    assert "window 5 and extra 0 are for chain rows" in refusal(dataclasses.replace, ROWS[kind], window=5)
    assert "window None and extra 5 are for chain" in refusal(dataclasses.replace, ROWS[kind], extra=5)


@pytest.mark.parametrize("value", [*NO_COUNTS, None])
@pytest.mark.parametrize("kind", RowKind)
def test_extra_tokens_that_are_no_count_are_refused(kind, value):
    assert f"extra is {value!r}" in refusal(dataclasses.replace, ROWS[kind], extra=value)


@pytest.mark.parametrize("value", [*NO_COUNTS, 0, 32, 96, 65])
def test_an_interval_that_is_no_multiple_of_the_grid_is_refused(value):
    message = refusal(dataclasses.replace, ROWS[RowKind.SNAPSHOT], interval=value)
    assert f"interval {value!r} is no multiple of its grid 64" in message


@pytest.mark.parametrize("value", [*NO_COUNTS, 0, 64])
@pytest.mark.parametrize("kind", [RowKind.CHAIN, RowKind.FOLLOWER, RowKind.NONE])
def test_an_interval_is_for_snapshot_rows(kind, value):
    message = refusal(dataclasses.replace, ROWS[kind], interval=value)
    assert f"interval {value!r} is for snapshot rows, not {kind.value}" in message


@pytest.mark.parametrize("value", [-1, HUGE, 1.5, "0", True, None])
@pytest.mark.parametrize("kind", RowKind)
def test_what_is_no_layer_number_is_refused(kind, value):
    message = refusal(dataclasses.replace, ROWS[kind], units=(value,))
    assert message.startswith(f"row 'r' needs layer numbers from 0, got ({value!r},)")


@pytest.mark.parametrize("value", [*NO_COUNTS, 0, None])
def test_a_shape_or_tokens_per_entry_that_is_no_count_is_refused(value):
    assert f"got (2, {value!r})" in refusal(Part, "k", (2, value), "int8")
    assert f"tokens_per_entry is {value!r}" in refusal(Part, "k", (2,), "int8", tokens_per_entry=value)


@pytest.mark.parametrize("value", [*NO_COUNTS, 0, None])
def test_a_grain_or_context_that_is_no_count_is_refused(value):
    assert f"grain_tokens is {value!r}" in refusal(SpecTable, (ROWS[RowKind.CHAIN],), value)
    table = SpecTable((ROWS[RowKind.CHAIN],), 64)
    assert f"a context of {value!r} ranks" in refusal(table.under_context, value)


def test_a_block_of_more_bytes_than_any_store_holds_is_refused_with_the_numbers():
    wide = Part("k", (1 << 20, 1 << 14), "int8")
    assert SpecRow("r", RowKind.CHAIN, 64, (0,), (wide,)).block_bytes == MAX_BLOCK_BYTES
    message = refusal(SpecRow, "r", RowKind.CHAIN, 64, (0, 1), (wide,))
    assert f"2 units of {1 << 40} bytes are {1 << 41} bytes a block, above the limit of {1 << 40}" in message
    assert "above the limit" in refusal(
        SpecRow, "r", RowKind.SNAPSHOT, 64, (0,), (Part("s", (2**31 - 1,) * 9, "int8"),)
    )


@pytest.mark.parametrize("kind", RowKind)
def test_a_row_without_layers_or_with_layers_out_of_order_is_refused(kind):
    assert "needs layer numbers" in refusal(dataclasses.replace, ROWS[kind], units=())
    assert "2 is before 1" in refusal(dataclasses.replace, ROWS[kind], units=(2, 1))
    assert "1 is before 1" in refusal(dataclasses.replace, ROWS[kind], units=(1, 1))


@pytest.mark.parametrize("kind", RowKind)
def test_equal_names_are_refused(kind):
    other = dataclasses.replace(ROWS[RowKind.CHAIN], name="s")
    assert "the table has the row 'r' twice" in refusal(SpecTable, (ROWS[kind], other, ROWS[kind]), 64)


@pytest.mark.parametrize("kind", RowKind)
def test_only_followers_follow(kind):
    follows = None if kind is RowKind.FOLLOWER else "s"
    message = refusal(dataclasses.replace, ROWS[kind], follows=follows)
    assert message == f"row 'r' is a {kind.value} row with follows={follows!r}"


@pytest.mark.parametrize("key", ["block_token", "tokens", "layers", "Name", "", "kind "])
def test_unknown_keys_name_the_row(key):
    row = {"name": "r", "kind": "none", "units": [0], key: 1}
    message = refusal(SpecTable.from_mapping, {"grain_tokens": 64, "rows": [row]})
    assert message.startswith(f"row 'r' has the unknown key {key!r}; ")


@pytest.mark.parametrize("key", ["block_tokens", "window", "interval", "extra"])
@pytest.mark.parametrize("value", [-1, HUGE, 1.5, "64", True, [64]])
def test_numbers_in_text_are_swept_like_those_in_code(key, value):
    row = {"name": "r", "kind": "snapshot", "block_tokens": 64, "units": [0]}
    row["parts"] = [{"name": "k", "shape": [2], "dtype": "int8"}]
    message = refusal(SpecTable.from_mapping, {"grain_tokens": 64, "rows": [row | {key: value}]})
    assert message.startswith("row 'r'")
    assert repr(value) in message


# A row that is never cached is in the table and is checked like any other; it needs neither blocks nor parts.
def test_a_none_row_is_kept_whole_and_votes_on_nothing():
    table = SpecTable((ROWS[RowKind.CHAIN], dataclasses.replace(ROWS[RowKind.NONE], name="cross")), 64)
    assert table.row("cross").units == (0, 2)
    assert (table.row("cross").unit_bytes, table.row("cross").block_bytes) == (0, 0)
    assert table.alignment_tokens == 64
    assert {row.name for row in (*table.chain_rows, *table.snapshot_rows, *table.follower_rows)} == {"r"}
    assert table.digest != SpecTable((ROWS[RowKind.CHAIN],), 64).digest
    assert SpecTable.from_mapping(table.to_mapping()) == table


@pytest.mark.parametrize("value", [-1, HUGE, 1.5, "64"])
def test_a_none_row_with_an_impossible_block_is_refused(value):
    assert f"block_tokens is {value!r}" in refusal(
        dataclasses.replace, ROWS[RowKind.NONE], block_tokens=value
    )
