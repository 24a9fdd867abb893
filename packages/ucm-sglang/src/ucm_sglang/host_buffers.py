"""Tensors of SGLang's pools with named axes, and where the parts of a row lie in them.

What the axes are, slowest first::

    layer_first        [layer, slot, head, element]
    page_first         [slot, layer, head, element]
    page_first_direct  [page, layer, token, head, element]
    page_head          [page, head, token, layer, element]

A slot is a token's place in the pool; a token, one in a page. A device pool is ``layer_first`` with a tensor
of its own for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ucm_core.errors import LayoutError
from ucm_core.spec.layout import PartLayout
from ucm_core.spec.rows import Part
from ucm_sglang.refusals import refuse

AXES = {
    "layer_first": ("layer", "slot", "head", "element"),
    "page_first": ("slot", "layer", "head", "element"),
    "page_first_direct": ("page", "layer", "token", "head", "element"),
    "page_head": ("page", "head", "token", "layer", "element"),
}
"""SGLang's name of a layout to the axes of a buffer of tokens."""

_WORDS = {
    "layer": "layers",
    "slot": "slots",
    "page": "pages",
    "token": "tokens per page",
    "head": "heads",
    "element": "elements per head",
    "one": "rows of a state",
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """One tensor of a pool."""

    where: str
    """Pool and part, for messages."""
    sizes: Mapping[str, int]
    """Axis to its length, in the order of the tensor."""
    strides: Mapping[str, int]
    """Axis to the bytes from one index to the next."""
    dtype: str
    item_bytes: int
    addresses: tuple[int, ...]
    """Where each layer begins."""

    @classmethod
    def of(cls, where: str, tensor: Any, *, axes: tuple[str, ...]) -> Buffer:
        """Describe ``tensor``, or a list of one per layer, whose axes are then those behind "layer".

        LayoutError for memory that is not the host's, another number of axes, and layers that differ.
        """
        if isinstance(tensor, list | tuple):
            return cls._of_layers([cls.of(where, layer, axes=axes[1:]) for layer in tensor])
        refuse(
            tensor.device.type != "cpu",
            LayoutError(f"{where}: its memory is on {tensor.device}; ucm-sglang copies host memory"),
        )
        shape, item = [*map(int, tensor.shape)], int(tensor.element_size())
        refuse(
            len(shape) != len(axes),
            LayoutError(f"{where}: shape {shape} has {len(shape)} axes, expected {len(axes)}: {axes}"),
        )
        sizes = dict(zip(axes, shape, strict=True))
        strides = dict(zip(axes, (np.asarray(tensor.stride()) * item).tolist(), strict=True))
        begin, step = int(tensor.data_ptr()), strides.get("layer", 0)
        return cls(
            where=where,
            sizes=sizes,
            strides=strides,
            dtype=str(tensor.dtype).removeprefix("torch."),
            item_bytes=item,
            addresses=tuple(begin + layer * step for layer in range(sizes.get("layer", 1))),
        )

    @classmethod
    def _of_layers(cls, layers: Sequence[Buffer]) -> Buffer:
        first = layers[0]
        for number, layer in enumerate(layers):
            refuse(
                layer != replace(first, addresses=layer.addresses),
                LayoutError(f"{first.where}: layer {number} is {layer.shape}, layer 0 {first.shape}"),
            )
        addresses = tuple(layer.addresses[0] for layer in layers)
        return replace(first, sizes={"layer": len(layers), **first.sizes}, addresses=addresses)

    @property
    def shape(self) -> str:
        """For messages."""
        return f"{self.dtype}{[*self.sizes.values()]} with strides of {[*self.strides.values()]} bytes"

    def require(self, dtype: str, sizes: Mapping[str, int]) -> None:
        """LayoutError, with both values, unless the dtype and each axis of ``sizes`` that it has agree."""
        refuse(
            self.dtype != dtype,
            LayoutError(f"{self.where}: elements are {self.dtype} in the pool, expected {dtype}"),
        )
        for axis, size in sizes.items():
            found = self.sizes.get(axis, size)
            refuse(
                found != size,
                LayoutError(f"{self.where}: {found} {_WORDS[axis]} in the pool, expected {size}"),
            )

    def tokens(self, part: Part, page_tokens: int, *, layer: int, element: int, offset: int) -> PartLayout:
        """Where ``part`` of one of the pool's layers lies in a page: of each head, from ``element`` on.

        ``offset`` is where it begins in the payload.
        """
        step = {"token": self.strides.get("slot", 0)} | dict(self.strides)
        return PartLayout(
            base=self.addresses[layer] + element * step["element"],
            page_stride=step.get("page", page_tokens * step["token"]),
            token_stride=step["token"],
            head_stride=step["head"],
            dim_stride=step["element"],
            heads=math.prod(part.shape[:-1]),
            dim=part.shape[-1],
            item_bytes=self.item_bytes,
            canonical_offset=offset,
        )

    def state(self, *, layer: int, offset: int) -> PartLayout:
        """Where the part of one of the pool's layers lies in a slot, by its axes "row" and "column".

        A slot is a page of one token.
        """
        return PartLayout(
            base=self.addresses[layer],
            page_stride=self.strides["slot"],
            token_stride=self.strides["slot"],
            head_stride=self.strides["row"],
            dim_stride=self.strides["column"],
            heads=self.sizes["row"],
            dim=self.sizes["column"],
            item_bytes=self.item_bytes,
            canonical_offset=offset,
        )
