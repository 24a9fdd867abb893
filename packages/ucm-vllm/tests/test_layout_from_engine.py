"""The bytes of vLLM's CPU backends, written by its own kernels or by hand, as canonical bytes and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ucm_core.errors import LayoutError  # noqa: E402
from ucm_core.flow.copy import EngineBlocks  # noqa: E402
from ucm_core.spec.layout import block_pieces  # noqa: E402
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable  # noqa: E402
from ucm_core.store.geometry import Geometry  # noqa: E402
from ucm_vllm.block_tables import state_pieces  # noqa: E402
from ucm_vllm.layout_from_engine import Backend, build_layouts  # noqa: E402
from ucm_vllm.spec_from_engine import RowGroup  # noqa: E402

HEADS, DIM, PAGE, PAGES, BLOCK = 2, 32, 128, 6, 64
ATTENTION, MLA = Backend("CPU_ATTN", "vec"), Backend("CPU_MLA", None)
LAYER = "model.layers.0.self_attn.attn"


def attention_row(dtype: str = "float32", dim: int = DIM) -> SpecRow:
    parts = (Part("k", (HEADS, dim), dtype), Part("v", (HEADS, dim), dtype))
    return SpecRow("full", RowKind.CHAIN, BLOCK, (0,), parts)


def mla_row() -> SpecRow:
    parts = (Part("latent", (512,), "float32"), Part("rope", (64,), "float32"))
    return SpecRow("mla-576", RowKind.CHAIN, BLOCK, (0,), parts)


def state_row() -> SpecRow:
    parts = (Part("conv", (3, 40), "bfloat16"), Part("ssm", (4, 8, 8), "float32"))
    return SpecRow("mamba2", RowKind.SNAPSHOT, BLOCK, (0,), parts)


def layout_of(row: SpecRow, tensor: Any, backend: Backend, page: int = PAGE, layer: str = LAYER) -> Any:
    table = SpecTable((row,), 64)
    rows = {row.name: (RowGroup(0, page, ((layer, 0),)),)}
    pages = tensor.shape[0]
    return build_layouts(
        table, rows, kv_caches={layer: tensor}, num_blocks=pages, backend_of=lambda _: backend
    )[row.name, 0]


def gathered(row: SpecRow, layout: Any, pieces: np.ndarray, count: int) -> np.ndarray:
    """Canonical bytes of ``count`` objects, ``uint8[count, payload]``."""
    payloads = np.zeros((count, Geometry.of_row(row).payload_bytes), dtype=np.uint8)
    EngineBlocks([layout], pieces).gather(np.arange(count), row_addresses(payloads))
    return payloads


def row_addresses(payloads: np.ndarray) -> np.ndarray:
    return payloads.ctypes.data + payloads.strides[0] * np.arange(len(payloads), dtype=np.int64)


def part(row: SpecRow, payload: np.ndarray, name: str, dtype: Any) -> Any:
    """One part of the only unit, as a tensor [tokens, *shape]."""
    begin = sum(row.part_bytes(p) for p in row.parts[: [p.name for p in row.parts].index(name)])
    found = next(p for p in row.parts if p.name == name)
    raw = torch.from_numpy(payload[begin : begin + row.part_bytes(found)].copy())
    return raw.view(dtype).view(-1, *found.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 80, 128])
def test_what_vllms_kernel_wrote_is_read_as_written(dtype: Any, dim: int) -> None:
    pytest.importorskip("vllm")
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, PAGE, dim, "auto")
    cache = torch.zeros(PAGES, HEADS, PAGE, 2 * dim, dtype=dtype)
    key, value = (torch.randn(2 * PAGE, HEADS, dim).to(dtype) for _ in range(2))
    slots = torch.cat([torch.arange(PAGE) + 4 * PAGE, torch.arange(PAGE) + 2 * PAGE])  # token 0 is in page 4
    k_cache, v_cache = cache.view(PAGES, HEADS, 2 * PAGE, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, k_cache, v_cache, slots, isa, 1.0, 1.0, "auto")
    row = attention_row(str(dtype).removeprefix("torch."), dim)
    layout = layout_of(row, cache, Backend("CPU_ATTN", isa))
    payloads = gathered(
        row, layout, block_pieces(np.array([0, 64, 128]), BLOCK, page_ids=[4, 2], page_tokens=PAGE), 3
    )
    for block, payload in enumerate(payloads):
        tokens = slice(block * BLOCK, (block + 1) * BLOCK)
        assert torch.equal(part(row, payload, "k", dtype), key[tokens])
        assert torch.equal(part(row, payload, "v", dtype), value[tokens])


def test_k_is_transposed_and_v_is_not() -> None:
    cache = torch.zeros(PAGES, HEADS, PAGE, 2 * DIM)
    flat = cache.view(PAGES, HEADS, 2, PAGE * DIM)
    k = torch.randn(HEADS, PAGE, DIM)
    v = torch.randn(HEADS, PAGE, DIM)
    flat[3, :, 0] = k.transpose(1, 2).reshape(HEADS, -1)
    flat[3, :, 1] = v.reshape(HEADS, -1)
    row = attention_row()
    layout = layout_of(row, cache, ATTENTION)
    (payload,) = gathered(
        row, layout, block_pieces(np.array([64]), BLOCK, page_ids=[9, 3], page_tokens=64), 1
    )[:1]
    assert torch.equal(part(row, payload, "k", torch.float32), k.transpose(0, 1)[:BLOCK])
    assert torch.equal(part(row, payload, "v", torch.float32), v.transpose(0, 1)[:BLOCK])


def test_a_scatter_gives_back_what_was_gathered_and_touches_nothing_else() -> None:
    cache = torch.randn(PAGES, HEADS, PAGE, 2 * DIM)
    row = attention_row()
    layout = layout_of(row, cache, ATTENTION)
    pieces = block_pieces(np.array([64]), BLOCK, page_ids=[4], page_tokens=PAGE)
    payloads = gathered(row, layout, pieces, 1)
    other = cache.clone()
    other[4, :, :] = 0
    EngineBlocks([layout_of(row, other, ATTENTION)], pieces).scatter(np.arange(1), row_addresses(payloads))
    again = gathered(row, layout_of(row, other, ATTENTION), pieces, 1)
    assert (again == payloads).all()
    assert torch.equal(other[[0, 1, 2, 3, 5]], cache[[0, 1, 2, 3, 5]])
    first_half = block_pieces(np.array([0]), BLOCK, page_ids=[4], page_tokens=PAGE)
    assert not gathered(row, layout_of(row, other, ATTENTION), first_half, 1).any()


def test_mla_is_latent_then_rope_per_token() -> None:
    cache = torch.randn(9, 1, 16, 576)
    row = mla_row()
    layout = layout_of(row, cache, MLA, page=16)
    (payload,) = gathered(
        row, layout, block_pieces(np.array([0]), BLOCK, page_ids=[5, 1, 7, 2], page_tokens=16), 1
    )
    tokens = torch.cat([cache[page, 0] for page in (5, 1, 7, 2)])
    assert torch.equal(part(row, payload, "latent", torch.float32), tokens[:, :512])
    assert torch.equal(part(row, payload, "rope", torch.float32), tokens[:, 512:])


def test_a_state_is_its_parts_bytes_in_a_padded_page() -> None:
    row = state_row()
    padded = torch.randint(-128, 127, (5, row.unit_bytes + 100), dtype=torch.int8)
    cache = padded[:, : row.unit_bytes].unflatten(1, (1, 1, row.unit_bytes))
    layout = layout_of(row, cache, Backend("MAMBA2_ATTN", None), layer="model.layers.0.mamba")
    payloads = gathered(row, layout, state_pieces([3, 1]), 2)
    assert (payloads[0, : row.unit_bytes].view(np.int8) == padded[3, : row.unit_bytes].numpy()).all()
    assert (payloads[1, : row.unit_bytes].view(np.int8) == padded[1, : row.unit_bytes].numpy()).all()


def test_a_delta_state_has_values_before_keys_whatever_the_processor_s_kernel_keeps() -> None:
    """After one token from nothing a head's matrix is the outer product of its value and its key."""
    heads, size, slot = 2, 128, 3
    parts = (Part("conv", (3, 40), "bfloat16"), Part("ssm", (heads, size, size), "bfloat16"))
    row = SpecRow("gdn", RowKind.SNAPSHOT, BLOCK, (0,), parts)
    cache = torch.zeros(5, 1, 1, row.unit_bytes, dtype=torch.int8)
    state = cache.view(torch.bfloat16).view(5, -1)[:, 3 * 40 :].unflatten(1, (heads, size, size))
    key, value = delta_token(state, slot=slot)
    layout = layout_of(row, cache, Backend("GDN_ATTN", None), layer="model.layers.0.linear_attn")
    (payload,) = gathered(row, layout, state_pieces([slot]), 1)
    found = (
        torch.from_numpy(payload[240 : row.unit_bytes].copy()).view(torch.bfloat16).view(heads, size, size)
    )
    assert torch.allclose(found.float(), value[:, :, None] * key, atol=0.02)
    other = torch.zeros_like(cache)
    blocks = EngineBlocks([layout_of(row, other, Backend("GDN_ATTN", None))], state_pieces([4]))
    blocks.scatter(np.arange(1), row_addresses(payload[None]))
    assert torch.equal(other[4], cache[slot])


