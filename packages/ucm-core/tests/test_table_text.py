"""Spec tables written by hand: round trips, and errors that name the place."""

import json
from pathlib import Path

import pytest

from ucm_core.errors import SpecError
from ucm_core.spec.table import Part, RankRule, RowKind, SpecRow, SpecTable

YAML = """
grain_tokens: 64
rows:
  - name: full
    kind: chain
    block_tokens: 128
    units: ["0-2", 5]
    rank_rule: all_union
    parts:
      - {name: k, shape: [2, 32], dtype: bfloat16, tokens_per_entry: 2}
  - {name: scale, kind: follower, block_tokens: 128, units: "0-2", follows: full,
     parts: [{name: s, shape: [1], dtype: float32}]}
  - {name: state, kind: snapshot, block_tokens: 64, interval: 256, units: 3,
     parts: [{name: ssm, shape: [4, 4], dtype: float32}]}
  - {name: window, kind: chain, block_tokens: 64, window: 100, extra: 2, units: [4],
     parts: [{name: k, shape: [2], dtype: int8}]}
  - {name: cross, kind: none, units: [6]}
"""

ROW = {"name": "full", "kind": "chain", "block_tokens": 64, "units": [0], "parts": []}
PART = {"name": "k", "shape": [2], "dtype": "int8"}
ROW["parts"] = [PART]


def table_with(row):
    return SpecTable.from_mapping({"grain_tokens": 64, "rows": [row]})


def test_yaml_says_what_the_constructor_says():
    full = SpecRow(
        "full",
        RowKind.CHAIN,
        128,
        (0, 1, 2, 5),
        (Part("k", (2, 32), "bfloat16", tokens_per_entry=2),),
        rank_rule=RankRule.ALL_UNION,
    )
    table = SpecTable.from_yaml(YAML)
    assert table.rows[0] == full
    assert [row.name for row in table.rows] == ["full", "scale", "state", "window", "cross"]
    assert table.row("state").interval == 256
    assert (table.row("window").window, table.row("window").extra) == (100, 2)
    assert table.row("scale").follows == "full"


def test_mapping_and_json_round_trips_keep_every_field():
    table = SpecTable.from_yaml(YAML)
    mapping = table.to_mapping()
    assert SpecTable.from_mapping(mapping) == table
    assert SpecTable.from_yaml(json.dumps(mapping)) == table


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blok_tokens": 64}, "row 'full' has the unknown key 'blok_tokens'; did you mean block_tokens?"),
        ({"zzz": 1}, "unknown key 'zzz'; it may have name, kind"),
        ({"kind": "chian"}, "row 'full': kind is 'chian'; did you mean chain?"),
        ({"rank_rule": "union"}, "row 'full': rank_rule is 'union'; did you mean all_union?"),
        ({"units": None}, "row 'full' lacks units"),
        ({"units": ["3-x"]}, "units '3-x' is no layer range"),
        ({"units": ["2-0", 5]}, "units '2-0' is no layer range"),
        ({"units": "0-99999"}, "units '0-99999' is no layer range"),
        ({"units": [1.5]}, "units must be a whole number, got 1.5"),
        ({"block_tokens": "64"}, "block_tokens must be a whole number, got '64'"),
        ({"window": True}, "window must be a whole number, got True"),
        ({"parts": "k"}, "parts must be a list"),
        (
            {"parts": [PART | {"shap": [2]}]},
            "row 'full', a part has the unknown key 'shap'; did you mean shape?",
        ),
        ({"parts": [{"name": "k", "dtype": "int8"}]}, "row 'full', a part lacks shape"),
        ({"parts": [PART | {"shape": 2}]}, "part 'k': shape must be a list"),
        ({"parts": [PART | {"dtype": 8}]}, "part 'k': dtype must be text"),
        ({"name": 7}, "row 0: name must be text"),
    ],
)
def test_errors_name_the_row_and_the_key(fields, message):
    with pytest.raises(SpecError) as caught:
        table_with(ROW | fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: [", "not YAML"),
        ("rows: 2001-99-99", "not YAML"),
        ("rows: " + "9" * 5000, "not YAML"),
        ("[" * 5000, "not YAML"),
        (None, "not YAML"),
        ("- 1", "the table must be a mapping, got list"),
        ("grain_tokens: 64", "the table lacks rows"),
        ("{grain_tokens: 64, rows: [1]}", "row 0 must be a mapping, got int"),
        ("{grain_tokens: 64, rows: [], row: []}", "unknown key 'row'; did you mean rows?"),
    ],
)
def test_text_that_is_no_table_is_refused(text, message):
    with pytest.raises(SpecError) as caught:
        SpecTable.from_yaml(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("field", ["name", "kind", "units", "window", "follows", "parts"])
def test_a_value_that_unfolds_to_a_giant_is_refused_in_few_words(field):
    giant = ["x"]
    for _ in range(9):  # what aliases in a YAML file make
        giant = [giant] * 9
    with pytest.raises(SpecError) as caught:
        table_with(ROW | {field: giant})
    assert len(str(caught.value)) < 500


def test_the_table_in_the_documents_is_one():
    document = (Path(__file__).parents[3] / "docs" / "tables.md").read_text(encoding="utf-8")
    table = SpecTable.from_yaml(document.split("```yaml\n")[1].split("```")[0])
    assert {row.kind for row in table.rows} == set(RowKind)
    assert table.alignment_tokens == 16_384
    assert table.row("c128").part_entries(table.row("c128").parts[0]) == 128
    assert SpecTable.from_mapping(table.to_mapping()) == table
