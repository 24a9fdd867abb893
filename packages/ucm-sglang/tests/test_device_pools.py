"""SGLang's own device pools on a CPU: their bytes by definition, and what of them is refused."""

from types import SimpleNamespace

import import_doubles
import numpy as np
import pytest
from pool_bytes import addresses, gathered, indices_of, payload, random_bits, raw

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
import_doubles.install()

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402

from ucm_core import Part, RowKind, SpecRow, SpecTable  # noqa: E402
from ucm_core.errors import LayoutError, SpecError  # noqa: E402
from ucm_core.spec.rows import RankRule  # noqa: E402
from ucm_sglang.device_pools import device_pools  # noqa: E402
from ucm_sglang.layout_from_engine import MappedPools  # noqa: E402

LAYERS, HEADS, DIM, ROPE, PAGE, COUNT = 3, 2, 8, 4, 4, 6
COMMON = {"page_size": PAGE, "dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
UNITS = tuple(range(LAYERS))
FULL = SpecRow("full", RowKind.CHAIN, PAGE, UNITS, tuple(Part(n, (HEADS, DIM), "float32") for n in "kv"))
BOTH = (Part("latent", (DIM,), "float32"), Part("rope", (ROPE,), "float32"))
LATENT = SpecRow("latent", RowKind.CHAIN, PAGE, UNITS, BOTH, rank_rule=RankRule.ALL_UNION)


def heads(**changes):
    return MHATokenToKVPool(
        **{"size": PAGE * (COUNT - 1), "head_num": HEADS, "head_dim": DIM, "layer_num": LAYERS}
        | COMMON
        | changes
    )


def latent():
    return MLATokenToKVPool(
        size=PAGE * (COUNT - 1), kv_lora_rank=DIM, qk_rope_head_dim=ROPE, layer_num=LAYERS, **COMMON
    )


def params_of(kvcache, **more):
    allocator = SimpleNamespace(get_kvcache=lambda: kvcache)
    return SimpleNamespace(token_to_kv_pool_allocator=allocator, page_size=PAGE, **more)


def memory_of(kvcache, row):
    return MappedPools.of(device_pools(params_of(kvcache), states=False), SpecTable((row,), PAGE))


def parts_of(pool, row):
    """Per layer and part the pool's elements ``[slot, ...]``, by the definition of each pool."""
    if row is FULL:
        return [[raw(pool.k_buffer[layer]), raw(pool.v_buffer[layer])] for layer in UNITS]
    both = [raw(buffer)[:, 0] for buffer in pool.kv_buffer]
    return [[each[:, :DIM], each[:, DIM:]] for each in both]


@pytest.fixture(params=[(heads, FULL), (latent, LATENT)], ids=["heads", "latent"])
def pool(request):
    make, row = request.param
    return make(), row


def fill(pool, seed):
    rng = np.random.default_rng(seed)
    for buffer in getattr(pool, "kv_buffer", None) or [*pool.k_buffer, *pool.v_buffer]:
        raw(buffer)[...] = random_bits(rng, tuple(buffer.shape), 4)


PAGES = [3, 1, 5]


def slots(page):
    return slice(page * PAGE, (page + 1) * PAGE)


def test_bytes_out_of_a_device_pool_are_canonical(pool):
    made, row = pool
    fill(made, 1)
    blocks = memory_of(made, row).blocks("kv", row.name, indices=indices_of(PAGES, PAGE))
    found = gathered(row, blocks, len(PAGES))
    for object_, page in enumerate(PAGES):
        units = [[np.ascontiguousarray(part[slots(page)]) for part in parts] for parts in parts_of(made, row)]
        assert np.array_equal(found[object_], payload(row, units))


def test_bytes_into_a_device_pool_go_nowhere_else(pool):
    made, row = pool
    fill(made, 2)
    payloads = gathered(
        row,
        memory_of(made, row).blocks("kv", row.name, indices=indices_of(PAGES, PAGE)),
        len(PAGES),
    )
    other = heads() if row is FULL else latent()
    blocks = memory_of(other, row).blocks("kv", row.name, indices=indices_of([2, 4, 0], PAGE))
    blocks.scatter(np.arange(len(PAGES)), addresses(payloads))
    for mine, theirs in zip(parts_of(other, row), parts_of(made, row), strict=True):
        for part, right in zip(mine, theirs, strict=True):
            expected = np.zeros_like(part)
            for page, source in zip([2, 4, 0], PAGES, strict=True):
                expected[slots(page)] = right[slots(source)]
            assert np.array_equal(part, expected)


def test_indices_that_are_no_page_of_the_pool_are_refused():
    memory = memory_of(heads(), FULL)
    with pytest.raises(LayoutError, match="indices 1 to 4 are no page of 4 tokens in a pool of 6"):
        memory.blocks("kv", "full", indices=np.arange(1, 5))
    with pytest.raises(LayoutError, match="indices 24 to 27 are no page of 4 tokens in a pool of 6"):
        memory.blocks("kv", "full", indices=np.arange(24, 28))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_num": 3}, "pool 'kv', row 'full', part 'k': 3 heads in the pool, expected 2"),
        ({"head_dim": 5}, "part 'k': 5 elements per head in the pool, expected 8"),
        ({"v_head_dim": 5}, "part 'v': 5 elements per head in the pool, expected 8"),
        ({"dtype": torch.bfloat16}, "part 'k': elements are bfloat16 in the pool, expected float32"),
    ],
)
def test_another_geometry_is_refused_with_both_values(changes, message):
    with pytest.raises(LayoutError, match=message):
        memory_of(heads(**changes), FULL)


