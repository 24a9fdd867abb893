"""The oracle of the layout tests: what a pool's elements are, and the canonical bytes that follow.

A part's elements are one array ``[layer, slot, head, element]`` of random bits, whatever the layout; it is
written into a buffer, and looked for in a payload, by its definition, one axis after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pool_doubles import TensorDouble

from ucm_core.flow.copy import EngineBlocks
from ucm_core.spec.rows import SpecRow
from ucm_core.store.geometry import Geometry

POISON = 0xA5


def raw(tensor: Any) -> np.ndarray:
    """The bits of a tensor, a double's or torch's, shared with it."""
    if isinstance(tensor, TensorDouble):
        return tensor.raw
    import torch

    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(bits).numpy().view(f"u{tensor.element_size()}")


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], item_bytes: int) -> np.ndarray:
    return rng.integers(0, 1 << (8 * item_bytes), shape, dtype=f"u{item_bytes}")


def place(layout: str, page: int, layer: Any, slot: Any, head: Any, element: Any) -> tuple[Any, ...]:
    """Where SGLang keeps an element (contract 4.4), as an index into the buffer."""
    return {
        "layer_first": (layer, slot, head, element),
        "page_first": (slot, layer, head, element),
        "page_first_direct": (slot // page, layer, slot % page, head, element),
        "page_head": (slot // page, head, slot % page, layer, element),
    }[layout]


def write(buffer: Any, values: np.ndarray, layout: str, page: int) -> None:
    """Put ``values[layer, slot, head, element]`` where they belong."""
    raw(buffer)[place(layout, page, *np.indices(values.shape))] = values


def read(buffer: Any, shape: tuple[int, ...], layout: str, page: int) -> np.ndarray:
    """The pool's elements as ``[layer, slot, head, element]``."""
    found: np.ndarray = raw(buffer)[place(layout, page, *np.indices(shape))]
    return found


def payload(row: SpecRow, units: list[list[np.ndarray]]) -> np.ndarray:
    """Canonical bytes of one object: per unit its parts, dense, one after the other; units at the stride."""
    geometry = Geometry.of_row(row)
    found = np.zeros((geometry.shards, geometry.stride), np.uint8)
    for shard, parts in enumerate(units):
        data = b"".join(part.tobytes() for part in parts)
        found[shard, : len(data)] = np.frombuffer(data, np.uint8)
    return found.reshape(-1)


def gathered(row: SpecRow, blocks: EngineBlocks, count: int) -> np.ndarray:
    payloads = np.zeros((count, Geometry.of_row(row).payload_bytes), np.uint8)
    blocks.gather(np.arange(count), addresses(payloads))
    return payloads


def addresses(payloads: np.ndarray) -> np.ndarray:
    return payloads.ctypes.data + payloads.strides[0] * np.arange(len(payloads), dtype=np.int64)


def indices_of(pages: list[int], page: int) -> np.ndarray:
    """As SGLang hands them over: each page's slots, consecutive."""
    return (np.asarray(pages, np.int64)[:, None] * page + np.arange(page)).reshape(-1)