def delta_token(state: Any, *, slot: int) -> tuple[Any, Any]:
    """Let vLLM's kernel take one token to a slot; its key, which all heads share, and each head's value."""
    from vllm import _custom_ops

    heads, size = state.shape[1:3]
    key, value = torch.randn(size), torch.randn(heads, size)
    key /= key.norm()
    _custom_ops.chunk_gated_delta_rule_cpu(
        query=torch.randn(1, 1, 1, size).bfloat16(), key=key.bfloat16().view(1, 1, 1, size),
        value=value.bfloat16().view(1, 1, heads, size), g=torch.zeros(1, 1, heads),
        beta=torch.ones(1, 1, heads).bfloat16(), initial_state=state, output_final_state=True,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32), head_first=False, use_qk_l2norm_in_kernel=True,
        initial_state_indices=torch.tensor([slot], dtype=torch.int32),
    )  # fmt: skip
    return key, value


def test_a_state_of_code_that_was_not_looked_at_is_refused() -> None:
    row = state_row()
    with pytest.raises(LayoutError, match="backend 'LINEAR_ATTN' keeps states in an order that is not known"):
        layout_of(row, torch.zeros(2, 1, 1, row.unit_bytes, dtype=torch.int8), Backend("LINEAR_ATTN", None))


@pytest.mark.parametrize(
    ("shape", "backend", "message"),
    [
        ((PAGES, PAGE, HEADS, 2 * DIM), ATTENTION, r"shape \[6, 128, 2, 64\]"),
        ((PAGES, HEADS, 2 * DIM, PAGE), ATTENTION, r"expected float32 of shape \[6, 2, 128, 64\]"),
        ((PAGES, HEADS, PAGE, 2 * DIM), Backend("CPU_ATTN", "amx"), "ISA 'amx'"),
        ((PAGES, HEADS, PAGE, 2 * DIM), Backend("CPU_ATTN", None), "ISA None"),
        ((PAGES, HEADS, PAGE, 2 * DIM), Backend("FLASH_ATTN", None), "'FLASH_ATTN' is not known"),
        ((40, 8, 8), ATTENTION, "3 axes, need 4"),
    ],
)
def test_what_can_be_read_in_another_way_is_refused(
    shape: tuple[int, ...], backend: Backend, message: str
) -> None:
    with pytest.raises(LayoutError, match=message) as refusal:
        layout_of(attention_row(), torch.zeros(shape), backend)
    assert LAYER in str(refusal.value)


