"""Copies between engine memory and canonical payloads, against memcpy of as many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.frame import Figure, side_by_side
from ucm_core import _native

TOTAL_BYTES = 64 << 20
HEADS, DIM, ITEM = 8, 128, 2
ROW = HEADS * DIM * ITEM


@dataclass(frozen=True, slots=True)
class Layout:
    """How an engine keeps one part of a page."""

    name: str
    tokens: int
    token_stride: int
    head_stride: int
    dim_stride: int
    limit: float


LAYOUTS = (
    Layout("contiguous units of 1 MiB", 512, ROW, DIM * ITEM, ITEM, 1.2),
    Layout("heads outside of tokens", 128, DIM * ITEM, 128 * DIM * ITEM, ITEM, 3.0),
    Layout("keys transposed per head", 128, ITEM, 128 * DIM * ITEM, 128 * ITEM, 5.0),
)


def figures() -> Iterator[Figure]:
    """Gather and scatter 64 MiB, page by page in random order."""
    engine = np.random.default_rng(0).integers(0, 256, TOTAL_BYTES, dtype=np.uint8)
    payload = np.ones_like(engine)
    for layout in LAYOUTS:
        yield from both_ways(layout, engine, payload)


def both_ways(layout: Layout, engine: np.ndarray, payload: np.ndarray) -> Iterator[Figure]:
    unit = layout.tokens * ROW
    numbers = np.arange(TOTAL_BYTES // unit)
    order = np.random.default_rng(1).permutation(numbers)
    strides = [layout.token_stride, layout.head_stride, layout.dim_stride]
    parts = np.array([[engine.ctypes.data, unit, *strides, HEADS, DIM, ITEM, 0]])
    pieces = np.stack([numbers, 0 * numbers, order, 0 * numbers, 0 * numbers + layout.tokens], axis=1)
    addresses = payload.ctypes.data + unit * numbers
    into, source = payload.reshape(-1, unit), engine.reshape(-1, unit)

    def copy_units() -> None:
        for number, page in enumerate(order):
            into[number] = source[page]

    for way in (_native.gather, _native.scatter):
        yield side_by_side(
            f"{way.__name__}, {layout.name}",
            partial(way, parts, pieces, addresses),
            peer="memcpy",
            peer_call=copy_units,
            limit=layout.limit,
        )
