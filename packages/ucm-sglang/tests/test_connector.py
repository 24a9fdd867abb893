"""`UCMHiCache` as SGLang calls it: its real base class, configuration, transfers; doubles of host pools."""

import threading

import import_doubles
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
import_doubles.install()

from backend_world import (  # noqa: E402
    DENSE,
    GRAIN,
    HYBRID,
    INDEXER,
    KV,
    MAMBA,
    SWA,
    MemoryDouble,
    config_of,
    hashes_of,
    indices_of,
    model_of,
)
from counted import errors  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from start_doubles import StartDouble, UpdatesDouble  # noqa: E402

from ucm_core import Share  # noqa: E402
from ucm_core.errors import LayoutError  # noqa: E402
from ucm_sglang.connector import UCMHiCache  # noqa: E402

P4 = hashes_of(4)


def storage_config(**changes):
    fields = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    fields |= {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False}
    return HiCacheStorageConfig(
        **(fields | {"model_name": "m", "extra_config": {"interface_v1": 1}} | changes)
    )


class Attached:
    """A backend that SGLang attached: its pools are registered."""

    def __init__(self, root, table=DENSE, *, registers_pools=True, **updates):
        self.table, self.memory, self.updates = table, MemoryDouble(table), UpdatesDouble(**updates)
        self.begun = StartDouble(
            model_of(table),
            config_of(root),
            Share(),
            self.updates,
            lambda pools, table, share: self.memory,
            registers_pools=registers_pools,
        )
        self.storage = UCMHiCache(storage_config(), {}, start=lambda _: self.begun)

    def register(self):
        self.storage.register_mem_pool_host(self.memory)
        for pool in self.memory.pools:
            self.storage.register_mem_host_pool_v2(
                self.memory if pool.name == "kv" else object(), PoolName(pool.name)
            )
        self.storage.on_host_pools_registered()
        return self

    def set(self, hashes, pages, extra=None):
        self.memory.fill(KV, hashes, pages)
        return self.storage.batch_set_v1(hashes, torch.from_numpy(indices_of(KV, pages)), extra)

    def get(self, hashes, pages):
        return self.storage.batch_get_v1(hashes, torch.from_numpy(indices_of(KV, pages)), None)

    def transfer(self, pool, hashes, pages, policy=PoolHitPolicy.ALL_PAGES):
        indices = torch.from_numpy(indices_of(pool, pages))
        return PoolTransfer(PoolName(pool.name), host_indices=indices, keys=hashes, hit_policy=policy)


@pytest.fixture
def dense(tmp_path):
    made = Attached(tmp_path / "root").register()
    yield made
    made.storage.close()


@pytest.fixture
def hybrid(tmp_path):
    made = Attached(tmp_path / "root", HYBRID).register()
    yield made
    made.storage.close()


# -- start


def test_it_is_what_sglang_takes():
    assert issubclass(UCMHiCache, HiCacheStorage)
    assert not UCMHiCache.__abstractmethods__


@pytest.mark.parametrize("kwargs", [{}, {"anything": 1}])
def test_arguments_of_sglang_are_taken(tmp_path, kwargs):
    begun = Attached(tmp_path / "root").begun
    UCMHiCache(storage_config(), kwargs, start=lambda _: begun).close()


def test_a_model_that_cannot_be_identified_caches_nothing():
    storage = UCMHiCache(storage_config(), {}, start=lambda _: None)
    storage.register_mem_pool_host(object())
    storage.on_host_pools_registered()
    indices = torch.arange(4 * GRAIN)
    assert storage.batch_set_v1(P4, indices) == [False] * 4
    assert (storage.batch_exists(P4), storage.batch_get_v1(P4, indices)) == (0, [False] * 4)
    storage.clear()
    storage.close()


def test_pools_that_do_not_fit_fail_the_attach(tmp_path):
    attached = Attached(tmp_path / "root")
    attached.memory.rows = None

    def refuse(pools, table, share):
        raise LayoutError("pool 'kv': 5 layers, the table 4")

    object.__setattr__(attached.begun, "read_pools", refuse)
    with pytest.raises(LayoutError, match="5 layers"):
        attached.register()
    assert attached.storage.batch_exists(P4) == 0


def test_the_same_pool_is_registered_twice_and_another_refused(dense):
    dense.storage.register_mem_host_pool_v2(dense.memory, PoolName.KV)
    with pytest.raises(LayoutError, match="other memory"):
        dense.storage.register_mem_host_pool_v2(object(), PoolName.KV)


def test_where_sglang_says_no_end_of_pools_the_first_call_is_it(tmp_path):
    attached = Attached(tmp_path / "root", registers_pools=False)
    attached.storage.register_mem_pool_host(attached.memory)
    assert attached.set(P4, range(4)) == [True] * 4
    attached.storage.close()


