"""Copies between arrays, engine memory and payloads, compared with plain numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import LayoutError
from ucm_core.flow.copy import BufferBlocks, EngineBlocks

Int64s = npt.NDArray[np.int64]


def addresses_of(payloads: npt.NDArray[np.uint8]) -> Int64s:
    return payloads.ctypes.data + payloads.strides[0] * np.arange(len(payloads), dtype=np.int64)


def ints(*values: int) -> Int64s:
    return np.array(values, dtype=np.int64)


@dataclass
class Layout:
    """Stands for an engine layout: its table is all that `EngineBlocks` reads."""

    table: Int64s


def two_part_layout(pool: npt.NDArray[np.uint8], page_tokens: int) -> Layout:
    """``pool[pages, 2, tokens, 8]``: K and V of one head of 8 bytes; canonical: 4 tokens of K, then of V."""
    page, part, token, _ = pool.strides
    base = pool.ctypes.data
    rows = [(base + k * part, page, token, 8, 1, 1, 8, 1, k * 4 * 8) for k in range(2)]
    return Layout(np.array(rows, dtype=np.int64))


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 7, 4096, 5000]), st.data())
def test_buffers_gather_and_scatter_as_numpy_does(
    objects: int, shards: int, size: int, data: st.DataObject
) -> None:
    source = np.random.default_rng(size).integers(0, 256, (objects, shards, size), dtype=np.uint8)
    index = ints(*data.draw(st.lists(st.integers(0, objects - 1), max_size=6)))
    blocks = BufferBlocks(source)
    payloads = np.zeros((len(index), shards, blocks.stride), dtype=np.uint8)
    blocks.gather(index, addresses_of(payloads))
    assert np.array_equal(payloads[:, :, :size], source[index])
    assert not payloads[:, :, size:].any()
    back = np.zeros_like(source)
    BufferBlocks(back).scatter(index, addresses_of(payloads))
    assert np.array_equal(back[np.unique(index)], source[np.unique(index)])


def test_a_buffer_may_be_a_view() -> None:
    whole = np.arange(2 * 4 * 10, dtype=np.uint8).reshape(2, 4, 10)
    view = whole[:, 1:3, 2:7]
    payloads = np.zeros((2, 2, 4096), dtype=np.uint8)
    BufferBlocks(view).gather(ints(0, 1), addresses_of(payloads))
    assert np.array_equal(payloads[:, :, :5], view)


def test_a_buffer_may_be_a_part_of_every_unit() -> None:
    part = np.full((1, 2, 3), 7, dtype=np.uint8)
    payloads = np.zeros((1, 2, 8192), dtype=np.uint8)
    BufferBlocks(part, offset=10, unit_bytes=5000).gather(ints(0), addresses_of(payloads))
    assert (payloads[0, :, 10:13] == 7).all()
    assert payloads.sum() == 2 * 3 * 7


@pytest.mark.parametrize(
    ("payloads", "message"),
    [
        (np.zeros((2, 3), dtype=np.uint8), r"uint8\[2, 3\]"),
        (np.zeros((1, 2, 3), dtype=np.int8), r"int8\[1, 2, 3\]"),
        (np.zeros((1, 2, 6), dtype=np.uint8)[:, :, ::2], "stride of 2"),
    ],
)
def test_a_buffer_of_another_shape_is_refused(payloads: npt.NDArray[np.uint8], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        BufferBlocks(payloads)


@pytest.mark.parametrize(("offset", "unit_bytes"), [(-1, 8), (6, 8), (0, 2)])
def test_a_part_must_fit_its_unit(offset: int, unit_bytes: int) -> None:
    with pytest.raises(LayoutError, match=f"3 bytes at {offset} do not fit a unit of {unit_bytes} bytes"):
        BufferBlocks(np.zeros((1, 1, 3), dtype=np.uint8), offset=offset, unit_bytes=unit_bytes)


@pytest.mark.parametrize("index", [-1, 2])
def test_an_object_outside_of_the_buffer_is_refused(index: int) -> None:
    payloads = np.zeros((1, 1, 4096), dtype=np.uint8)
    with pytest.raises(LayoutError, match=f"object {index} of an array that holds 2"):
        BufferBlocks(np.zeros((2, 1, 8), dtype=np.uint8)).gather(ints(index), addresses_of(payloads))


def test_a_read_only_buffer_is_no_target() -> None:
    buffer = np.zeros((1, 1, 8), dtype=np.uint8)
    buffer.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        BufferBlocks(buffer).scatter(ints(0), ints(0))


def test_engine_pages_go_to_blocks_and_back() -> None:
    pool = np.random.default_rng(0).integers(0, 256, (6, 2, 2, 8), dtype=np.uint8)  # pages of 2 tokens
    # object 0 = pages 5, 1; object 1 = pages 2, 4; rows in no order
    pieces = np.array([[1, 2, 4, 0, 2], [0, 0, 5, 0, 2], [1, 0, 2, 0, 2], [0, 2, 1, 0, 2]], dtype=np.int64)
    blocks = EngineBlocks([two_part_layout(pool, 2)], pieces, block_tokens=4)
    payloads = np.zeros((3, 64), dtype=np.uint8)
    blocks.gather(ints(1, 0, 1), addresses_of(payloads))
    expected = [
        np.concatenate([pool[p, k] for k in range(2) for p in pages]) for pages in ([2, 4], [5, 1], [2, 4])
    ]
    assert np.array_equal(payloads, np.stack(expected).reshape(3, 64))
    before = pool.copy()
    pool[:] = 0
    blocks.scatter(ints(0, 1), addresses_of(payloads[1:]))
    assert np.array_equal(pool[[5, 1, 2, 4]], before[[5, 1, 2, 4]])
    assert not pool[[0, 3]].any()


def test_each_layout_has_its_own_pieces() -> None:
    pools = [np.full((2, 2, 4, 8), fill, dtype=np.uint8) for fill in (1, 2)]
    layouts = [two_part_layout(pool, 4) for pool in pools]
    layouts[1].table[:, 8] += 64
    pieces = [np.array([[0, 0, page, 0, 4]], dtype=np.int64) for page in (0, 1)]
    payloads = np.zeros((1, 128), dtype=np.uint8)
    EngineBlocks(layouts, pieces).gather(ints(0), addresses_of(payloads))
    assert payloads[0].tolist() == [1] * 64 + [2] * 64
    with pytest.raises(LayoutError, match="2 layouts but 1 arrays of pieces"):
        EngineBlocks(layouts, pieces[:1])


def test_a_block_that_its_pieces_do_not_cover_is_not_gathered() -> None:
    pool = np.zeros((2, 2, 4, 8), dtype=np.uint8)
    pieces = np.array([[0, 0, 0, 0, 4], [1, 0, 1, 0, 3]], dtype=np.int64)
    blocks = EngineBlocks([two_part_layout(pool, 4)], pieces, block_tokens=4)
    payloads = np.zeros((1, 64), dtype=np.uint8)
    blocks.gather(ints(0), addresses_of(payloads))
    with pytest.raises(LayoutError, match="object 1 cover 3 tokens of a block of 4"):
        blocks.gather(ints(1), addresses_of(payloads))
    with pytest.raises(LayoutError, match="cover 0 tokens"):
        blocks.gather(ints(7), addresses_of(payloads))
