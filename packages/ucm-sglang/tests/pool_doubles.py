"""Doubles of SGLang's host pools: the attributes that the adapter reads, over numpy memory.

`test_real_host_pools` holds them against the real classes. A double has the real class's name, because that
is how the adapter tells classes apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass
class TensorDouble:
    """What the adapter reads of a torch tensor on the CPU."""

    raw: np.ndarray
    """The elements' bits, as unsigned ints."""
    dtype: str
    device: Any = None

    def __post_init__(self) -> None:
        self.device = self.device or SimpleNamespace(type="cpu")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.raw.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.raw.itemsize for step in self.raw.strides)

    def element_size(self) -> int:
        return self.raw.itemsize

    def data_ptr(self) -> int:
        return self.raw.ctypes.data


def tensor(shape: tuple[int, ...], dtype: str) -> TensorDouble:
    bits = np.dtype(f"u{ITEM_BYTES[dtype]}")
    return TensorDouble(np.zeros(shape, bits), f"torch.{dtype}")


class PoolDouble(SimpleNamespace):
    """A host pool; `renamed` gives it another class name."""

    @classmethod
    def renamed(cls, name: str, **attributes: Any) -> PoolDouble:
        return type(name, (cls,), {})(**attributes)


@dataclass(frozen=True)
class TokenShape:
    """How many of what a pool of tokens has."""

    layers: int = 3
    pages: int = 5
    page: int = 4
    heads: int = 2
    dim: int = 8

    def axes(self, layout: str) -> tuple[int, ...]:
        slots = self.pages * self.page
        return {
            "layer_first": (self.layers, slots, self.heads, self.dim),
            "page_first": (slots, self.layers, self.heads, self.dim),
            "page_first_direct": (self.pages, self.layers, self.page, self.heads, self.dim),
            "page_head": (self.pages, self.heads, self.page, self.layers, self.dim),
        }[layout]

    def common(self, layout: str) -> dict[str, Any]:
        return {
            "layout": layout, "page_size": self.page, "page_num": self.pages, "size": self.pages * self.page,
            "layer_num": self.layers, "target_layer_num": self.layers, "start_layer": 0, "dcp_size": 1,
        }  # fmt: skip


def attention_pool(shape: TokenShape, layout: str, /, dtype: str = "float32", **more: Any) -> PoolDouble:
    k, v = (tensor(shape.axes(layout), dtype) for _ in range(2))
    buffers = {"kv_buffer": (k, v), "k_buffer": k, "v_buffer": v, "_buffer_infos": device_infos("nhd")}
    attributes = shape.common(layout) | buffers | more
    return PoolDouble.renamed("MHATokenToKVPoolHost", **attributes)


def device_infos(order: str) -> tuple[Any, ...]:
    """What a host pool knows of its device pool: the order of a page there."""
    return (SimpleNamespace(buffers=SimpleNamespace(layout=SimpleNamespace(value=order))),)


def latent_pool(shape: TokenShape, layout: str, dtype: str = "float32", **more: Any) -> PoolDouble:
    """``shape`` has one head, of the width of an entry."""
    attributes = {"kv_buffer": tensor(shape.axes(layout), dtype), "_layer_shard_enabled": False}
    return PoolDouble.renamed("MLATokenToKVPoolHost", **(shape.common(layout) | attributes | more))


def state_pool(
    conv: tuple[int, ...], ssm: tuple[int, ...], *, layers: int = 3, slots: int = 5, **more: Any
) -> PoolDouble:
    """Convolutions are bfloat16 and matrices float32; ``conv`` is as it stands in the pool."""
    window, matrix = (
        tensor((slots, layers, 1, *conv), "bfloat16"),
        tensor((slots, layers, 1, *ssm), "float32"),
    )
    attributes = {
        "layout": "page_first_direct", "page_size": 1, "page_num": slots, "size": slots,
        "num_mamba_layers": layers, "conv_buffer": [window], "temporal_buffer": matrix,
        "kv_buffer": [matrix, window], "mtp_draft_buffer_infos": (), "slot_state_buffers": [], "dcp_size": 1,
    }  # fmt: skip
    return PoolDouble.renamed("MambaPoolHost", **(attributes | more))
