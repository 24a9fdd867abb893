"""Gather and scatter against a numpy twin, byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core import _native


@dataclass(frozen=True, slots=True)
class Case:
    """An engine's buffer, the layout of its parts, and pieces of it."""

    parts: np.ndarray
    pieces: np.ndarray
    engine: np.ndarray
    payloads: np.ndarray

    @property
    def addresses(self) -> np.ndarray:
        return self.payloads.ctypes.data + self.payloads.shape[1] * np.arange(len(self.payloads))

    @property
    def placed(self) -> np.ndarray:
        """The parts with real addresses instead of offsets into the engine's buffer."""
        parts = self.parts.copy()
        parts[:, 0] += self.engine.ctypes.data
        return parts


def pairs(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every copied byte: its place in the engine's buffer, its payload, its place there."""
    engine, payload, canonical = [], [], []
    for part, piece in itertools.product(case.parts.tolist(), case.pieces.tolist()):
        base, page_stride, token_stride, head_stride, dim_stride, heads, dim, item, offset = part
        index, in_block, page, in_page, count = piece
        for t, h, d, b in itertools.product(range(count), range(heads), range(dim), range(item)):
            place = page * page_stride + (in_page + t) * token_stride + h * head_stride + d * dim_stride
            engine.append(base + place + b)
            payload.append(index)
            canonical.append(offset + (((in_block + t) * heads + h) * dim + d) * item + b)
    return np.array(engine, dtype=int), np.array(payload, dtype=int), np.array(canonical, dtype=int)


@st.composite
def cases(draw) -> Case:
    """Random layouts: any order of the axes, any gap behind each, two parts side by side."""
    page_tokens, pages = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    block_tokens, payload_count = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    parts, base, offset = [], 0, 0
    for _ in range(draw(st.integers(1, 2))):
        heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 5))
        item = draw(st.sampled_from([1, 2, 3, 4, 8]))
        strides, size = [0, 0, 0, 0], item
        extents = [pages, page_tokens, heads, dim]
        for axis in draw(st.permutations(range(4))):
            strides[axis] = size
            size = size * extents[axis] + draw(st.sampled_from([0, 0, item]))
        parts.append([base, *strides, heads, dim, item, offset])
        base, offset = base + size, offset + block_tokens * heads * dim * item
    pieces = draw(st.lists(piece_rows(page_tokens, pages, block_tokens, payload_count), max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Case(
        np.array(parts, dtype=np.int64),
        np.array(pieces, dtype=np.int64).reshape(-1, 5),
        rng.integers(0, 256, base, dtype=np.uint8),
        rng.integers(0, 256, (payload_count, offset), dtype=np.uint8),
    )


@st.composite
def piece_rows(draw, page_tokens: int, pages: int, block_tokens: int, payload_count: int) -> list[int]:
    count = draw(st.integers(0, min(page_tokens, block_tokens)))
    return [
        draw(st.integers(0, payload_count - 1)),
        draw(st.integers(0, block_tokens - count)),
        draw(st.integers(0, pages - 1)),
        draw(st.integers(0, page_tokens - count)),
        count,
    ]


def one_by_one(case: Case) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The pairs of each piece in turn: where two pieces write one place, the later one wins."""
    for number in range(len(case.pieces)):
        yield pairs(Case(case.parts, case.pieces[number : number + 1], case.engine, case.payloads))


@given(cases())
def test_gather_equals_the_twin(case):
    expected, before = case.payloads.copy(), case.engine.copy()
    for engine, payload, canonical in one_by_one(case):
        expected[payload, canonical] = case.engine[engine]
    _native.gather(case.placed, case.pieces, case.addresses, payload_bytes=case.payloads.shape[1])
    np.testing.assert_array_equal(case.payloads, expected)
    np.testing.assert_array_equal(case.engine, before)


@given(cases())
def test_scatter_equals_the_twin(case):
    expected, before = case.engine.copy(), case.payloads.copy()
    for engine, payload, canonical in one_by_one(case):
        expected[engine] = case.payloads[payload, canonical]
    _native.scatter(case.placed, case.pieces, case.addresses)
    np.testing.assert_array_equal(case.engine, expected)
    np.testing.assert_array_equal(case.payloads, before)


@pytest.mark.parametrize("size", [4095, 4096, 4097, 4159, 4160, 70_001])
@pytest.mark.parametrize("engine_at", [0, 1, 16, 63])
@pytest.mark.parametrize("payload_at", [0, 17])
def test_long_runs_are_copied_whole_wherever_they_lie_and_nothing_beside_them(size, engine_at, payload_at):
    engine = np.random.default_rng(size).integers(0, 256, size + 128, dtype=np.uint8)
    payload, back = np.zeros(size + 128, dtype=np.uint8), np.zeros(size + 128, dtype=np.uint8)
    address = np.array([payload.ctypes.data + payload_at])
    for call, memory in ((_native.gather, engine), (_native.scatter, back)):
        part = [memory.ctypes.data + engine_at, size, size, size, 1, 1, size, 1, 0]
        call(np.array([part]), np.array([[0, 0, 0, 0, 1]]), address)
    there, here = slice(payload_at, payload_at + size), slice(engine_at, engine_at + size)
    assert (payload[there] == engine[here]).all()
    assert (back[here] == engine[here]).all()
    assert not np.concatenate([np.delete(payload, there), np.delete(back, here)]).any()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize(("tokens", "dim"), [(16, 64), (33, 128), (128, 80), (1, 7)])
def test_keys_that_lie_transposed_come_out_token_major(dtype, tokens, dim):
    """Like the keys of vLLM on CPU: [page, head, dim, token]."""
    engine = np.random.default_rng(3).integers(0, 200, (5, 2, dim, tokens)).astype(dtype)
    item = engine.itemsize
    page, head = 2 * dim * tokens * item, dim * tokens * item
    parts = np.array([[engine.ctypes.data, page, item, head, tokens * item, 2, dim, item, 0]])
    payload = np.zeros((2, tokens, 2, dim), dtype=dtype)
    addresses = payload.ctypes.data + payload[0].nbytes * np.arange(2)
    pieces = np.array([[0, 0, 4, 0, tokens], [1, 0, 2, 0, tokens]])
    _native.gather(parts, pieces, addresses)
    np.testing.assert_array_equal(payload, engine[[4, 2]].transpose(0, 3, 1, 2))
    back = np.zeros_like(engine)
    parts[0, 0] = back.ctypes.data
    _native.scatter(parts, pieces, addresses)
    np.testing.assert_array_equal(back[[4, 2]], engine[[4, 2]])
    assert not back[[0, 1, 3]].any()


def dense(memory: np.ndarray) -> np.ndarray:
    return np.array([[memory.ctypes.data, 4096, 64, 16, 2, 4, 8, 2, 0]])


PIECE = [0, 0, 0, 0, 4]


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        ([1, 0, 0, 0, 4], r"payload_index 1 is not in \[0, 1\)"),
        ([-1, 0, 0, 0, 4], "payload_index -1"),
        ([0, -1, 0, 0, 4], "token_in_block -1"),
        ([0, 0, -1, 0, 4], "page_id -1"),
        ([0, 0, 0, -1, 4], "token_in_page -1"),
        ([0, 0, 0, 0, -4], "token_count -4"),
        ([0, 61, 0, 0, 4], "ends at byte 4160 of a payload of 4096 bytes"),
    ],
)
@pytest.mark.parametrize("call", [_native.gather, _native.scatter])
def test_a_piece_out_of_bounds_is_refused_before_any_byte_moves(call, piece, words):
    memory, payload = np.ones(4096, dtype=np.uint8), np.zeros(4096, dtype=np.uint8)
    pieces = np.array([PIECE, piece])
    with pytest.raises(ValueError, match=words):
        call(dense(memory), pieces, np.array([payload.ctypes.data]), payload_bytes=4096)
    assert memory.all()
    assert not payload.any()


@pytest.mark.parametrize(("column", "value"), [(5, 0), (6, -1), (7, 0), (8, -1)])
def test_a_part_that_is_no_shape_is_refused(column, value):
    parts = dense(np.ones(4096, dtype=np.uint8))
    parts[0, column] = value
    with pytest.raises(ValueError, match="part 0"):
        _native.gather(parts, np.array([PIECE]), np.array([0]))


@pytest.mark.parametrize(("parts", "pieces"), [((1, 8), (1, 5)), ((1, 9), (1, 4))])
def test_wrong_columns_are_refused(parts, pieces):
    with pytest.raises(ValueError, match="columns"):
        _native.gather(
            np.ones(parts, dtype=np.int64), np.ones(pieces, dtype=np.int64), np.ones(2, dtype=np.int64)
        )


def test_arrays_are_never_converted():
    rows, addresses = np.ones((1, 5), dtype=np.int64), np.ones(1, dtype=np.int64)
    with pytest.raises(TypeError):
        _native.gather(np.ones((1, 9), dtype=np.int32), rows, addresses)
    with pytest.raises(TypeError):
        _native.gather(np.ones((1, 18), dtype=np.int64)[:, ::2], rows, addresses)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 40), st.integers(0, 40))
def test_padding_is_zeroed_and_nothing_else(payloads, shards, shard_bytes, gap):
    memory = np.full((payloads, shards, shard_bytes + gap), 7, dtype=np.uint8)
    addresses = memory.ctypes.data + shards * (shard_bytes + gap) * np.arange(payloads)
    _native.zero_padding(addresses, shards, shard_bytes, shard_bytes + gap)
    assert (memory[:, :, :shard_bytes] == 7).all()
    assert not memory[:, :, shard_bytes:].any()


def test_padding_longer_than_the_stride_is_refused():
    with pytest.raises(ValueError, match=r"shard_bytes 5 is not in \[0, 4\]"):
        _native.zero_padding(np.zeros(0, dtype=np.int64), 1, 5, 4)
