"""Device pools as SGLang has them, in plain memory: what the adapter reads of them, without an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace

import numpy as np

from benchmarks.rig import Bytes
from ucm_core import Part, RowKind, SpecRow, SpecTable
from ucm_core.spec.rows import RankRule
from ucm_sglang.device_pools import DeviceTokens
from ucm_sglang.layout_from_engine import MappedPools

PAGE_TOKENS = 64
DTYPE, ITEM_BYTES = "bfloat16", 2


@dataclass(frozen=True, slots=True)
class Device:
    """Where a tensor is."""

    type: str = "cpu"


@dataclass(frozen=True, slots=True)
class Tensor:
    """Stands for a tensor of `DTYPE` on the CPU."""

    memory: Bytes
    shape: tuple[int, int, int]
    """``[slot, head, element]``, dense."""
    dtype: str = f"torch.{DTYPE}"
    device: Device = Device()

    @classmethod
    def touched(cls, *shape: int) -> Tensor:
        """One whose memory is there."""
        slots, heads, elements = shape
        return cls(np.full(math.prod(shape) * ITEM_BYTES, 7, np.uint8), (slots, heads, elements))

    def stride(self) -> tuple[int, int, int]:
        """In elements."""
        _, heads, elements = self.shape
        return heads * elements, elements, 1

    def element_size(self) -> int:
        """In bytes."""
        return ITEM_BYTES

    def data_ptr(self) -> int:
        """Where it begins."""
        return self.memory.ctypes.data


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The pool of a model whose layers are all alike."""

    name: str
    kind: str
    """SGLang's class."""
    layers: int
    parts: tuple[Part, ...]
    """What UCM keeps of a token and layer."""
    buffers: tuple[tuple[int, int], ...]
    """What SGLang keeps of it: heads and elements of each buffer."""
    rank_rule: RankRule = RankRule.INTERSECTION

    @property
    def row(self) -> SpecRow:
        """The one row of the model."""
        layers = tuple(range(self.layers))
        return SpecRow("full", RowKind.CHAIN, PAGE_TOKENS, layers, self.parts, rank_rule=self.rank_rule)

    @property
    def table(self) -> SpecTable:
        """Of the model."""
        return SpecTable((self.row,), PAGE_TOKENS)

    def memory(self, pages: int) -> MappedPools:
        """So many pages of it, all touched."""
        slots = pages * PAGE_TOKENS
        tensors = [[Tensor.touched(slots, *sizes) for _ in range(self.layers)] for sizes in self.buffers]
        k, v = tensors if len(tensors) == 2 else (None, ())
        pool = DeviceTokens(
            kind=self.kind,
            page_size=PAGE_TOKENS,
            page_num=pages,
            layer_num=self.layers,
            start_layer=0,
            kv_buffer=list(chain(*tensors)),
            k_buffer=k,
            v_buffer=v,
            device_pool=SimpleNamespace(kv_cache_layout="nhd"),
        )
        return MappedPools.of({"kv": pool}, self.table)


HEADS = DevicePool(
    "8 heads of 128, 32 layers",
    "MHATokenToKVPool",
    32,
    tuple(Part(name, (8, 128), DTYPE) for name in "kv"),
    ((8, 128), (8, 128)),
)
LATENTS = DevicePool(
    "latents of 576, 27 layers",
    "MLATokenToKVPool",
    27,
    (Part("latent", (512,), DTYPE), Part("rope", (64,), DTYPE)),
    ((1, 576),),
    RankRule.ALL_UNION,
)
