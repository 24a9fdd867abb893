"""Where vLLM keeps its bytes: registered tensors become engine layouts by a known backend, never by guess.

What a block of the CPU attention backend holds, per (block, head), for N tokens of D elements::

    ISA vec, vec16:  K transposed [D, N], then V [N, D]        registered as [blocks, heads, N, 2 * D]
    MLA:             per token the latent, then the rope part  registered as [blocks, 1, N, latent + rope]
    state:           the parts one after the other             registered as int8 [blocks, 1, 1, bytes]

A state's matrix may be turned against the shape that vLLM gives it, see `STATE_BACKENDS`. Any other backend
or ISA packs the same shapes differently, so it is refused with the layer's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ucm_core.errors import LayoutError
from ucm_core.spec.dtypes import itemsize
from ucm_core.spec.layout import EngineLayout, PartLayout
from ucm_core.spec.table import RowKind, SpecRow, SpecTable
from ucm_core.store.geometry import Geometry
from ucm_vllm.spec_from_engine import RowGroup

KNOWN_ISAS = ("vec", "vec16")
"""Instruction sets of the CPU attention backend whose layout was verified against hand-written K and V."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Which code reads and writes a layer's tensor."""

    name: str | None
    """``get_name()`` of the attention backend."""
    isa: str | None
    """``layer.isa`` of a CPU attention layer."""