def test_axes_in_another_physical_order_are_refused() -> None:
    cache = torch.zeros(PAGES, HEADS, 2 * DIM, PAGE).transpose(2, 3)
    with pytest.raises(LayoutError, match="not dense"):
        layout_of(attention_row(), cache, ATTENTION)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(LayoutError, match="is bfloat16, expected float32"):
        layout_of(attention_row(), torch.zeros(PAGES, HEADS, PAGE, 2 * DIM, dtype=torch.bfloat16), ATTENTION)


def test_another_device_is_refused() -> None:
    with pytest.raises(LayoutError, match="device meta"):
        layout_of(attention_row(), torch.zeros(PAGES, HEADS, PAGE, 2 * DIM, device="meta"), ATTENTION)


def kernel_blocks(extra: dict[str, Any]) -> Any:
    row = attention_row()
    cache = torch.zeros(PAGES, HEADS, PAGE, 2 * DIM)
    rows = {row.name: (RowGroup(0, PAGE, ((LAYER, 0),)),)}
    caches = {LAYER: cache} | {name: make(cache) for name, make in extra.items()}
    return build_layouts(
        SpecTable((row,), 64), rows, kv_caches=caches, num_blocks=PAGES, backend_of=lambda _: ATTENTION
    )


def test_an_alias_of_a_claimed_tensor_is_fine() -> None:
    assert kernel_blocks({"model.layers.1.self_attn.attn": lambda cache: cache})


def test_a_tensor_that_no_row_claims_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"model\.layers\.7.*no row"):
        kernel_blocks({"model.layers.7.self_attn.attn": torch.zeros_like})


def test_a_layer_without_a_tensor_is_refused() -> None:
    rows = {"full": (RowGroup(0, PAGE, ((LAYER, 0),)),)}
    with pytest.raises(LayoutError, match="registered no KV cache tensor"):
        build_layouts(
            SpecTable((attention_row(),), 64),
            rows,
            kv_caches={},
            num_blocks=1,
            backend_of=lambda _: ATTENTION,
        )


def test_several_tensors_of_one_layer_are_refused() -> None:
    rows = {"full": (RowGroup(0, PAGE, ((LAYER, 0),)),)}
    caches = {LAYER: [torch.zeros(1), torch.zeros(1)]}
    with pytest.raises(LayoutError, match="2 tensors"):
        build_layouts(
            SpecTable((attention_row(),), 64),
            rows,
            kv_caches=caches,
            num_blocks=1,
            backend_of=lambda _: ATTENTION,
        )
