"""Geometry: the documented numbers, and the limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import SpecError
from ucm_core.spec.table import Part, RowKind, SpecRow
from ucm_core.store.geometry import Geometry

shapes = st.tuples(st.integers(1, 896), st.integers(1, 2**40))


def test_the_worked_example_of_mla():
    parts = (Part("latent", (256,), "bfloat16"),)
    geometry = Geometry.of_row(SpecRow("mla", RowKind.CHAIN, 128, tuple(range(8)), parts))
    assert (geometry.shard_bytes, geometry.payload_bytes) == (65_536, 524_288)
    assert geometry.object_bytes == 528_384


def test_a_unit_that_is_no_multiple_of_a_page_is_padded():
    assert Geometry(2, 3_098_112).stride == 3_100_672


def test_an_object_that_no_slot_holds_is_refused_with_both_numbers():
    parts = (Part("k", (1 << 28,), "int8"),)
    with pytest.raises(SpecError, match=r"row 'full': an object of 4294967296 bytes .* 2147483648"):
        Geometry.of_row(SpecRow("full", RowKind.CHAIN, 16, (0,), parts))


@given(shapes)
def test_shards_lie_on_pages_and_do_not_overlap(shape):
    geometry = Geometry(*shape)
    assert geometry.stride % 4096 == 0
    assert 0 <= geometry.stride - geometry.shard_bytes < 4096
    assert geometry.object_bytes == 4096 + geometry.shards * geometry.stride


@given(shapes, shapes)
def test_digests_are_equal_exactly_for_equal_shapes(one, other):
    assert (Geometry(*one).digest == Geometry(*other).digest) == (one == other)
    assert len(Geometry(*one).digest) == 32


@pytest.mark.parametrize(("shards", "shard_bytes"), [(0, 1), (897, 1), (1, 0), (-1, 8), (8, -1)])
def test_impossible_shapes_are_refused_with_the_number(shards, shard_bytes):
    with pytest.raises(SpecError, match=str(shards if shard_bytes == 1 or shards < 1 else shard_bytes)):
        Geometry(shards, shard_bytes)
