"""Where SGLang keeps its bytes: its pools become memory of the table's rows, never by guess.

K and V are a buffer each; a latent pool has one buffer of one "head", the latent's elements and then the
rotary ones. Their axes are those of the pool's layout (see `host_buffers`). A state pool has a buffer per
part, ``[slot, layer, 1, *shape]`` in both layouts that SGLang has for it on the host, and ``[layer, slot,
*shape]`` on the device; its convolution window may stand with the channels first, where the canonical part
has them last. Any other class, layout, size or dtype is refused, and so are K and V that the device keeps in
another order than token by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm_core.errors import LayoutError
from ucm_core.flow.copy import EngineBlocks
from ucm_core.spec.layout import EngineLayout, PartLayout
from ucm_core.spec.rows import Part, SpecRow
from ucm_core.spec.segments import Parallelism, Rank, Share
from ucm_core.spec.table import SpecTable
from ucm_core.store.geometry import Geometry
from ucm_position_key import Component, Pool
from ucm_sglang.host_buffers import AXES, Buffer
from ucm_sglang.refusals import refuse
from ucm_sglang.spec_from_engine import PoolLayers, map_pools

Int64s = npt.NDArray[np.int64]

Place = Callable[..., PartLayout]
"""(``layer`` of the pool, ``offset`` in the payload) to where a part of that layer lies."""


@dataclass(frozen=True, slots=True)
class RowMemory:
    """The layers of one row in one pool."""

    table: Int64s
    """What a copy takes, see `EngineLayout.table`."""
    page_tokens: int
    """Indices per object: the tokens of a page, or 1, the slot of a state."""
    pages: int
    """Pages (slots) of the pool."""
    tensors: Any
    """They keep the memory alive."""

    def pieces(self, indices: Int64s) -> Int64s:
        """Object ``i`` is page ``i`` of ``indices``; LayoutError for what is no pages of the pool."""
        size, shape = self.page_tokens, indices.shape
        refuse(
            shape != (len(indices) // size * size,),
            LayoutError(f"indices of shape {list(shape)} are no pages of {size} tokens"),
        )
        by_page = indices.reshape(-1, size)
        pages, rest = np.divmod(by_page[:, 0], size)
        torn = rest.astype(bool) | (by_page != by_page[:, :1] + np.arange(size)).any(axis=1)
        wrong = np.flatnonzero(torn | (pages < 0) | (pages >= self.pages))
        if wrong.size:
            first, last = by_page[wrong[0], [0, -1]].tolist()
            raise LayoutError(
                f"object {wrong[0]}: indices {first} to {last} are no page of {size} tokens in a pool of"
                f" {self.pages}"
            )
        pieces = np.zeros((len(pages), 5), np.int64)
        pieces[:, 0], pieces[:, 2], pieces[:, 4] = np.arange(len(pages)), pages, size
        return pieces


@dataclass(frozen=True, slots=True)
class MappedPools:
    """The registered pools of one rank as memory of the table's rows; immutable."""

    pools: tuple[Pool, ...]
    """For `ucm_position_key.PoolTable`."""
    memory: Mapping[tuple[str, str], RowMemory]
    """(pool, row) to what of it lies on this rank."""
    held: tuple[SpecRow, ...]
    """The rows with the layers and heads that this rank has of them: unit ``i`` is shard ``i``."""

    @classmethod
    def of(cls, pools: Mapping[str, Any], table: SpecTable, *, share: Share | None = None) -> MappedPools:
        """Map ``pools`` (SGLang's name to the pool object) onto ``table``, with every check there is.

        ``share`` says which rank they are of; the only one, where it is None. SpecError for pools that do not
        cover the table (see `map_pools`), LayoutError for an unknown class or layout and for other heads,
        sizes, dtypes or pages; both name pool, row and part, and both numbers.
        """
        named = dict(zip(map(str, pools), pools.values(), strict=True))
        mapped = map_pools(named, table, share=share or Share(Parallelism(), Rank()))
        memory = {
            (held.pool.name, row.name): _row_memory(held, row, named[held.pool.name])
            for held in mapped
            for row in held.rows
        }
        rows = tuple(row for held in mapped for row in held.rows)
        return cls(tuple(held.pool for held in mapped), memory, rows)

    def rows(self, pool_name: str) -> tuple[str, ...]:
        """The rows of a pool that have layers on this rank."""
        return tuple(row for pool, row in self.memory if pool == pool_name)

    def blocks(self, pool_name: str, row_name: str, *, indices: Int64s) -> EngineBlocks:
        """Memory of a row's blocks or states in a pool: object ``i`` is page ``i`` of ``indices``.

        ``int64[n * page]`` for a pool of tokens, each page's indices consecutive from a multiple of the page
        on; ``int64[n]`` slots for states. LayoutError for others, and for a row that is not there.
        """
        memory = self.memory.get((pool_name, row_name))
        if memory is None:
            held = ", ".join(f"{row} in {pool}" for pool, row in self.memory)
            raise LayoutError(
                f"pool {pool_name!r} has no layer of row {row_name!r} on this rank; here are {held}"
            )
        return EngineBlocks([memory], memory.pieces(indices), block_tokens=memory.page_tokens)


