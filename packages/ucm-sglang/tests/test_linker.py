"""`UCMLinker` as SGLang's tree calls it: its real base class, transfers and device pools; no tree."""

import random
import threading
import time
from types import SimpleNamespace

import import_doubles
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
import_doubles.install()

from backend_world import GRAIN, config_of, hashes_of, model_of  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from start_doubles import StartDouble, UpdatesDouble  # noqa: E402

from ucm_core import Part, RowKind, Share, SpecRow, SpecTable  # noqa: E402
from ucm_core.errors import ConfigError, LayoutError, SpecError, StoreError  # noqa: E402
from ucm_sglang.layout_from_engine import MappedPools  # noqa: E402
from ucm_sglang.linker import UCMLinker  # noqa: E402
from ucm_sglang.settings import read_linker_settings  # noqa: E402

LAYERS, HEADS, DIM, PAGES = 3, 2, 8, 40
PARTS = tuple(Part(name, (HEADS, DIM), "float32") for name in ("k", "v"))
P4 = hashes_of(4)
WAIT_S = 120


def table_of(parts=PARTS, layers=LAYERS, page=GRAIN):
    return SpecTable((SpecRow("full", RowKind.CHAIN, page, tuple(range(layers)), parts),), page)


class WorldLinker(UCMLinker):
    """As SGLang loads it by name, of a model that has no checkpoint."""

    started = None

    def _start(self, storage_config, server_args):
        read_linker_settings(storage_config.extra_config, page_tokens=GRAIN)
        return type(self).started