def test_before_the_pools_are_registered_all_is_a_miss(tmp_path):
    attached = Attached(tmp_path / "root")
    assert attached.set(P4, range(4)) == [False] * 4
    assert attached.storage.batch_exists(P4) == 0
    attached.storage.close()


# -- keys and values


def test_pages_go_and_come(dense):
    assert dense.set(P4, range(4)) == [True] * 4
    assert dense.storage.batch_exists(P4) == 4
    assert dense.storage.exists(P4[2])
    assert dense.get(P4, range(20, 24)) == [True] * 4
    assert all(dense.memory.holds(KV, P4, range(20, 24)))


def test_answers_are_plain_bools_one_per_key(dense):
    dense.set(P4[:2], range(2))
    answer = dense.get(P4, range(4))
    assert answer == [True, True, False, False]
    assert {type(each) for each in answer} == {bool}


def test_prefix_keys_are_taken(dense):
    extra = HiCacheStorageExtraInfo(prefix_keys=P4[:2])
    assert dense.set(P4[:2], range(2)) == [True] * 2
    assert dense.set(P4[2:], range(2, 4), extra) == [True] * 2
    assert dense.storage.batch_exists(P4[2:], extra) == 2


@pytest.mark.parametrize(
    ("keys", "indices"),
    [
        (["no hash"], torch.arange(GRAIN)),
        (P4[:1], torch.arange(GRAIN - 1)),
        (P4[:1], None),
        (P4[:1], torch.arange(3)),
    ],
)
def test_what_sglang_must_not_do_is_a_miss_and_counted(dense, keys, indices):
    before = errors("load"), errors("save")
    assert dense.storage.batch_get_v1(keys, indices) == [False]
    assert dense.storage.batch_set_v1(keys, indices) == [False]
    assert (errors("load"), errors("save")) == (before[0] + 1, before[1] + 1)


def test_the_route_through_tensors_moves_nothing(dense):
    assert dense.storage.get(P4[0]) is None
    assert dense.storage.batch_get(P4) == [None] * 4
    assert not dense.storage.set(P4[0], torch.zeros(1))
    assert not dense.storage.batch_set(P4, [torch.zeros(1)] * 4)


# -- other pools


def asked(swa=3):
    placeholder = ["__placeholder__"]
    return [
        PoolTransfer(PoolName.SWA, keys=placeholder * swa, hit_policy=PoolHitPolicy.TRAILING_PAGES),
        PoolTransfer(PoolName.MAMBA, keys=placeholder, hit_policy=PoolHitPolicy.TRAILING_PAGES),
        PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV),
    ]


def backup(attached, hashes):
    """As SGLang backs up a node: everything else first."""
    count = len(hashes)
    for pool, keys in ((SWA, hashes[-3:]), (MAMBA, hashes[-1:]), (INDEXER, hashes)):
        attached.memory.fill(pool, keys, range(len(keys)))
        sent = attached.transfer(pool, keys, range(len(keys)))
        assert attached.storage.batch_set_v2([sent]) == {sent.name: [True] * len(keys)}
    assert attached.set(hashes, range(count)) == [True] * count


def test_lengths_are_a_set_with_holes(hybrid):
    hashes = hashes_of(9)
    backup(hybrid, hashes[:4])
    backup(hybrid, hashes[4:])
    found = hybrid.storage.batch_exists_v2(hashes, asked())
    assert found.restorable_prefix_pages == [4, 9]
    assert found.kv_hit_pages == 9
    assert found.extra_pool_hit_pages == {
        PoolName.KV: 9,
        PoolName.SWA: 9,
        PoolName.MAMBA: 9,
        PoolName.INDEXER: 9,
    }


def test_nothing_there_is_the_empty_answer(hybrid):
    found = hybrid.storage.batch_exists_v2(P4, asked())
    assert (found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages) == (0, {}, [])


def test_keys_and_values_without_their_state_are_no_hit(hybrid):
    hybrid.set(P4, range(4))
    found = hybrid.storage.batch_exists_v2(P4, asked())
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert found.extra_pool_hit_pages == {PoolName.KV: 4}
    assert hybrid.storage.batch_exists(P4) == 4


def test_side_pools_come_back(hybrid):
    hashes = hashes_of(4)
    backup(hybrid, hashes)
    sent = [
        hybrid.transfer(SWA, hashes[1:], [40, 41, 42], PoolHitPolicy.TRAILING_PAGES),
        hybrid.transfer(MAMBA, hashes[-1:], [17], PoolHitPolicy.TRAILING_PAGES),
    ]
    assert hybrid.storage.batch_get_v2(sent) == {PoolName.SWA: [True] * 3, PoolName.MAMBA: [True]}
    assert all(hybrid.memory.holds(SWA, hashes[1:], [40, 41, 42]))
    assert all(hybrid.memory.holds(MAMBA, hashes[-1:], [17]))


