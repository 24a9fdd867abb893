"""SGLang's real radix tree, host pools and storage threads over `UCMHiCache`: what an empty tree reads.

The trees are those of SGLang's own unit tests, on CPU tensors; doubles stand for kernels and pinned memory.
"""

import atexit
import json
import sys
import threading
import time
import unittest
from array import array
from pathlib import Path
from types import ModuleType

import import_doubles
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
import_doubles.install()
sys.path.insert(0, str(Path(__file__).parents[3] / "e2e" / "engine" / "sglang_doubles"))
import ucm_sglang_doubles  # noqa: E402 (of the stories; found once its folder is on the path)

ucm_sglang_doubles.install()
case = ModuleType("sglang.test.test_utils")  # the real one imports data sets
case.CustomTestCase = unittest.TestCase
sys.modules.setdefault("sglang.test.test_utils", case)

from backend_world import WEIGHTS, config_of, model_of  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402
from sglang.test.kits.unified_radix_cache import fixtures  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures  # noqa: E402

from ucm_core import Part, RowKind, Share, SpecRow, SpecTable  # noqa: E402
from ucm_core.engine_cache import EngineCache  # noqa: E402
from ucm_position_key import KeyView  # noqa: E402
from ucm_sglang.connector import UCMHiCache  # noqa: E402
from ucm_sglang.layout_from_engine import HostPools  # noqa: E402
from ucm_sglang.start import Start  # noqa: E402

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
PAGES = 4
WAIT_S = 120

SETTINGS = [
    CacheConfig(page_size=16, components=(FULL,)),
    CacheConfig(page_size=16, components=(FULL,), is_eagle=True),
    CacheConfig(page_size=16, components=(FULL, SWA), sliding_window_size=16, kv_size=512),
    CacheConfig(
        page_size=64,
        components=(FULL, MAMBA),
        enable_mamba_extra_buffer=True,
        mamba_cache_size=60,
        kv_size=1024,
        max_context_len=1024,
    ),
]


class StaticWeights:
    """Stands for `ucm_sglang.weight_updates`: nothing ever changes."""

    def installed(self):
        return True

    def subscribe(self, callback):
        return lambda: None

    def overtaken(self):
        return False

    stale = overtaken


class StartDouble(Start):
    """Stands for a start whose weights need not be read."""

    __slots__ = ()

    def open_cache(self):
        return EngineCache(self.model, self.config, digest=lambda _: WEIGHTS)


class TreeBackend(UCMHiCache):
    """As SGLang loads it by name, of a model that has no checkpoint."""

    started = None

    def __init__(self, storage_config, kwargs):
        super().__init__(storage_config, kwargs, start=lambda _: type(self).started)


class Tree(UnifiedRadixCacheFixtures, unittest.TestCase):
    """One engine's tree with its pools, attached to the root."""

    __test__ = False  # SGLang's helpers assert as a test case does; it is none

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.cache, self.allocator, self.requests = fixtures.build_fixture(cfg)
        self._attach()

    def runTest(self):
        """Nothing: the class brings SGLang's helpers, not a test."""

    def _attach(self):
        extra = {"backend_name": "ucm", "module_path": __name__, "class_name": "TreeBackend"}
        arguments = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct" if self.cfg.has_mamba else "layer_first",
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(
                extra | {"interface_v1": 1, "prefetch_threshold": 1}
            ),
        )
        arguments._mamba_cache_chunk_size = max(64, self.cfg.page_size)
        set_global_server_args_for_scheduler(arguments)
        self.cache.init_hicache(arguments, self.cache.cache_init_params)
        atexit.unregister(self.cache.shutdown)
        self.cache.write_through_threshold, self.cache.load_back_threshold = 1 << 30, 0
        controller = self.cache.cache_controller
        controller.prefetch_capacity_limit = max(
            controller.prefetch_capacity_limit, controller.mem_pool_host.size
        )

    @property
    def tokens(self):
        return self._make_seq(1, PAGES) + [7] * self.cfg.is_eagle

    @property
    def kv(self):
        return self.allocator.get_kvcache()

    def buffers(self):
        """Per component the buffers whose first axis, or second of a state, is a slot."""
        full = getattr(self.kv, "full_kv_pool", self.kv)
        found = {FULL: [*full.k_buffer, *full.v_buffer]}
        if self.cfg.has_swa:
            found[SWA] = [*self.kv.swa_kv_pool.k_buffer, *self.kv.swa_kv_pool.v_buffer]
        if self.cfg.has_mamba:
            states = self.requests.mamba_pool.mamba_cache
            found[MAMBA] = [states.temporal.transpose(0, 1), *(each.transpose(0, 1) for each in states.conv)]
        return found

    def held(self):
        """Per component what the tree has on the device for the whole prompt; a window only its last page."""
        match = fixtures.match_prefix(self.cache, self.tokens)
        assert match.device_prefix_len == PAGES * self.cfg.page_size
        path = self.cache.path_device_indices(match.last_device_node)
        slots = {FULL: path}
        if self.cfg.has_swa:
            slots[SWA] = self.allocator.full_to_swa_index_mapping[path[-self.cfg.page_size :]]
        if self.cfg.has_mamba:
            slots[MAMBA] = fixtures.node_device_value(self.cache, match.last_device_node, MAMBA)
        return {
            component: [buffer[slots[component]].clone() for buffer in buffers]
            for component, buffers in self.buffers().items()
        }

    def compute(self, seed):
        """As a forward would: every slot of every pool has bytes of its own."""
        noise = torch.Generator().manual_seed(seed)
        for buffers in self.buffers().values():
            for buffer in buffers:
                buffer.copy_(torch.randn(buffer.shape, generator=noise).to(buffer.dtype))
        self._insert(self.cache, self.allocator, self.requests, self.tokens)

    def store(self):
        """Back everything up, to the host and to the storage."""
        self._backup_tree(self.cache)
        match = fixtures.match_prefix(self.cache, self.tokens)
        for node in self._path_chain(self.cache, match.last_device_node):
            self.cache.write_backup_storage(node)
        until(lambda: self.cache.drain_storage_control_queues() or not self.cache.ongoing_backup)

    def prefetch(self):
        """How many tokens of the prompt the host has after a prefetch."""
        handle = CacheRequestHandle("r1", 0)
        self.cache.prefetch_from_storage(handle, self.cache.root_node_handle(), array("q", self.tokens))
        until(lambda: self.cache.check_hicache_events() or self.cache.check_prefetch_progress(handle))
        match = fixtures.match_prefix(self.cache, self.tokens)
        return match, match.host_hit_length

    def resume(self):
        """Bring the prompt from the storage to the device."""
        match, tokens = self.prefetch()
        assert tokens == PAGES * self.cfg.page_size
        assert self.cache.load_back(
            match.last_host_node or match.best_match_node, req=self._make_req(self.requests)
        )
        self.cache.ready_to_load_host_cache()
        self.cache.loading_check()

    def close(self):
        self.cache.cache_controller.detach_storage_backend()


