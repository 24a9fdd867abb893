"""SGLang's own host pools on a CPU: their bytes in every layout, and that the doubles are like them."""

from __future__ import annotations

from typing import Any

import import_doubles
import numpy as np
import pytest
from pool_bytes import POISON, addresses, gathered, indices_of, payload, random_bits, raw, read, write
from pool_doubles import ITEM_BYTES, PoolDouble, TokenShape, attention_pool, latent_pool, state_pool

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
import_doubles.install()

from sglang.srt.mem_cache import device_pool_info as info  # noqa: E402
from sglang.srt.mem_cache.pool_host import mha  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402

from ucm_core.spec.rows import Part, RankRule, RowKind, SpecRow  # noqa: E402
from ucm_core.spec.table import SpecTable  # noqa: E402
from ucm_sglang.layout_from_engine import MappedPools  # noqa: E402

SHAPE = TokenShape(layers=3, pages=5, page=4, heads=2, dim=8)
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
CPU = {"pin_memory": False, "device": "cpu"}
"""SGLang pins host memory for a GPU; there is none here."""


@pytest.fixture(autouse=True)
def small_budget() -> Any:
    """SGLang keeps 10 GiB of host memory free; these pools are a few kilobytes."""
    with host_memory_budget_scope(1 << 30):
        yield


def device_buffers(shape: TokenShape, dtype: Any, dim: int) -> Any:
    made = tuple(torch.zeros(8, shape.heads, dim, dtype=dtype) for _ in range(shape.layers))
    return made, torch.tensor([one.data_ptr() for one in made], dtype=torch.uint64)