def _row_memory(held: PoolLayers, row: SpecRow, pool: Any) -> RowMemory:
    where = f"pool {held.pool.name!r}, row {row.name!r}"
    places = _reader(where, row, pool, component=held.pool.component).places(where, row, pool)
    layers = [held.layers.index(unit) for unit in row.units]
    page_tokens = int(pool.page_size)
    layout = _layout(row, layers, places=places, page_tokens=page_tokens)
    return RowMemory(layout.table, page_tokens, int(pool.page_num), pool.kv_buffer)


def _reader(where: str, row: SpecRow, pool: Any, *, component: Component) -> _Reader:
    readers, layout = _READERS[component], pool.layout
    kind = getattr(pool, "kind", type(pool).__name__)
    refuse(
        kind not in readers,
        LayoutError(f"{where}: the pool is a {kind}; known for it: {', '.join(readers)}"),
    )
    reader = readers[kind]
    known = ", ".join(reader.layouts)
    refuse(
        layout not in reader.layouts,
        LayoutError(f"{where}: layout {layout!r} of a {kind} is not known; known: {known}"),
    )
    refuse(
        getattr(pool, "kv_buffer", None) is None,
        LayoutError(f"{where}: the pool has no memory on this rank"),
    )
    names = tuple(part.name for part in row.parts)
    refuse(
        names != reader.parts,
        LayoutError(f"{where}: a {kind} holds {', '.join(reader.parts)}, the row {', '.join(names)}"),
    )
    return reader


def _layout(
    row: SpecRow, layers: Sequence[int], *, places: Sequence[Place], page_tokens: int
) -> EngineLayout:
    """Unit by unit the row's parts, one after the other; ``layers`` are the pool's of the units."""
    stride = Geometry.of_row(row).stride
    parts = []
    for shard, layer in enumerate(layers):
        offset = shard * stride
        for part, place in zip(row.parts, places, strict=True):
            parts.append(place(layer=layer, offset=offset))
            offset += row.part_bytes(part)
    return EngineLayout(page_tokens, tuple(parts))


def _keys_and_values(where: str, row: SpecRow, pool: Any) -> list[Place]:
    tensors, order = (pool.k_buffer, pool.v_buffer), _device_order(pool)
    refuse(
        order not in _TOKEN_MAJOR,
        LayoutError(
            f"{where}: SGLang keeps K and V as {order!r} on the device, and copies them so; known:"
            f" {', '.join(_TOKEN_MAJOR)}; unset SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
        ),
    )
    return [
        _token_place(_token_buffer(where, part, tensor, pool), part, pool)
        for part, tensor in zip(row.parts, tensors, strict=True)
    ]


def _device_order(pool: Any) -> str:
    """How a page lies in the device pool: a host page has the same bytes, whatever its shape says."""
    infos = getattr(pool, "_buffer_infos", ())  # since 0.5.23
    if infos:
        return str(infos[0].buffers.layout.value)
    return str(getattr(getattr(pool, "device_pool", None), "kv_cache_layout", None))


def _latent_then_rope(where: str, row: SpecRow, pool: Any) -> list[Place]:
    latent, rope = row.parts
    entry = Part("latent and rope", (1, latent.shape[0] + rope.shape[0]), latent.dtype)
    buffer = _token_buffer(where, entry, pool.kv_buffer, pool)
    buffer.require(rope.dtype, {})
    return [
        _token_place(buffer, latent, pool),
        _token_place(buffer, rope, pool, element=latent.shape[0]),
    ]


def _token_buffer(where: str, part: Part, tensor: Any, pool: Any) -> Buffer:
    """``tensor`` as what holds ``part`` of every layer and token."""
    buffer = Buffer.of(f"{where}, part {part.name!r}", tensor, axes=AXES[pool.layout])
    sizes = {"head": part.shape[0], "element": part.shape[1], "layer": pool.layer_num}
    pages = {
        "token": pool.page_size,
        "page": pool.page_num,
        "slot": pool.page_num * pool.page_size,
    }
    buffer.require(part.dtype, sizes | pages)
    return buffer