def until(done):
    """SGLang's scheduler looks at its queues once a step; nothing wakes it."""
    deadline, step = time.monotonic() + WAIT_S, threading.Event()
    while not done():
        assert time.monotonic() < deadline
        step.wait(0.01)


def table_of(tree):
    """The canonical table of the model that these pools could be of."""
    cfg, page = tree.cfg, tree.cfg.page_size
    parts = tuple(Part(name, (cfg.head_num, cfg.head_dim), "bfloat16") for name in ("k", "v"))
    hybrid = cfg.has_swa or cfg.has_mamba
    full = cfg.full_attention_layer_ids if hybrid else range(cfg.num_layers)
    rows = [SpecRow("full", RowKind.CHAIN, page, tuple(full), parts)]
    other = tuple(cfg.non_full_layer_ids)
    if cfg.has_swa:
        window = cfg.sliding_window_size
        rows.append(SpecRow(f"window-{window}", RowKind.CHAIN, page, other, parts, window=window))
    if cfg.has_mamba:
        states = tree.requests.mamba_pool.mamba_cache
        shapes = {"conv": states.conv[0], "ssm": states.temporal}
        state = tuple(
            Part(name, tuple(each.shape[2:]), str(each.dtype).removeprefix("torch."))
            for name, each in shapes.items()
        )
        rows.append(SpecRow("state", RowKind.SNAPSHOT, page, other, state))
    return SpecTable(tuple(rows), page)


@pytest.fixture(params=SETTINGS, ids=lambda cfg: cfg.label)
def cfg(request):
    return request.param


@pytest.fixture
def engines(cfg, tmp_path):
    """Make engines on one root; a later one has nothing but the root of an earlier one."""
    made = []
    unattached, _, requests = fixtures.build_fixture(cfg)
    del unattached
    pools = type("Pools", (), {"cfg": cfg, "requests": requests})
    table = table_of(pools)
    TreeBackend.started = StartDouble(
        model_of(table),
        config_of(tmp_path / "root", grain_tokens=cfg.page_size, ring_bytes=64 << 20),
        Share(),
        StaticWeights(),
        lambda pools, table, share: HostPools.of(pools, table),
        view=KeyView.BIGRAM if cfg.is_eagle else KeyView.PLAIN,
    )

    def make():
        made.append(Tree(cfg))
        return made[-1]

    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        yield make
        for tree in made:
            if tree.cache.cache_controller.enable_storage:
                tree.close()


def test_an_empty_tree_resumes_with_every_byte(engines):
    first = engines()
    first.compute(seed=1)
    first.store()
    right = first.held()
    first.close()
    second = engines()
    second.resume()
    found = second.held()
    assert found.keys() == right.keys()
    for component, buffers in right.items():
        for mine, theirs in zip(found[component], buffers, strict=True):
            assert torch.equal(mine, theirs), component


def test_without_any_one_row_nothing_is_resumed(engines, tmp_path):
    first = engines()
    first.compute(seed=1)
    first.store()
    first.close()
    rows = [row.name for row in TreeBackend.started.model.table.rows]
    for row in rows:
        lost = [path for path in (tmp_path / "root").rglob("*") if path.is_file() and path.parts[-3] == row]
        assert lost
        for path in lost:
            path.rename(path.with_suffix(".away"))
        tree = engines()
        assert tree.prefetch()[1] == 0
        tree.close()
        for path in lost:
            path.with_suffix(".away").rename(path)