def test_a_pool_that_is_not_there_fails_alone(hybrid):
    known = hybrid.transfer(MAMBA, P4[:1], [0])
    hybrid.storage.batch_set_v2([known])
    unknown = PoolTransfer(PoolName.DRAFT, host_indices=torch.arange(GRAIN), keys=P4[:1])
    answer = hybrid.storage.batch_get_v2([known, unknown])
    assert answer == {PoolName.MAMBA: [True], PoolName.DRAFT: [False]}


def test_a_transfer_of_nothing_is_an_empty_list(hybrid):
    assert hybrid.storage.batch_get_v2([PoolTransfer(PoolName.MAMBA)]) == {PoolName.MAMBA: []}


@pytest.mark.parametrize(
    "transfer",
    [PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.BLOCK_GROUPS), PoolTransfer(PoolName.DRAFT)],
)
def test_what_is_not_known_how_to_ask_is_no_hit_and_counted(hybrid, transfer):
    backup(hybrid, P4)
    before = errors("exists")
    found = hybrid.storage.batch_exists_v2(P4, [*asked(), transfer])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages) == (0, {}, [])
    assert errors("exists") == before + 1


# -- new weights


def test_after_an_update_nothing_of_before_is_found(dense):
    dense.set(P4, range(4))
    dense.updates.change(True)
    assert dense.storage.batch_exists(P4) == 0
    assert dense.get(P4, range(4)) == [False] * 4
    assert dense.set(P4, range(4)) == [True] * 4
    assert dense.storage.batch_exists(P4) == 4


@pytest.mark.parametrize("told", [(False,), ()])
def test_without_a_flush_nothing_is_cached_until_there_is_one(dense, told):
    dense.set(P4, range(4))
    dense.updates.change(*told)
    assert dense.storage.batch_exists(P4) == 0
    assert dense.set(P4, range(4)) == [False] * 4
    dense.updates.change(True)
    assert dense.storage.batch_exists(P4) == 0
    assert dense.set(P4, range(4)) == [True] * 4


def test_after_an_update_another_engine_finds_nothing_of_this_one(dense, tmp_path):
    dense.updates.change(True)
    dense.set(P4, range(4))
    other = Attached(tmp_path / "root").register()
    assert other.storage.batch_exists(P4) == 0
    other.storage.close()


@pytest.mark.parametrize("stale", [False, True])
def test_a_backend_attached_after_an_update_has_a_cache_of_its_own(tmp_path, stale):
    first = Attached(tmp_path / "root").register()
    first.set(P4, range(4))
    first.storage.close()
    second = Attached(tmp_path / "root", overtaken=True, stale=stale).register()
    assert second.storage.batch_exists(P4) == 0
    assert second.set(P4, range(4)) == [not stale] * 4
    second.storage.close()
    third = Attached(tmp_path / "root").register()
    assert third.storage.batch_exists(P4) == 0
    third.storage.close()


# -- the end


def test_the_operator_clears(dense):
    dense.set(P4, range(4))
    dense.storage.clear()
    assert dense.storage.batch_exists(P4) == 0
    assert dense.set(P4, range(4)) == [True] * 4


def test_closed_twice_and_everything_after_is_a_miss(dense):
    dense.set(P4, range(4))
    dense.storage.close()
    dense.storage.close()
    assert dense.storage.batch_exists(P4) == 0
    assert dense.get(P4, range(4)) == [False] * 4
    assert dense.set(P4, range(4)) == [False] * 4
    assert dense.storage.batch_exists_v2(P4, []).restorable_prefix_pages == []
    dense.storage.clear()
    assert not dense.updates.callbacks


def test_detached_and_attached_again_it_finds_what_it_stored(dense, tmp_path):
    dense.set(P4, range(4))
    dense.storage.close()
    again = Attached(tmp_path / "root").register()
    assert again.storage.batch_exists(P4) == 4
    assert again.get(P4, range(8, 12)) == [True] * 4
    assert all(again.memory.holds(KV, P4, range(8, 12)))
    again.storage.close()


def test_three_threads_at_once_never_get_bytes_of_another_page(dense):
    """Lookups, reads and backups as SGLang's threads do them, each in pages of its own."""
    stop, wrong, brought = threading.Event(), [], [0]

    def back_up():
        for turn in range(40):
            hashes = hashes_of(4, seed=turn % 10)
            dense.set(hashes, range(4))
        stop.set()

    def read():
        last = False
        while not last:
            last = stop.is_set()  # a whole round after the last page was backed up
            for turn in range(10):
                hashes = hashes_of(4, seed=turn)
                came = dense.get(hashes, range(30, 34))
                held = dense.memory.holds(KV, hashes, range(30, 34))
                wrong.extend(page for page in range(4) if came[page] and not held[page])
                brought[0] += sum(came)

    def look_up():
        while not stop.is_set():
            for turn in range(10):
                dense.storage.batch_exists(hashes_of(4, seed=turn))

    threads = [threading.Thread(target=each) for each in (back_up, read, look_up)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert brought[0]
