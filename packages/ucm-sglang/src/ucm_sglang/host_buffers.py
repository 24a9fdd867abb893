"""Tensors of SGLang's host pools with named axes, and where the parts of a row lie in them.

What the axes are, slowest first::

    layer_first        [layer, slot, head, element]
    page_first         [slot, layer, head, element]
    page_first_direct  [page, layer, token, head, element]
    page_head          [page, head, token, layer, element]

A slot is a token's place in the pool; a token, one in a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    address: int

    @classmethod
    def of(cls, where: str, tensor: Any, *, axes: tuple[str, ...]) -> Buffer:
        """Describe ``tensor``; LayoutError for memory that is not the host's, or another number of axes."""
        refuse(
            tensor.device.type != "cpu",
            LayoutError(f"{where}: its memory is on {tensor.device}; ucm-sglang copies host memory"),
        )
        shape, item = [*map(int, tensor.shape)], int(tensor.element_size())
        refuse(
            len(shape) != len(axes),
            LayoutError(f"{where}: shape {shape} has {len(shape)} axes, expected {len(axes)}: {axes}"),
        )
        steps = np.asarray(tensor.stride()) * item
        return cls(
            where=where,
            sizes=dict(zip(axes, shape, strict=True)),
            strides=dict(zip(axes, steps.tolist(), strict=True)),
            dtype=str(tensor.dtype).removeprefix("torch."),
            item_bytes=item,
            address=int(tensor.data_ptr()),
        )

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
            base=self.address + layer * step["layer"] + element * step["element"],
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
            base=self.address + layer * self.strides["layer"],
            page_stride=self.strides["slot"],
            token_stride=self.strides["slot"],
            head_stride=self.strides["row"],
            dim_stride=self.strides["column"],
            heads=self.sizes["row"],
            dim=self.sizes["column"],
            item_bytes=self.item_bytes,
            canonical_offset=offset,
        )
