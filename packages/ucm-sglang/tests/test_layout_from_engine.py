"""Bytes of SGLang's host pools, in every layout, against canonical bytes written by their definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_bytes import (
    POISON,
    addresses,
    gathered,
    indices_of,
    payload,
    random_bits,
    raw,
    read,
    write,
)
from pool_doubles import (
    ITEM_BYTES,
    PoolDouble,
    TokenShape,
    attention_pool,
    device_infos,
    latent_pool,
    state_pool,
    tensor,
)

from ucm_core.errors import LayoutError
from ucm_core.spec.rows import Part, RankRule, RowKind, SpecRow
from ucm_core.spec.segments import Parallelism, Rank, Share
from ucm_core.spec.table import SpecTable
from ucm_sglang.layout_from_engine import MappedPools

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def attention_row(shape: TokenShape, dtype: str = "float32", **more: Any) -> SpecRow:
    parts = tuple(Part(name, (shape.heads, shape.dim), dtype) for name in ("k", "v"))
    settings = {"name": "full", "units": tuple(range(shape.layers)), "parts": parts} | more
    return SpecRow(kind=RowKind.CHAIN, block_tokens=shape.page, **settings)


def latent_row(shape: TokenShape, rope: int, dtype: str = "float32") -> SpecRow:
    parts = (Part("latent", (shape.dim - rope,), dtype), Part("rope", (rope,), dtype))
    return attention_row(shape, name="mla", parts=parts, rank_rule=RankRule.ALL_UNION)


def state_row(conv: tuple[int, int] = (3, 10), ssm: tuple[int, ...] = (2, 4, 5), layers: int = 3) -> SpecRow:
    parts = (Part("conv", conv, "bfloat16"), Part("ssm", ssm, "float32"))
    return SpecRow("mamba2", RowKind.SNAPSHOT, 4, tuple(range(layers)), parts)


def host_pools(row: SpecRow, pool: Any, name: str = "kv") -> MappedPools:
    if name == "mamba":
        kept = attention_row(TokenShape(1))
        pools = {"kv": attention_pool(TokenShape(1), "layer_first"), name: pool}
        return MappedPools.of(pools, SpecTable((kept, row), row.block_tokens))
    return MappedPools.of({name: pool}, SpecTable((row,), row.block_tokens))


def filled(pool: PoolDouble, values: tuple[np.ndarray, ...], layout: str) -> PoolDouble:
    for buffer, part in zip((pool.k_buffer, pool.v_buffer), values, strict=True):
        write(buffer, part, layout, pool.page_size)
    return pool


def canonical(row: SpecRow, values: tuple[np.ndarray, ...], page: int, layers: range) -> np.ndarray:
    """Canonical bytes of ``page``, of parts ``[layer, slot, ...]``."""
    slots = slice(page * row.block_tokens, (page + 1) * row.block_tokens)
    return payload(row, [[part[layer, slots] for part in values] for layer in layers])


shapes = st.builds(
    TokenShape,
    layers=st.integers(1, 4),
    pages=st.integers(1, 6),
    page=st.sampled_from([1, 2, 5, 16]),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 3, 16]),
)


@st.composite
def moves(draw: st.DrawFn) -> tuple[TokenShape, list[int], list[int], np.random.Generator]:
    """A pool, pages to read of it, as many to write of another, in any order."""
    shape = draw(shapes)
    pages = draw(st.permutations(range(shape.pages)))
    count = draw(st.integers(1, shape.pages))
    others = draw(st.permutations(range(shape.pages)))
    return shape, pages[:count], others[:count], np.random.default_rng(draw(st.integers(0, 99)))


@given(moves(), st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.sampled_from(sorted(ITEM_BYTES)))
def test_pages_of_any_layout_are_canonical_bytes_and_become_pages_of_any_other(
    move: Any, layout: str, other: str, dtype: str
) -> None:
    shape, pages, others, rng = move
    row = attention_row(shape, dtype)
    size = (shape.layers, shape.pages * shape.page, shape.heads, shape.dim)
    values = tuple(random_bits(rng, size, ITEM_BYTES[dtype]) for _ in range(2))
    pool = filled(attention_pool(shape, layout, dtype), values, layout)
    blocks = host_pools(row, pool).blocks("kv", "full", indices=indices_of(pages, shape.page))
    payloads = gathered(row, blocks, len(pages))
    for page, found in zip(pages, payloads, strict=True):
        assert (found == canonical(row, values, page, range(shape.layers))).all()

    target = attention_pool(shape, other, dtype)
    for buffer in target.kv_buffer:
        buffer.raw.view(np.uint8)[...] = POISON
    expected = [
        np.frombuffer(bytes([POISON]) * part.nbytes, part.dtype).reshape(size).copy() for part in values
    ]
    for part, held in zip(values, expected, strict=True):
        for page, to in zip(pages, others, strict=True):
            held[:, to * shape.page : (to + 1) * shape.page] = part[
                :, page * shape.page : (page + 1) * shape.page
            ]
    blocks = host_pools(row, target).blocks("kv", "full", indices=indices_of(others, shape.page))
    blocks.scatter(np.arange(len(others)), addresses(payloads))
    for buffer, held in zip(target.kv_buffer, expected, strict=True):
        assert (read(buffer, size, other, shape.page) == held).all()


@given(
    moves(),
    st.sampled_from(LAYOUTS[:3]),
    st.sampled_from(LAYOUTS[:3]),
    st.sampled_from(sorted(ITEM_BYTES)),
    st.data(),
)
def test_latent_pages_are_the_latents_then_the_rotary_parts(
    move: Any, layout: str, other: str, dtype: str, data: st.DataObject
) -> None:
    shape, pages, others, rng = move
    shape = TokenShape(shape.layers, shape.pages, shape.page, 1, shape.dim + 1)
    rope = data.draw(st.integers(1, shape.dim - 1))
    row = latent_row(shape, rope, dtype)
    size = (shape.layers, shape.pages * shape.page, 1, shape.dim)
    values = random_bits(rng, size, ITEM_BYTES[dtype])
    pool, target = (latent_pool(shape, name, dtype) for name in (layout, other))
    write(pool.kv_buffer, values, layout, shape.page)
    blocks = host_pools(row, pool).blocks("kv", "mla", indices=indices_of(pages, shape.page))
    payloads = gathered(row, blocks, len(pages))
    parts = (values[..., :-rope], values[..., -rope:])
    for page, found in zip(pages, payloads, strict=True):
        assert (found == canonical(row, parts, page, range(shape.layers))).all()
    blocks = host_pools(row, target).blocks("kv", "mla", indices=indices_of(others, shape.page))
    blocks.scatter(np.arange(len(others)), addresses(payloads))
    expected = np.zeros_like(values)
    for page, to in zip(pages, others, strict=True):
        expected[:, to * shape.page :][:, : shape.page] = values[:, page * shape.page :][:, : shape.page]
    assert (read(target.kv_buffer, size, other, shape.page) == expected).all()


@given(st.integers(1, 4), st.integers(1, 3), st.integers(4, 9), st.booleans(), st.permutations(range(5)))
def test_states_are_their_parts_with_the_channels_last(
    layers: int, window: int, channels: int, first: bool, slots: list[int]
) -> None:
    row = state_row((window, channels), layers=layers)
    pool = state_pool((channels, window) if first else (window, channels), (2, 4, 5), layers=layers)
    rng = np.random.default_rng(layers)
    conv, ssm = (raw(buffer) for buffer in (pool.conv_buffer[0], pool.temporal_buffer))
    conv[...], ssm[...] = random_bits(rng, conv.shape, 2), random_bits(rng, ssm.shape, 4)
    slots = slots[: 1 + channels % 5]
    pools = host_pools(row, pool, "mamba")
    payloads = gathered(row, pools.blocks("mamba", "mamba2", indices=np.array(slots)), len(slots))
    canonical_conv = conv.swapaxes(-1, -2) if first else conv
    for slot, found in zip(slots, payloads, strict=True):
        units = [[canonical_conv[slot, layer, 0], ssm[slot, layer, 0]] for layer in range(layers)]
        assert (found == payload(row, units)).all()
    others, before = slots[::-1], (conv.copy(), ssm.copy())
    pools.blocks("mamba", "mamba2", indices=np.array(others)).scatter(
        np.arange(len(slots)), addresses(payloads)
    )
    for now, then in zip((conv, ssm), before, strict=True):
        assert (now[others] == then[slots]).all()
        untouched = [slot for slot in range(5) if slot not in slots]
        assert (now[untouched] == then[untouched]).all()


def test_a_pool_that_mixes_rows_is_split_by_layer() -> None:
    shape = TokenShape(layers=4)
    full, window = (
        attention_row(shape, units=(1, 3)),
        attention_row(shape, name="window-8", units=(0, 2), window=8),
    )
    values = tuple(random_bits(np.random.default_rng(0), (4, 20, 2, 8), 4) for _ in range(2))
    pool = filled(attention_pool(shape, "page_first"), values, "page_first")
    pools = MappedPools.of({"kv": pool}, SpecTable((full, window), 4))
    for row, layers in ((full, range(1, 4, 2)), (window, range(0, 4, 2))):
        found = gathered(row, pools.blocks("kv", row.name, indices=indices_of([3], 4)), 1)
        assert (found[0] == canonical(row, values, 3, layers)).all()
    assert pools.rows("kv") == ("full", "window-8")


def test_keys_and_values_may_differ_in_width() -> None:
    shape, wide = TokenShape(), TokenShape(dim=12)
    pool = attention_pool(
        shape, "page_first_direct", v_buffer=tensor(wide.axes("page_first_direct"), "float32")
    )
    pool = PoolDouble.renamed("AsymmetricMHATokenToKVPoolHost", **vars(pool))
    rng = np.random.default_rng(1)
    values = tuple(random_bits(rng, (3, 20, 2, dim), 4) for dim in (8, 12))
    row = attention_row(shape, parts=(Part("k", (2, 8), "float32"), Part("v", (2, 12), "float32")))
    filled(pool, values, "page_first_direct")
    found = gathered(row, host_pools(row, pool).blocks("kv", "full", indices=indices_of([2, 0], 4)), 2)
    assert (found[0] == canonical(row, values, 2, range(3))).all()


def test_a_rank_holds_its_heads_and_layers() -> None:
    row = attention_row(TokenShape(layers=6, heads=4))
    share = Share(Parallelism(2, (2, 4)), Rank(1, 1))
    pool = attention_pool(TokenShape(layers=4), "layer_first", start_layer=2)
    pools = MappedPools.of({"kv": pool}, SpecTable((row,), 4), share=share)
    (held,) = share.slices(row)
    values = tuple(random_bits(np.random.default_rng(2), (4, 20, 2, 8), 4) for _ in range(2))
    filled(pool, values, "layer_first")
    found = gathered(held.row, pools.blocks("kv", "full", indices=indices_of([1], 4)), 1)
    assert (found[0] == canonical(held.row, values, 1, range(4))).all()


def test_the_pools_memory_outlives_the_pool() -> None:
    pool = attention_pool(TokenShape(), "layer_first")
    buffers = pool.kv_buffer
    pools = host_pools(attention_row(TokenShape()), pool)
    pool.kv_buffer = None
    assert pools.memory["kv", "full"].tensors is buffers


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 1, 2], r"shape \[3\] are no pages of 4 tokens"),
        ([[0, 1, 2, 3]], r"shape \[1, 4\] are no pages"),
        ([4, 5, 6, 7, 1, 2, 3, 4], r"object 1: indices 1 to 4 are no page of 4 tokens"),
        ([0, 1, 3, 2], r"object 0: indices 0 to 2 are no page"),
        ([20, 21, 22, 23], r"indices 20 to 23 .* in a pool of 5"),
        ([-4, -3, -2, -1], r"indices -4 to -1 .* in a pool of 5"),
    ],
)
def test_indices_that_are_no_pages_are_refused(indices: list[Any], message: str) -> None:
    pools = host_pools(attention_row(TokenShape()), attention_pool(TokenShape(), "layer_first"))
    with pytest.raises(LayoutError, match=message):
        pools.blocks("kv", "full", indices=np.array(indices, np.int64))


def test_a_row_that_a_pool_does_not_hold_is_refused() -> None:
    pools = host_pools(attention_row(TokenShape()), attention_pool(TokenShape(), "layer_first"))
    with pytest.raises(
        LayoutError, match=r"pool 'swa' has no layer of row 'full' on this rank; here are full in kv"
    ):
        pools.blocks("swa", "full", indices=indices_of([0], 4))


SHAPE = TokenShape()


def with_v(v: Any) -> PoolDouble:
    return attention_pool(SHAPE, "layer_first", v_buffer=v)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (attention_pool(SHAPE, "layer_first", layout="page_unified"), "layout 'page_unified' of a MHAToken"),
        (latent_pool(SHAPE, "page_head"), "layout 'page_head' of a MLATokenToKVPoolHost is not known"),
        (latent_pool(SHAPE, "layer_first"), "a MLATokenToKVPoolHost holds latent, rope, the row k, v"),
        (PoolDouble.renamed("MHATokenToKVPoolMXFP8Host", **vars(attention_pool(SHAPE, "page_head"))),
         "the pool is a MHATokenToKVPoolMXFP8Host; known for it: MHATokenToKVPoolHost, Asym"),
        (attention_pool(SHAPE, "layer_first", kv_buffer=None), "the pool has no memory on this rank"),
        (attention_pool(SHAPE, "layer_first", _buffer_infos=device_infos("hnd")), "K and V as 'hnd'"),
        (attention_pool(SHAPE, "layer_first", _buffer_infos=()), "K and V as 'None' on the dev"),
        (attention_pool(SHAPE, "layer_first", dtype="bfloat16"), "elements are bfloat16 in the pool, exp"),
        (attention_pool(TokenShape(heads=4), "layer_first"), "part 'k': 4 heads in the pool, expected 2"),
        (attention_pool(TokenShape(dim=16), "page_head"), "part 'k': 16 elements per head in the pool"),
        (attention_pool(TokenShape(layers=4), "page_first", layer_num=3, target_layer_num=3),
         "part 'k': 4 layers in the pool, expected 3"),
        (attention_pool(TokenShape(pages=6), "page_first_direct", page_num=5), "6 pages in the pool"),
        (attention_pool(TokenShape(pages=6), "page_first", page_num=5), "24 slots in the pool, expected 20"),
        (attention_pool(TokenShape(page=8), "page_first_direct", page_size=4), "8 tokens per page in the"),
        (with_v(tensor((3, 20, 2, 9), "float32")), "part 'v': 9 elements per head in the pool, expected 8"),
        (with_v(tensor((3, 20, 16), "float32")), r"part 'v': shape \[3, 20, 16\] has 3 axes, expected 4"),
        (with_v(SimpleNamespace(device=SimpleNamespace(type="cuda"))), "part 'v': its memory is on names"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_row_is_refused(pool: PoolDouble, message: str) -> None:
    with pytest.raises(LayoutError, match=rf"^pool 'kv', row 'full'.*{message}"):
        host_pools(attention_row(SHAPE), pool)


def test_an_older_engine_says_the_order_on_its_device_pool() -> None:
    device = SimpleNamespace(kv_cache_layout="nhd")
    pool = attention_pool(SHAPE, "layer_first", _buffer_infos=(), device_pool=device)
    assert host_pools(attention_row(SHAPE), pool).rows("kv") == ("full",)


def test_a_latent_entry_of_another_width_is_refused() -> None:
    shape = TokenShape(heads=1, dim=64)
    with pytest.raises(LayoutError, match="72 elements per head in the pool, expected 64"):
        host_pools(latent_row(shape, 16), latent_pool(TokenShape(heads=1, dim=72), "page_first"))


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (state_pool((10, 4), (2, 4, 5)), r"part 'conv': shape \[10, 4\] in the pool, expected \[3, 10\]"),
        (state_pool((10, 3), (2, 5, 4)), r"part 'ssm': shape \[2, 5, 4\] in the pool, expected \[2, 4, 5\]"),
        (state_pool((10, 3), (2, 4, 5), conv_buffer=[None, None]), "2 convolution states in the pool"),
        (state_pool((10, 3), (2, 4, 5), layout="layer_first"), "layout 'layer_first' of a MambaPoolHost"),
        (state_pool((10, 3), (2, 4, 5), page_num=6), "5 slots in the pool, expected 6"),
        (state_pool((10, 3), (2, 4, 5), temporal_buffer=tensor((5, 3, 1, 2, 4, 5), "bfloat16")),
         "part 'ssm': elements are bfloat16 in the pool, expected float32"),
    ],
)  # fmt: skip
def test_a_state_of_another_shape_is_refused(pool: PoolDouble, message: str) -> None:
    with pytest.raises(LayoutError, match=rf"^pool 'mamba', row 'mamba2'.*{message}"):
        host_pools(state_row(), pool, "mamba")


def test_a_square_convolution_window_is_refused_because_its_axes_cannot_be_told_apart() -> None:
    with pytest.raises(LayoutError, match=r"shape \[4, 4\] does not say which axis are the channels"):
        host_pools(state_row((4, 4)), state_pool((4, 4), (2, 4, 5)), "mamba")


def test_a_state_with_gaps_is_refused() -> None:
    gaps = tensor((5, 3, 1, 2, 4, 10), "float32")
    gaps.raw = gaps.raw[..., ::2]
    with pytest.raises(LayoutError, match=r"part 'ssm': strides .* a dense state has \[80, 20, 4\]"):
        host_pools(state_row(), state_pool((10, 3), (2, 4, 5), temporal_buffer=gaps), "mamba")