@dataclass(frozen=True, slots=True)
class Registered:
    """One layer's tensor as vLLM registered it, with sizes in bytes where a layout needs them."""

    layer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    dtype: str
    item_bytes: int
    address: int

    @classmethod
    def of(cls, layer: str, tensor: Any) -> Registered:
        """Describe ``tensor``; LayoutError for one that the CPU cannot address or that has not four axes."""
        if tensor.device.type != "cpu":
            raise LayoutError(
                f"layer {layer!r}: its cache is on device {tensor.device}; ucm-vllm copies host memory only"
            )
        if len(tensor.shape) != 4:
            raise LayoutError(
                f"layer {layer!r}: shape {list(tensor.shape)} has {len(tensor.shape)} axes, need 4"
            )
        item = int(tensor.element_size())
        return cls(
            layer=layer,
            shape=tuple(int(size) for size in tensor.shape),
            strides=tuple(int(stride) * item for stride in tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            item_bytes=item,
            address=int(tensor.data_ptr()),
        )

    def refuse(self, why: str) -> LayoutError:
        """The error that names this tensor and says why it cannot be read."""
        return LayoutError(
            f"layer {self.layer!r}: shape {list(self.shape)}, strides {list(self.strides)} bytes: {why}"
        )

    def require(self, shape: tuple[int, ...], dtype: str) -> None:
        """LayoutError unless the tensor has this shape and dtype and its last two axes are dense."""
        if self.shape != shape or self.dtype != dtype:
            raise self.refuse(f"is {self.dtype}, expected {dtype} of shape {list(shape)}")
        rows_dense = self.shape[2] == 1 or self.strides[2] == self.shape[3] * self.item_bytes
        if not rows_dense or self.strides[3] != self.item_bytes:
            raise self.refuse("the last two axes are not dense, so tokens and elements cannot be told apart")


def build_layouts(
    table: SpecTable,
    rows: Mapping[str, tuple[RowGroup, ...]],
    *,
    kv_caches: Mapping[str, Any],
    num_blocks: int,
    backend_of: Callable[[str], Backend],
) -> dict[tuple[str, int], EngineLayout]:
    """One layout per (row, engine group); every registered tensor is claimed once or an alias of one."""
    layouts = {}
    for name, groups in rows.items():
        row = table.row(name)
        stride = Geometry.of_row(row).stride
        for group in groups:
            size = (num_blocks, group.page_tokens)
            parts = [
                part
                for layer, unit in group.layers
                for part in _parts(
                    row, _registered(kv_caches, layer), size, offset=unit * stride, backend=backend_of(layer)
                )
            ]
            layouts[name, group.index] = EngineLayout(group.page_tokens, tuple(parts))
    aliases(rows, kv_caches)
    return layouts


def _registered(kv_caches: Mapping[str, Any], layer: str) -> Registered:
    if layer not in kv_caches:
        raise LayoutError(f"layer {layer!r} has a place in the spec table but registered no KV cache tensor")
    tensor = kv_caches[layer]
    if isinstance(tensor, list | tuple):
        raise LayoutError(f"layer {layer!r} registered {len(tensor)} tensors; exactly one is understood")
    return Registered.of(layer, tensor)


def _parts(
    row: SpecRow, tensor: Registered, size: tuple[int, int], *, offset: int, backend: Backend
) -> list[PartLayout]:
    """``size`` = (blocks, tokens per block); ``offset`` = where the layer's unit begins in the payload."""
    if row.kind is RowKind.SNAPSHOT:
        return _state(row, tensor, size[0], offset=offset, backend=backend)
    if [part.name for part in row.parts] == ["latent", "rope"]:
        _require_backend(tensor, backend, "CPU_MLA")
        return _latent_then_rope(row, tensor, size, offset)
    _require_backend(tensor, backend, "CPU_ATTN")
    if backend.isa not in KNOWN_ISAS:
        raise tensor.refuse(
            f"ISA {backend.isa!r} packs K and V in a way that is not known; known: {', '.join(KNOWN_ISAS)}"
        )
    return _transposed_k_then_v(row, tensor, size, offset)


def _require_backend(tensor: Registered, backend: Backend, known: str) -> None:
    if backend.name != known:
        raise tensor.refuse(f"attention backend {backend.name!r} is not known; known for this row: {known}")


def _transposed_k_then_v(
    row: SpecRow, tensor: Registered, size: tuple[int, int], offset: int
) -> list[PartLayout]:
    """Per (block, head) of N tokens: K as [D, N] at 0, V as [N, D] at N * D elements."""
    k, v = row.parts
    (blocks, tokens), (heads, dim), item = size, k.shape, tensor.item_bytes
    if v.shape != k.shape:
        raise tensor.refuse(f"K has {k.shape} and V {v.shape} elements per token; only equal ones are known")
    tensor.require((blocks, heads, tokens, 2 * dim), k.dtype)
    page, head = tensor.strides[0], tensor.strides[1]
    return [
        PartLayout(tensor.address, page, item, head, tokens * item, heads, dim, item, offset),
        PartLayout(
            tensor.address + tokens * dim * item, page, dim * item, head, item, heads, dim, item,
            offset + row.part_bytes(k),
        ),
    ]  # fmt: skip


def _latent_then_rope(
    row: SpecRow, tensor: Registered, size: tuple[int, int], offset: int
) -> list[PartLayout]:
    """Per token the latent's elements, then those of the rope part; one head."""
    latent, rope = row.parts
    (blocks, tokens), item = size, tensor.item_bytes
    width = latent.shape[0] + rope.shape[0]
    tensor.require((blocks, 1, tokens, width), latent.dtype)
    page, token = tensor.strides[0], tensor.strides[2]
    rope_at = latent.shape[0] * item
    return [
        PartLayout(tensor.address, page, token, token, item, 1, latent.shape[0], item, offset),
        PartLayout(
            tensor.address + rope_at, page, token, token, item, 1, rope.shape[0], item,
            offset + row.part_bytes(latent),
        ),
    ]  # fmt: skip


def _state(
    row: SpecRow, tensor: Registered, num_blocks: int, *, offset: int, backend: Backend
) -> list[PartLayout]:
    """A state is a page of one "token"."""
    tensor.require((num_blocks, 1, 1, row.unit_bytes), "int8")
    if backend.name not in STATE_BACKENDS:
        raise tensor.refuse(
            f"backend {backend.name!r} keeps states in an order that is not known; known:"
            f" {', '.join(STATE_BACKENDS)}"
        )
    return list(STATE_BACKENDS[backend.name](row, tensor, offset))


def _as_shaped(row: SpecRow, tensor: Registered, offset: int) -> Iterator[PartLayout]:
    """All parts' bytes are one head's, dense, in the row's order."""
    yield _bytes(tensor, row.unit_bytes, offset)


def _turned(row: SpecRow, tensor: Registered, offset: int) -> Iterator[PartLayout]:
    """The last part, ``[heads, rows, columns]``, is a matrix per head, column by column; the others dense."""
    last = row.parts[-1]
    (heads, rows, columns), item = last.shape, itemsize(last.dtype)
    plain = row.unit_bytes - row.part_bytes(last)
    yield _bytes(tensor, plain, offset)
    for at in range(plain, row.unit_bytes, row.part_bytes(last) // heads):
        yield PartLayout(
            tensor.address + at, tensor.strides[0], item, item, rows * item, rows, columns, item, offset + at
        )


def _bytes(tensor: Registered, count: int, offset: int) -> PartLayout:
    """The first ``count`` bytes of a page, as they are."""
    return PartLayout(tensor.address, tensor.strides[0], count, count, 1, 1, count, 1, offset)


STATE_BACKENDS = {"MAMBA2_ATTN": _as_shaped, "GDN_ATTN": _turned}
"""Backends of states that were verified against what such a state is -> where its parts lie.

vLLM's code for a CPU keeps ``[heads, key, value]`` where it registers ``[heads, value, key]``, the table's
order and that of its code for GPUs (``layers/mamba/ops/cpu/gdn_attention.py``).
"""


def aliases(rows: Mapping[str, tuple[RowGroup, ...]], kv_caches: Mapping[str, Any]) -> dict[str, str]:
    """Registered layers that no row claims and whose memory is that of a claimed one, which they lead to.

    LayoutError for a registered tensor that no row claims and that is nobody else's.
    """
    claimed = [layer for groups in rows.values() for group in groups for layer, _ in group.layers]
    memory = {_memory(kv_caches[layer]): layer for layer in reversed(claimed)}
    found = {}
    for layer, tensor in kv_caches.items():
        if layer in claimed:
            continue
        owner = memory.get(_memory(tensor))
        if owner is None:
            raise LayoutError(
                f"layer {layer!r} registered a tensor of shape {list(tensor.shape)} that no row of the"
                f" spec table claims; it would be lost on every hit"
            )
        found[layer] = owner
    return found


def _memory(tensor: Any) -> tuple[int, tuple[int, ...]]:
    return int(tensor.data_ptr()), tuple(tensor.shape)