def real_attention(
    layout: str, dtype: Any = None, shape: TokenShape = SHAPE, v_dim: int | None = None
) -> Any:
    dtype, v_dim = dtype or torch.float32, v_dim or shape.dim
    (k, k_at), (v, v_at) = device_buffers(shape, dtype, shape.dim), device_buffers(shape, dtype, v_dim)
    buffers = info.KVBuffers(k=k, v=v, k_data_ptrs=k_at, v_data_ptrs=v_at, layout=info.KVBufferLayout.NHD)
    facts = info.MHABufferInfo(
        buffers=buffers, page_size=shape.page, head_num=shape.heads, head_dim=shape.dim, v_head_dim=v_dim,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    kind = mha.get_mha_host_pool_cls(facts)
    return kind(facts, 1.0, 0, shape.page, layout, **CPU, **capacity(shape))


def real_latent(layout: str, dtype: Any = None, shape: TokenShape = SHAPE, rope: int = 3) -> Any:
    """One head of ``shape.dim`` elements, of which the last ``rope`` are rotary."""
    dtype = dtype or torch.float32
    made = tuple(torch.zeros(8, 1, shape.dim, dtype=dtype) for _ in range(shape.layers))
    facts = info.MLABufferInfo(
        buffers=made, data_ptrs=torch.tensor([one.data_ptr() for one in made], dtype=torch.uint64),
        layer_indices=tuple(range(shape.layers)), device_layer_num=shape.layers, page_size=shape.page,
        kv_lora_rank=shape.dim - rope, qk_rope_head_dim=rope, kv_cache_dim=shape.dim, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    layers = {"target_layer_num": shape.layers}
    return MLATokenToKVPoolHost(facts, 1.0, 0, shape.page, layout, **CPU, **capacity(shape), **layers)


def real_states(layout: str, conv: tuple[int, ...], ssm: tuple[int, ...]) -> Any:
    facts = info.MambaStateBufferInfo(
        temporal=torch.zeros(3, 4, *ssm), conv=(torch.zeros(3, 4, *conv, dtype=torch.bfloat16),)
    )
    return MambaPoolHost(facts, 1.0, 0, device_capacity=4, layout=layout, **CPU)


def capacity(shape: TokenShape) -> dict[str, Any]:
    tokens = shape.pages * shape.page
    return {
        "device_capacity_tokens": 8, "host_token_capacity": tokens,
        "start_layer": 0, "end_layer": shape.layers,
    }  # fmt: skip


def attention_row(dtype: str = "float32", v_dim: int = SHAPE.dim) -> SpecRow:
    parts = (Part("k", (SHAPE.heads, SHAPE.dim), dtype), Part("v", (SHAPE.heads, v_dim), dtype))
    return SpecRow("full", RowKind.CHAIN, SHAPE.page, tuple(range(SHAPE.layers)), parts)


def latent_row(dtype: str, rope: int = 3) -> SpecRow:
    parts = (Part("latent", (SHAPE.dim - rope,), dtype), Part("rope", (rope,), dtype))
    units = tuple(range(SHAPE.layers))
    return SpecRow("mla", RowKind.CHAIN, SHAPE.page, units, parts, rank_rule=RankRule.ALL_UNION)


def table(*rows: SpecRow) -> SpecTable:
    return SpecTable(rows, SHAPE.page)


def check_pages(row: SpecRow, pools: tuple[Any, Any], buffers: Any, parts: Any) -> None:
    """Fill, gather pages 4, 0 and 2, compare; scatter to pages 1, 3 and 0 of the other pool, compare.

    ``buffers`` gives a pool's tensors, ``parts`` cuts their elements into those of the row.
    """
    pool, other = pools
    rng = np.random.default_rng(len(pool.layout))
    sizes = [slots_of(one) for one in buffers(pool)]
    values = [random_bits(rng, size, ITEM_BYTES[row.parts[0].dtype]) for size in sizes]
    for buffer, elements in zip(buffers(pool), values, strict=True):
        write(buffer, elements, pool.layout, SHAPE.page)
    for buffer in buffers(other):
        raw(buffer).view(np.uint8)[...] = POISON
    before = [
        read(one, size, other.layout, SHAPE.page) for one, size in zip(buffers(other), sizes, strict=True)
    ]
    memory, target = (MappedPools.of({"kv": one}, table(row)) for one in pools)
    payloads = gathered(row, memory.blocks("kv", row.name, indices=indices_of([4, 0, 2], SHAPE.page)), 3)
    for page, found in zip([4, 0, 2], payloads, strict=True):
        units = [[part[layer, tokens(page)] for part in parts(values)] for layer in range(SHAPE.layers)]
        assert (found == payload(row, units)).all()
    target.blocks("kv", row.name, indices=indices_of([1, 3, 0], SHAPE.page)).scatter(
        np.arange(3), addresses(payloads)
    )
    for buffer, elements, expected in zip(buffers(other), values, before, strict=True):
        for page, to in zip([4, 0, 2], [1, 3, 0], strict=True):
            expected[:, tokens(to)] = elements[:, tokens(page)]
        assert (read(buffer, elements.shape, other.layout, SHAPE.page) == expected).all()


def slots_of(buffer: Any) -> tuple[int, ...]:
    """[layers, slots, heads, elements] of one part's buffer."""
    width = buffer.shape[-1]
    heads = buffer.numel() // (SHAPE.layers * SHAPE.pages * SHAPE.page * width)
    return SHAPE.layers, SHAPE.pages * SHAPE.page, heads, width


def tokens(page: int) -> slice:
    return slice(page * SHAPE.page, (page + 1) * SHAPE.page)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("turn", range(4))
def test_keys_and_values_of_every_layout_are_the_same_bytes(turn: int, dtype: str) -> None:
    pools = tuple(real_attention(LAYOUTS[(turn + step) % 4], getattr(torch, dtype)) for step in (0, 1))
    check_pages(
        attention_row(dtype), pools, lambda pool: (pool.k_buffer, pool.v_buffer), lambda values: values
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("turn", range(3))
def test_latents_of_every_layout_are_the_same_bytes(turn: int, dtype: str) -> None:
    pools = tuple(real_latent(LAYOUTS[(turn + step) % 3], getattr(torch, dtype)) for step in (0, 1))
    check_pages(
        latent_row(dtype),
        pools,
        lambda pool: (pool.kv_buffer,),
        lambda values: (values[0][..., :5], values[0][..., 5:]),
    )


def test_keys_and_values_of_unequal_width_are_the_same_bytes() -> None:
    pools = tuple(real_attention(layout, v_dim=12) for layout in ("page_first", "page_first_direct"))
    check_pages(
        attention_row(v_dim=12), pools, lambda pool: (pool.k_buffer, pool.v_buffer), lambda values: values
    )


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("conv", [(10, 3), (3, 10)])
def test_states_are_the_same_bytes(layout: str, conv: tuple[int, int]) -> None:
    parts = (Part("conv", (3, 10), "bfloat16"), Part("ssm", (2, 4, 5), "float32"))
    row = SpecRow("mamba2", RowKind.SNAPSHOT, 4, (0, 2, 4), parts)
    pool, kv = real_states(layout, conv, (2, 4, 5)), real_attention("page_first_direct")
    window, matrix = raw(pool.conv_buffer[0]), raw(pool.temporal_buffer)
    rng = np.random.default_rng(5)
    window[...], matrix[...] = random_bits(rng, window.shape, 2), random_bits(rng, matrix.shape, 4)
    pools = MappedPools.of({"kv": kv, "mamba": pool}, table(attention_row(), row))
    (found,) = gathered(row, pools.blocks("mamba", "mamba2", indices=np.array([3])), 1)
    turned = window if conv == (3, 10) else window.swapaxes(-1, -2)
    assert (found == payload(row, [[turned[3, layer, 0], matrix[3, layer, 0]] for layer in range(3)])).all()


def test_a_page_is_made_of_the_runs_that_sglang_names() -> None:
    pool, row = real_attention("layer_first"), attention_row()
    for buffer, seed in ((pool.k_buffer, 6), (pool.v_buffer, 7)):
        write(
            buffer, random_bits(np.random.default_rng(seed), slots_of(buffer), 4), "layer_first", SHAPE.page
        )
    blocks = MappedPools.of({"kv": pool}, table(row)).blocks(
        "kv", "full", indices=indices_of([2], SHAPE.page)
    )
    (found,) = gathered(row, blocks, 1)
    pointers, sizes = pool.get_page_buffer_meta(torch.arange(8, 12))
    flat, base = raw(pool.kv_buffer).reshape(-1).view(np.uint8), pool.kv_buffer.data_ptr()
    runs = [flat[at - base :][:size] for at, size in zip(pointers, sizes, strict=True)]  # k0 v0 k1 v1 ...
    units = [runs[2 * layer : 2 * layer + 2] for layer in range(SHAPE.layers)]
    assert (found == payload(row, units)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_double_of_an_attention_pool_is_like_the_real_one(layout: str) -> None:
    check_double(attention_pool(SHAPE, layout), real_attention(layout))


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_the_double_of_a_latent_pool_is_like_the_real_one(layout: str) -> None:
    shape = TokenShape(heads=1)
    check_double(latent_pool(shape, layout), real_latent(layout, shape=shape))


def test_the_double_of_a_state_pool_is_like_the_real_one() -> None:
    check_double(state_pool((10, 3), (2, 4, 5)), real_states("page_first_direct", (10, 3), (2, 4, 5)))


def check_double(double: PoolDouble, real: Any) -> None:
    assert type(double).__name__ == type(real).__name__
    for name, value in vars(double).items():
        if name == "_buffer_infos":
            assert value[0].buffers.layout.value == real._buffer_infos[0].buffers.layout.value
            continue
        found = getattr(real, name)
        many = isinstance(value, list | tuple)
        assert described(list(value) if many else value) == described(list(found) if many else found), name


def described(value: Any) -> Any:
    """Sizes and dtypes of tensors, and anything else as it is."""
    if isinstance(value, list):
        return [described(one) for one in value]
    if not hasattr(value, "data_ptr"):
        return value
    return tuple(value.shape), str(value.dtype), tuple(value.stride()), value.device.type