def _token_place(buffer: Buffer, part: Part, pool: Any, *, element: int = 0) -> Place:
    return partial(buffer.tokens, part, int(pool.page_size), element=element)


def _states(where: str, row: SpecRow, pool: Any) -> list[Place]:
    (conv, ssm), windows = row.parts, len(pool.conv_buffer)
    refuse(windows != 1, LayoutError(f"{where}: {windows} convolution states in the pool, expected 1"))
    return [
        _window_place(f"{where}, part 'conv'", conv, pool.conv_buffer[0], pool),
        _matrix_place(f"{where}, part 'ssm'", ssm, pool.temporal_buffer, pool),
    ]


def _window_place(where: str, part: Part, tensor: Any, pool: Any) -> Place:
    """Of a convolution: the inputs before (rows) of every channel (columns), in either order."""
    orders = {part.shape[::-1]: ("column", "row"), part.shape: ("row", "column")}
    slot = _SLOT[pool.layout]
    shape = tuple(map(int, tensor.shape[len(slot) :]))
    refuse(
        shape not in orders,
        LayoutError(f"{where}: shape {list(shape)} in the pool, expected {list(part.shape)}"),
    )
    refuse(
        len(orders) == 1,
        LayoutError(f"{where}: shape {list(shape)} does not say which axis are the channels"),
    )
    return _state_buffer(Buffer.of(where, tensor, axes=(*slot, *orders[shape])), part, pool).state


def _matrix_place(where: str, part: Part, tensor: Any, pool: Any) -> Place:
    """Of a recurrent state, whatever its axes: one row."""
    slot, axes = _SLOT[pool.layout], tuple(map(str, range(len(part.shape))))
    buffer = _state_buffer(Buffer.of(where, tensor, axes=(*slot, *axes)), part, pool)
    item, shape = buffer.item_bytes, [*buffer.sizes.values()][len(slot) :]
    refuse(
        tuple(shape) != part.shape,
        LayoutError(f"{where}: shape {shape} in the pool, expected {list(part.shape)}"),
    )
    strides, dense = [*buffer.strides.values()][len(slot) :], np.cumprod([item, *shape[:0:-1]])[::-1].tolist()
    refuse(strides != dense, LayoutError(f"{where}: strides {strides} bytes, a dense state has {dense}"))
    flat = {"row": 1, "column": math.prod(shape)}
    steps = {"row": part.entry_bytes, "column": item}
    return replace(buffer, sizes={**buffer.sizes, **flat}, strides={**buffer.strides, **steps}).state


def _state_buffer(buffer: Buffer, part: Part, pool: Any) -> Buffer:
    buffer.require(part.dtype, {"layer": pool.num_mamba_layers, "slot": pool.page_num, "one": 1})
    return buffer


_SLOT = {
    **dict.fromkeys(("page_first", "page_first_direct"), ("slot", "layer", "one")),
    "layer_first": ("layer", "slot"),
}
"""The axes of a buffer of states before those of the part."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """How the buffers of a class of pools are read."""

    parts: tuple[str, ...]
    layouts: tuple[str, ...]
    places: Callable[[str, SpecRow, Any], list[Place]]


_TOKEN_MAJOR = ("nhd", "paged_nhd")
"""SGLang's names of layouts of a device pool in which a token's heads stand together."""

_PAGE_FIRST = ("page_first", "page_first_direct")
_ON_DEVICE = ("layer_first",)
_OF_TOKENS = {
    "MHATokenToKVPoolHost": _Reader(("k", "v"), tuple(AXES), _keys_and_values),
    "AsymmetricMHATokenToKVPoolHost": _Reader(("k", "v"), _PAGE_FIRST, _keys_and_values),
    "MLATokenToKVPoolHost": _Reader(("latent", "rope"), ("layer_first", *_PAGE_FIRST), _latent_then_rope),
    "MHATokenToKVPool": _Reader(("k", "v"), _ON_DEVICE, _keys_and_values),
    "MLATokenToKVPool": _Reader(("latent", "rope"), _ON_DEVICE, _latent_then_rope),
}
_READERS = {
    Component.FULL: _OF_TOKENS,
    Component.SWA: _OF_TOKENS,
    Component.MAMBA: {
        "MambaPoolHost": _Reader(("conv", "ssm"), _PAGE_FIRST, _states),
        "MambaPool": _Reader(("conv", "ssm"), _ON_DEVICE, _states),
    },
}
