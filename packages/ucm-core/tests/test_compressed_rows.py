"""Compressed rows: tokens per block and bytes per block are separate facts, in sums, text and errors."""

import json
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import SpecError
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable


def compressed(block_tokens, tokens_per_entry, *, name="c", kind=RowKind.CHAIN, **fields):
    part = Part("entry", (512,), "bfloat16", tokens_per_entry)
    return SpecRow(name, kind, block_tokens, (0, 3), (part,), **fields)


# A block of 128 entries of 512 bfloat16 elements: equal bytes, other tokens.
@pytest.mark.parametrize(("tokens_per_entry", "block_tokens"), [(1, 128), (4, 512), (128, 16_384)])
def test_a_block_of_128_entries_has_the_same_bytes_whatever_tokens_it_covers(tokens_per_entry, block_tokens):
    row = compressed(block_tokens, tokens_per_entry)
    assert row.part_entries(row.parts[0]) == 128
    assert row.unit_bytes == 128 * 512 * 2
    assert SpecTable((row,), 64).alignment_tokens == block_tokens


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_bytes_of_a_block_are_its_entries_times_their_bytes(entries, tokens_per_entry, size, item):
    part = Part("entry", (size,), {1: "int8", 2: "float16", 4: "float32"}[item], tokens_per_entry)
    row = SpecRow("c", RowKind.CHAIN, entries * tokens_per_entry, (1, 2, 5), (part,))
    covered = [token // tokens_per_entry for token in range(row.block_tokens)]
    assert row.part_entries(part) == len(set(covered))
    assert row.block_bytes == 3 * len(set(covered)) * size * item


def test_parts_of_one_row_may_compress_differently():
    parts = (Part("k", (4,), "int8"), Part("mean", (4,), "float32", 16), Part("top", (2,), "int8", 64))
    row = SpecRow("mixed", RowKind.CHAIN, 128, (0,), parts)
    assert [row.part_entries(part) for part in parts] == [128, 8, 2]
    assert row.unit_bytes == 128 * 4 + 8 * 16 + 2 * 2


def test_a_follower_of_a_compressed_row_has_its_block():
    table = SpecTable(
        (compressed(512, 4), compressed(512, 4, name="key", kind=RowKind.FOLLOWER, follows="c")), 64
    )
    assert table.row("key").unit_bytes == table.row("c").unit_bytes
    assert table.alignment_tokens == 512


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_a_block_that_would_cut_an_entry_is_refused_with_both_numbers(block_tokens, tokens_per_entry):
    if block_tokens % tokens_per_entry == 0:
        assert compressed(block_tokens, tokens_per_entry).unit_bytes
        return
    with pytest.raises(SpecError) as caught:
        compressed(block_tokens, tokens_per_entry)
    assert f"block_tokens {block_tokens} is no multiple of tokens_per_entry {tokens_per_entry}" in str(
        caught.value
    )


def test_a_compressed_row_reads_back_from_yaml_and_json():
    table = SpecTable((compressed(16_384, 128), compressed(512, 4, name="d")), 64)
    mapping = table.to_mapping()
    assert mapping["rows"][0]["parts"][0]["tokens_per_entry"] == 128
    assert SpecTable.from_yaml(yaml.safe_dump(mapping)) == table
    assert SpecTable.from_yaml(json.dumps(mapping)).digest == table.digest
    assert table.alignment_tokens == math.lcm(16_384, 512)


def test_text_names_the_row_whose_block_cuts_an_entry():
    text = """
    grain_tokens: 64
    rows:
      - {name: c128, kind: chain, block_tokens: 64, units: [0],
         parts: [{name: entry, shape: [512], dtype: bfloat16, tokens_per_entry: 128}]}
    """
    with pytest.raises(SpecError, match=r"row 'c128', part 'entry': block_tokens 64 .* tokens_per_entry 128"):
        SpecTable.from_yaml(text)


def test_what_an_entry_stands_for_is_part_of_the_meaning():
    tables = [SpecTable((compressed(16_384, tokens),), 64) for tokens in (1, 4, 16, 128)]
    assert len({table.digest for table in tables}) == len(tables)
