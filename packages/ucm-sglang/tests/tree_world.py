"""SGLang's real radix tree and pools on CPU tensors, as its own unit tests make them, for either seam.

Doubles stand for kernels and pinned memory.
"""

import sys
import threading
import time
import unittest
from types import ModuleType
from unittest import mock

import import_doubles
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
import_doubles.install()
import ucm_sglang_doubles  # noqa: E402 (of the stories; found once the doubles are installed)

ucm_sglang_doubles.install()
case = ModuleType("sglang.test.test_utils")  # the real one imports data sets
case.CustomTestCase = unittest.TestCase
sys.modules.setdefault("sglang.test.test_utils", case)

from backend_world import config_of, model_of  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.test.kits.unified_radix_cache import fixtures  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures  # noqa: E402
from start_doubles import StartDouble, UpdatesDouble  # noqa: E402

from ucm_core import Part, RowKind, Share, SpecRow, SpecTable  # noqa: E402
from ucm_position_key import KeyView  # noqa: E402
from ucm_sglang.layout_from_engine import MappedPools  # noqa: E402

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


class PoolTree(UnifiedRadixCacheFixtures, unittest.TestCase):
    """One engine's tree with its pools."""

    __test__ = False  # SGLang's helpers assert as a test case does; it is none

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        with mock.patch.object(fixtures, "TokenToKVPoolAllocator", self.allocator_of_pages):
            self.cache, self.allocator, self.requests = fixtures.build_fixture(cfg)

    def runTest(self):
        """Nothing: the class brings SGLang's helpers, not a test."""

    def allocator_of_pages(self, size, **more):
        """As engines have it: SGLang's helpers take one that deals out tokens, whatever the page is."""
        return PagedTokenToKVPoolAllocator(size, self.cfg.page_size, **more)

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


def start_of(cfg, root):
    """A start of the model that trees of ``cfg`` could be of."""
    unattached, _, requests = fixtures.build_fixture(cfg)
    del unattached
    return StartDouble(
        model_of(table_of(type("Pools", (), {"cfg": cfg, "requests": requests}))),
        config_of(root, grain_tokens=cfg.page_size, ring_bytes=64 << 20),
        Share(),
        UpdatesDouble(),
        lambda pools, table, share: MappedPools.of(pools, table),
        view=KeyView.BIGRAM if cfg.is_eagle else KeyView.PLAIN,
    )