class Linked:
    """One linker over real device pools."""

    def __init__(self, root, table=None, *, known=True, layerwise=False, **updates):
        self.updates, table = UpdatesDouble(**updates), table or table_of()
        WorldLinker.started = StartDouble(
            model_of(table), config_of(root), Share(), self.updates,
            lambda pools, table, share: MappedPools.of(pools, table), lookup_budget_s=WAIT_S,
            layerwise_save=layerwise,
        ) if known else None  # fmt: skip
        self.kv = MHATokenToKVPool(
            size=GRAIN * (PAGES - 1), page_size=GRAIN, dtype=torch.float32, head_num=HEADS, head_dim=DIM,
            layer_num=LAYERS, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        self.linker = self.made({})

    def made(self, extra):
        """By SGLang's own factory."""
        config = {"linker": "WorldLinker", "linker_module_path": __name__, "linker_extra_config": extra}
        return create_unified_cache_linker(
            ServerArgs(model_path="dummy", page_size=GRAIN), params_of(self.kv), backend="dynamic",
            config=config, components={ComponentType.FULL},
        )  # fmt: skip

    @property
    def leases(self):
        """How many requests something is kept for."""
        return self.linker._pages._cache.current.statistics().leases.held

    @property
    def buffers(self):
        return [*self.kv.k_buffer, *self.kv.v_buffer]

    def fill(self, seed, pages):
        noise = torch.Generator().manual_seed(seed)
        for buffer in self.buffers:
            buffer[slots(pages)] = torch.randn((len(pages) * GRAIN, HEADS, DIM), generator=noise)

    def bytes(self, pages):
        return [buffer[slots(pages)].clone() for buffer in self.buffers]

    def offload(self, hashes, pages):
        return self.linker.offload([transfer(hashes, pages)])

    def popped(self, count):
        deadline_s, pause = time.monotonic() + WAIT_S, threading.Event()
        while self.linker.num_completed_offloads() < count:
            assert time.monotonic() < deadline_s
            pause.wait(0.01)
        return [self.linker.pop_completed_offload() for _ in range(count)]

    def save(self, hashes, pages):
        assert self.offload(hashes, pages)
        return self.popped(1) == [True]

    def lookup(self, hashes, rid="r"):
        return self.linker.lookup(rid, [PoolTransfer(PoolName.KV, keys=list(hashes))])

    def load(self, hashes, pages, rid="r"):
        return self.linker.load(rid, [transfer(hashes, pages)])

    def forward(self):
        """The batch that starts now, all of whose layers are waited for; whether its loads came."""
        index = self.linker.start_layer_wise_loading()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(LAYERS):
            self.linker.layer_done_counter.wait_until(layer)
        return self.linker.finish_layer_wise_loading(index)


def params_of(kv, **changes):
    """What a linker reads of SGLang's `CacheInitParams`."""
    fields = {"page_size": GRAIN, "req_to_token_pool": None, "attn_tp_cache_group": None}
    fields |= {"tp_cache_group": None, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    allocator = SimpleNamespace(get_kvcache=lambda: kv)
    return SimpleNamespace(**(fields | {"token_to_kv_pool_allocator": allocator} | changes))


def slots(pages):
    return (torch.tensor(list(pages))[:, None] * GRAIN + torch.arange(GRAIN)).reshape(-1)


def transfer(hashes, pages):
    return PoolTransfer(PoolName.KV, device_indices=slots(pages), keys=list(hashes))


@pytest.fixture(autouse=True)
def one_rank():
    """What an engine publishes when it starts."""
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1):
        yield


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def linked(root):
    made = Linked(root)
    made.fill(1, range(1, 5))
    assert made.save(P4, range(1, 5))
    yield made
    made.linker.close()


# -- there and back


def test_what_was_offloaded_comes_back_to_other_pages(linked):
    right = linked.bytes(range(1, 5))
    assert linked.lookup(P4) == [1, 2, 3, 4]
    assert linked.load(P4, [13, 11, 12, 20])
    assert linked.forward() is True
    assert all(map(torch.equal, linked.bytes([13, 11, 12, 20]), right))


def test_each_layer_is_there_when_it_was_waited_for(linked):
    right = linked.bytes(range(1, 5))
    linked.lookup(P4)
    linked.load(P4, range(10, 14))
    counter = linked.linker.layer_done_counter
    index = linked.linker.start_layer_wise_loading()
    counter.set_consumer(index)
    for layer in range(LAYERS):
        counter.wait_until(layer)
        found = linked.bytes(range(10, 14))
        assert all(torch.equal(found[part], right[part]) for part in (layer, LAYERS + layer))
    assert linked.linker.finish_layer_wise_loading(index)


def test_nothing_is_found_of_what_was_never_offloaded(linked):
    assert linked.lookup(hashes_of(4, seed=1)) == []
    assert linked.lookup([]) == []
    assert linked.linker.lookup("r", []) == []


def test_a_policy_that_is_not_known_is_a_miss(linked):
    asked = [PoolTransfer(PoolName.KV, keys=P4)]
    asked += [PoolTransfer(PoolName.SWA, keys=P4[3:], hit_policy=PoolHitPolicy.BLOCK_GROUPS)]
    assert linked.linker.lookup("r", asked) == []


# -- loads


def test_without_a_load_there_is_no_batch(linked):
    assert linked.linker.start_layer_wise_loading() == -1
    assert linked.linker.finish_layer_wise_loading(-1) is True


NO_SENSE = {
    "none": [],
    "nowhere": [PoolTransfer(PoolName.KV, keys=P4)],
    "too few indices": [transfer(P4, range(3))],
    "a number": [PoolTransfer(PoolName.KV, keys=P4[:1], device_indices=torch.tensor(3))],
    "no keys": [PoolTransfer(PoolName.KV)],
    "no keys for indices": [transfer(P4, range(4)), PoolTransfer(PoolName.SWA, device_indices=slots([7]))],
    "a pool twice": [transfer(P4[:2], range(2)), transfer(P4[2:], range(2, 4))],
    "a pool that is not here": [transfer(P4, range(4)), PoolTransfer(PoolName.MAMBA, keys=P4[3:],
                                                                     device_indices=torch.tensor([1]))],
}  # fmt: skip


@pytest.mark.parametrize("asked", NO_SENSE.values(), ids=NO_SENSE)
def test_a_load_that_makes_no_sense_is_refused_and_keeps_no_lease(linked, asked):
    linked.lookup(P4)
    assert linked.linker.load("r", asked) is False
    assert linked.linker.start_layer_wise_loading() == -1
    assert linked.leases == 0


def test_a_second_load_of_a_request_is_refused_and_the_first_comes(linked):
    linked.lookup(P4)
    assert linked.load(P4, range(10, 14))
    assert linked.load(P4, range(20, 24)) is False
    assert linked.leases == 1
    assert linked.forward()
    assert not any(part.any() for part in linked.bytes(range(20, 24)))


def test_what_was_not_kept_fails_its_batch(linked):
    assert linked.load(hashes_of(2, seed=8), range(10, 12), rid="a")
    assert linked.load(P4, range(20, 24), rid="b")
    assert linked.forward() is False


def test_pages_that_are_none_fail_the_load_not_the_forward(linked):
    linked.lookup(P4)
    broken = PoolTransfer(PoolName.KV, device_indices=slots([10]) + 1, keys=P4[:1])
    assert linked.linker.load("r", [broken])
    assert linked.forward() is False
    assert linked.leases == 0


def test_a_queued_load_is_cancelled_once_and_a_started_one_never(linked):
    linked.lookup(P4)
    linked.load(P4, range(10, 14))
    assert [linked.linker.cancel_queued_load("r") for _ in range(2)] == [True, False]
    assert linked.linker.start_layer_wise_loading() == -1
    linked.load(P4, range(10, 14))
    index = linked.linker.start_layer_wise_loading()
    assert linked.linker.cancel_queued_load("r") is False
    assert linked.linker.finish_layer_wise_loading(index)


def test_a_cancelled_load_leaves_no_lease(linked):
    linked.lookup(P4)
    assert linked.leases == 1
    linked.load(P4, range(10, 14))
    linked.linker.cancel_queued_load("r")
    assert linked.leases == 0


def test_loads_that_cannot_begin_at_all_fail_and_leave_no_lease(linked, monkeypatch):
    linked.lookup(P4)
    linked.load(P4, range(10, 14))
    monkeypatch.setattr(linked.linker._pages, "begin_loads", None)
    assert linked.forward() is False
    assert linked.leases == 0


class Books:
    """The oracle of loads: queued, begun, ended and how; a batch comes if all of it was kept."""

    def __init__(self, linked, rng):
        self.linked, self.rng = linked, rng
        self.queued, self.started, self.ended = {}, [], {}

    def load(self, number, rid):
        there = self.rng.random() < 0.7
        hashes = P4[:2] if there else hashes_of(2, seed=number + 9)
        assert self.linked.load(hashes, range(10, 12), rid=rid) == (rid not in self.queued)
        self.queued.setdefault(rid, (number, there))

    def cancel(self, _, rid):
        assert self.linked.linker.cancel_queued_load(rid) == (rid in self.queued)
        self.end([self.queued.pop(rid)] if rid in self.queued else [], "cancelled")

    def start(self, *_):
        index = self.linked.linker.start_layer_wise_loading()
        assert (index == -1) == (not self.queued)
        self.started += [(index, [*self.queued.values()])] if self.queued else []
        self.queued = {}

    def finish(self, *_):
        index, loads = self.started.pop(0) if self.started else (-1, [])
        came = all(there for _, there in loads)
        assert self.linked.linker.finish_layer_wise_loading(index) == came
        self.end(loads, "finished" if came else "failed")

    def reset(self, *_):
        self.linked.linker.reset()
        self.end([*self.queued.values(), *(load for _, loads in self.started for load in loads)], "cancelled")
        self.queued, self.started = {}, []

    def end(self, loads, how):
        assert not {number for number, _ in loads} & self.ended.keys()
        self.ended |= {number: how for number, _ in loads}


@pytest.mark.parametrize("seed", range(8))
def test_every_load_ends_once_finished_cancelled_or_failed(linked, seed):
    rng = random.Random(seed)
    books = Books(linked, rng)
    for number in range(60):
        deed = rng.choice([books.load, books.load, books.cancel, books.start, books.finish, books.reset])
        deed(number, f"r{rng.randrange(4)}")


# -- offloads


@pytest.mark.parametrize("offered", NO_SENSE.values(), ids=NO_SENSE)
def test_an_offload_that_makes_no_sense_is_refused(linked, offered):
    assert linked.linker.offload(offered) is False
    assert linked.linker.num_completed_offloads() == 0


def test_offloads_are_popped_in_the_order_in_which_they_were_accepted(linked):
    broken = PoolTransfer(PoolName.KV, device_indices=slots([10]) + 1, keys=hashes_of(1, seed=2))
    linked.offload(hashes_of(3, seed=3), range(20, 23))
    linked.linker.offload([broken], session_id="s")
    linked.offload(hashes_of(2, seed=4), range(30, 32))
    assert linked.popped(3) == [True, False, True]
    assert linked.linker.num_completed_offloads() == 0
    with pytest.raises(StoreError, match="none of 0 offloads is over"):
        linked.linker.pop_completed_offload()


# -- reset, close


def test_a_reset_leaves_nothing_queued_begun_or_to_pop(linked):
    linked.load(P4, range(10, 14), rid="queued")
    linked.offload(hashes_of(3, seed=3), range(20, 23))
    linked.linker.reset()
    assert linked.linker.start_layer_wise_loading() == -1
    assert linked.linker.num_completed_offloads() == 0
    assert linked.lookup(P4) == [1, 2, 3, 4]


def test_a_reset_ends_a_load_in_flight(linked):
    linked.lookup(P4)
    linked.load(P4, range(10, 14))
    index = linked.linker.start_layer_wise_loading()
    linked.linker.layer_done_counter.set_consumer(index)
    linked.linker.reset()
    assert linked.linker.finish_layer_wise_loading(index) is False
    linked.fill(5, range(10, 14))
    right = linked.bytes(range(10, 14))
    linked.linker.layer_done_counter.wait_until(LAYERS - 1)
    assert all(map(torch.equal, linked.bytes(range(10, 14)), right))


def test_after_close_everything_is_a_miss(linked):
    linked.linker.close()
    linked.linker.close()
    assert linked.lookup(P4) == []
    assert linked.offload(P4, range(1, 5))
    assert linked.popped(1) == [False]
    assert linked.load(P4, range(10, 14))
    assert linked.forward() is False
    assert linked.updates.callbacks == []


# -- weights, and what cannot work


def test_new_weights_find_nothing_of_the_old(linked):
    linked.updates.change(True)
    assert linked.lookup(P4) == []
    assert linked.save(P4, range(1, 5))
    assert linked.lookup(P4) == [1, 2, 3, 4]
    linked.updates.change(False)
    assert linked.lookup(P4) == []
    assert linked.offload(P4, range(1, 5))
    assert linked.popped(1) == [False]


def test_weights_that_changed_before_the_linker_was_made_find_nothing(root, linked):
    linked.linker.close()
    late = Linked(root, overtaken=True)
    assert late.lookup(P4) == []
    late.linker.close()


def test_a_model_that_cannot_be_identified_caches_nothing(root):
    unknown = Linked(root, known=False)
    assert unknown.lookup(P4) == []
    assert unknown.offload(P4, range(1, 5))
    assert unknown.popped(1) == [False]
    assert unknown.load(P4, range(1, 5))
    assert unknown.forward() is False
    unknown.linker.close()


def test_heads_that_are_not_the_tables_are_refused_with_both_numbers(root):
    wide = table_of(tuple(Part(name, (4, DIM), "float32") for name in ("k", "v")))
    with pytest.raises(
        LayoutError, match=r"pool 'kv', row 'full', part 'k': 2 heads in the pool, expected 4"
    ):
        Linked(root, wide)


def test_a_layer_that_is_missing_is_refused_with_both_numbers(root):
    with pytest.raises(SpecError, match="pool 'kv' has 3 layers, the rows full have 5 of them"):
        Linked(root, table_of(layers=5))


def test_an_unknown_field_is_refused_by_name(linked):
    with pytest.raises(ConfigError, match=r"unknown setting 'ring_byte'; did you mean 'ring_bytes'"):
        linked.made({"ring_byte": 1})


def test_drafts_are_refused(linked):
    with pytest.raises(SpecError, match=r"1 pools of a draft model \(mtp_draft_device_pools\)"):
        WorldLinker(
            SimpleNamespace(model_path="m"), params_of(linked.kv, mtp_draft_device_pools=(linked.kv,)),
            components={ComponentType.FULL},
        )  # fmt: skip