def test_another_number_of_layers_is_refused_with_both():
    with pytest.raises(SpecError, match="pool 'kv' has 2 layers, the rows full have 3 of them"):
        memory_of(heads(layer_num=2), FULL)


def test_layers_that_differ_are_refused():
    pool = heads()
    pool.v_buffer[1] = pool.v_buffer[1].to(torch.bfloat16)
    with pytest.raises(LayoutError, match=r"part 'v': layer 1 is bfloat16.*, layer 0 float32"):
        memory_of(pool, FULL)


def test_a_pool_of_a_class_that_is_not_known_is_refused_by_name():
    other = type("OtherPool", (MHATokenToKVPool,), {})
    pool = heads()
    pool.__class__ = other
    with pytest.raises(LayoutError, match=r"the pool is a OtherPool; known for it: .*MHATokenToKVPool"):
        memory_of(pool, FULL)


def test_memory_of_a_device_is_refused():
    pool = heads()
    pool.k_buffer = [buffer.to("meta") for buffer in pool.k_buffer]
    with pytest.raises(LayoutError, match="its memory is on meta; ucm-sglang copies host memory"):
        memory_of(pool, FULL)


def test_scales_are_refused():
    pool = heads()
    pool.k_scale_buffer = [torch.ones(1)]
    with pytest.raises(SpecError, match=r"pool 'kv' has scales beside its elements \(k_scale_buffer\)"):
        memory_of(pool, FULL)


@pytest.mark.parametrize(
    "name", ["mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools"]
)
def test_pools_of_a_draft_are_refused(name):
    with pytest.raises(SpecError, match=rf"2 pools of a draft model \({name}\)"):
        device_pools(params_of(heads(), **{name: (1, 2)}), states=False)


class StatesDouble(SimpleNamespace):
    """Stands for a request pool with states: three layers, five slots."""

    def __init__(self, *, siblings=(), replay=None, **more):
        cache = SimpleNamespace(
            conv=[torch.zeros(3, 5, 6, 3)], temporal=torch.zeros(3, 5, 2, 4), replayssm_d=replay
        )
        pool = SimpleNamespace(mamba_cache=cache, num_mamba_layers=3, _slot_siblings=siblings)
        super().__init__(mamba_pool=pool, **more)


def states_of(requests):
    return device_pools(params_of(heads(), req_to_token_pool=requests), states=True)["mamba"]


def test_a_pool_of_states_has_slots_and_layers():
    found = states_of(StatesDouble(short_conv_pool=SimpleNamespace(enabled=False), mamba_ckpt_pool=None))
    assert (found.page_num, found.num_mamba_layers, found.page_size) == (5, 3, 1)
    assert found.slot_state_buffers == []


@pytest.mark.parametrize(
    "states",
    [StatesDouble(siblings=("ple",)), StatesDouble(replay=torch.zeros(1))],
    ids=["sibling", "replay"],
)
def test_what_belongs_to_a_state_besides_is_named_and_then_refused(states):
    assert len(states_of(states).slot_state_buffers) == 1


@pytest.mark.parametrize("name", ["mamba_ckpt_pool", "short_conv_pool", "ngram_pool"])
def test_side_states_are_refused(name):
    pool = SimpleNamespace(enabled=True) if name != "mamba_ckpt_pool" else object()
    with pytest.raises(SpecError, match=rf"pool 'mamba' has side states beside conv and ssm \({name}\)"):
        states_of(StatesDouble(**{name: pool}))
