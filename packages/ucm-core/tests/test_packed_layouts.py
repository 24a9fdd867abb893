"""Packed engine layouts: one storage for all layers, K and V side by side, in every order of the axes.

vLLM's orders (`kv_cache_layout`) are the physical orders of the logical [L, B, H, N, C]: layers, blocks,
heads, tokens, and per token K and V, one after the other or element by element. The oracle is numpy's
indexing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.flow.copy import EngineBlocks
from ucm_core.spec.layout import EngineLayout, PartLayout, block_pieces

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
LAYERS, BLOCKS, HEADS, TOKENS, DIM, ITEM = 3, 5, 2, 4, 6, 2
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * DIM}
UNIT_BYTES = TOKENS * HEADS * 2 * DIM * ITEM
PAD_BYTES = 40
"""Before the first and behind every block: an engine pads, or keeps other groups there."""


@dataclass
class Packed:
    """Stands for an engine's storage; ``data[layer, block, head, token, k or v, element]`` is a view."""

    storage: npt.NDArray[np.uint8]
    data: npt.NDArray[np.uint16]

    @classmethod
    def of(cls, order: str, *, interleaved: bool, block_pad: int = 0, seed: int = 0) -> Packed:
        strides, step = {}, ITEM
        for axis in reversed(order):
            strides[axis] = step
            step *= SIZES[axis]
            step += block_pad if axis == "B" else 0
        storage = np.random.default_rng(seed).integers(0, 256, PAD_BYTES + step, dtype=np.uint8)
        kv, element = (ITEM, 2 * ITEM) if interleaved else (DIM * ITEM, ITEM)
        data = np.ndarray(
            (LAYERS, BLOCKS, HEADS, TOKENS, 2, DIM),
            np.uint16,
            storage,
            offset=PAD_BYTES,
            strides=(*(strides[axis] for axis in "LBHN"), kv, element),
        )
        return cls(storage, data)

    def layout(self) -> EngineLayout:
        """What an adapter says of it: base, block stride, layer stride in the base, strides of the rest."""
        layer, block, head, token, kv, element = self.data.strides
        base = self.data.ctypes.data
        parts = [
            PartLayout(
                base + unit * layer + part * kv, block, token, head, element, HEADS, DIM, ITEM,
                unit * UNIT_BYTES + part * UNIT_BYTES // 2,
            )
            for unit, part in itertools.product(range(LAYERS), range(2))
        ]  # fmt: skip
        return EngineLayout(TOKENS, tuple(parts))

    def canonical(self, pages: list[int]) -> npt.NDArray[np.uint8]:
        """``uint8[layers x unit_bytes]`` of tokens that lie in ``pages``: parts in order, token-major."""
        tokens = self.data[:, pages].transpose(0, 4, 1, 3, 2, 5)  # [layer, part, page, token, head, element]
        return np.ascontiguousarray(tokens).view(np.uint8).reshape(-1)


def blocks_of(packed: Packed, pages: list[int], *, per_block: int = 1) -> EngineBlocks:
    tokens = per_block * TOKENS
    first = np.arange(0, len(pages) * TOKENS, tokens)
    pieces = block_pieces(first, tokens, page_ids=pages, page_tokens=TOKENS)
    return EngineBlocks([packed.layout()], pieces, block_tokens=tokens)


def gathered(packed: Packed, pages: list[int]) -> npt.NDArray[np.uint8]:
    payloads = np.zeros((len(pages), LAYERS * UNIT_BYTES), dtype=np.uint8)
    blocks_of(packed, pages).gather(np.arange(len(pages)), addresses(payloads))
    return payloads


def addresses(payloads: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    return payloads.ctypes.data + payloads.strides[0] * np.arange(len(payloads), dtype=np.int64)


@pytest.mark.parametrize("interleaved", [False, True], ids=["K then V", "K and V by element"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_gives_the_same_canonical_bytes(order: str, interleaved: bool) -> None:
    packed = Packed.of(order, interleaved=interleaved, block_pad=PAD_BYTES)
    pages = [4, 1, 2]
    for payload, page in zip(gathered(packed, pages), pages, strict=True):
        assert np.array_equal(payload, packed.canonical([page]))


@given(
    orders=st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)),
    interleaved=st.tuples(st.booleans(), st.booleans()),
    pages=st.permutations(range(1, BLOCKS)),
    count=st.integers(1, BLOCKS - 1),
)
def test_one_engines_bytes_land_in_anothers_and_nowhere_else(
    orders: tuple[str, str], interleaved: tuple[bool, bool], pages: list[int], count: int
) -> None:
    source = Packed.of(orders[0], interleaved=interleaved[0], block_pad=8)
    target = Packed.of(orders[1], interleaved=interleaved[1], block_pad=16, seed=1)
    before, used = target.storage.copy(), pages[:count]
    payloads = gathered(source, list(range(1, count + 1)))
    blocks_of(target, used).scatter(np.arange(count), addresses(payloads))
    assert np.array_equal(target.data[:, used], source.data[:, 1 : count + 1])
    target.data[:, used] = np.ndarray(
        target.data.shape, np.uint16, before, offset=PAD_BYTES, strides=target.data.strides
    )[:, used]
    assert np.array_equal(target.storage, before), "padding and other blocks are untouched"


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_of_two_pages_is_token_major_over_both(order: str) -> None:
    packed = Packed.of(order, interleaved=False)
    payload = np.zeros((1, 2 * LAYERS * UNIT_BYTES), dtype=np.uint8)
    parts = tuple(replace(part, canonical_offset=2 * part.canonical_offset) for part in packed.layout().parts)
    pieces = block_pieces(np.array([0]), 2 * TOKENS, page_ids=[3, 1], page_tokens=TOKENS)
    EngineBlocks([EngineLayout(TOKENS, parts)], pieces, block_tokens=2 * TOKENS).gather(
        np.array([0]), addresses(payload)
    )
    assert np.array_equal(payload[0], packed.canonical([3, 1]))


def test_heads_of_one_rank_are_a_slice_of_the_canonical_bytes() -> None:
    packed = Packed.of("LBNHC", interleaved=False)
    whole = gathered(packed, [2])[0].view(np.uint16).reshape(LAYERS, 2, TOKENS, HEADS, DIM)
    for rank in range(HEADS):
        own = Packed(packed.storage, packed.data[:, :, rank : rank + 1])
        layer, block, head, token, kv, element = own.data.strides
        half = UNIT_BYTES // 2 // HEADS
        parts = tuple(
            PartLayout(
                own.data.ctypes.data + unit * layer + part * kv, block, token, head, element, 1, DIM, ITEM,
                (2 * unit + part) * half,
            )
            for unit, part in itertools.product(range(LAYERS), range(2))
        )  # fmt: skip
        payload = np.zeros((1, LAYERS * 2 * half), dtype=np.uint8)
        pieces = block_pieces(np.array([0]), TOKENS, page_ids=[2], page_tokens=TOKENS)
        EngineBlocks([EngineLayout(TOKENS, parts)], pieces).gather(np.array([0]), addresses(payload))
        segment = payload[0].view(np.uint16).reshape(LAYERS, 2, TOKENS, DIM)
        assert np.array_equal(segment, whole[:, :, :, rank])
