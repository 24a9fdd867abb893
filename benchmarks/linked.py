"""A linker's pages over device pools, and the store beneath them: the same bytes moved by either."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.frame import Cost, Round, timed
from benchmarks.pools import PAGE_TOKENS, DevicePool
from benchmarks.rig import WAIT_S
from ucm_core import CacheConfig, Model, ModelIdentity, SpecTable
from ucm_core.engine_cache import EngineCache
from ucm_core.flow.copy import EngineBlocks
from ucm_core.flow.ticket import Ticket
from ucm_core.spec.keys import Keys
from ucm_position_key import PoolTable, digests_of
from ucm_sglang.layer_loads import LayerCounter
from ucm_sglang.linked_pages import LinkedPages
from ucm_sglang.page_cache import KV_POOL, Pages

NODE_TOKENS = 4096
"""What a load or an offload moves."""


def opened(
    root: Path, table: SpecTable, *, ring_bytes: int, disk_bytes: int
) -> tuple[LinkedPages, EngineCache]:
    """A linker's pages and their cache, all of whose ring is taken."""
    identity = ModelIdentity(
        config="{}", revision=None, compute_dtype="float32", kv_dtype="float32", weights=None,
        grain_tokens=table.grain_tokens, table=table.digest.hex(),
    )  # fmt: skip
    config = CacheConfig(
        root=root,
        ring_bytes=ring_bytes,
        ring_prefault=True,
        disk_bytes=disk_bytes,
        grain_tokens=table.grain_tokens,
    )
    model = Model(root, table, identity)
    cache = EngineCache(model, config, digest=lambda _: "5a" * 32)
    return LinkedPages(cache, model), cache


class Linked:
    """One node of a tree: pages that lie in a ring, without files, and their places in a device pool."""

    def __init__(self, pool: DevicePool, root: Path) -> None:
        row, table = pool.row, pool.table
        self._count = NODE_TOKENS // PAGE_TOKENS
        self.size_bytes = self._count * row.block_bytes
        """What is moved."""
        self._row, self._memory = row.name, pool.memory(1 + self._count)  # SGLang's first page is padding
        self._indices = np.arange(PAGE_TOKENS, (1 + self._count) * PAGE_TOKENS)
        self.pages, cache = opened(root, table, ring_bytes=4 * self.size_bytes, disk_bytes=0)
        """The linker's."""
        self.pages.register(self._memory)
        assert cache.current is not None
        space = cache.current.space
        self._store = space.stores[row.name]
        self._keys_of = PoolTable(table, self._memory.pools, model=space.identity)
        self._counter, self._layers = LayerCounter(), row.units
        self._nodes = itertools.count()
        self._node = self._other_node()
        self.offload(self._node)

    def load(self) -> None:
        """As a forward: each layer is waited for, then SGLang asks whether all came."""
        index = self._counter.begin(self.pages.begin_loads({"r": [self._pages(self._node)]}))
        self._counter.set_consumer(index)
        for layer in self._layers:
            self._counter.wait_until(layer)
        assert self._counter.finish(index)

    def load_by_core(self) -> None:
        """The same pages, whole, to the same places."""
        _end(self._store.load(self._keys(self._node), self._places()))

    def offload(self, node: list[str]) -> None:
        """Keep what lies in the pool as the pages of this node."""
        offload = self.pages.offload([self._pages(node)])
        offload.wait(time.monotonic() + WAIT_S)
        assert self.pages.is_kept(offload)

    def save_by_core(self, node: list[str]) -> None:
        """The same."""
        _end(self._store.save(self._keys(node), self._places()))

    def saving(self, save: Callable[[list[str]], None]) -> Round:
        """Save a node that nobody has, and drop it: the ring always has room."""

        def round_() -> Cost:
            node = self._other_node()
            cost = timed(partial(save, node))()
            self._store.drop(self._keys(node))
            return cost

        return round_

    def _other_node(self) -> list[str]:
        """Hashes of its pages."""
        number = next(self._nodes)
        return [hashlib.sha256(f"{number}/{page}".encode()).hexdigest() for page in range(self._count)]

    def _pages(self, node: list[str]) -> Pages:
        return Pages(KV_POOL, node, self._indices)

    def _keys(self, node: list[str]) -> Keys:
        return self._keys_of.keys(self._row, digests_of(node))

    def _places(self) -> EngineBlocks:
        return self._memory.blocks(KV_POOL, self._row, indices=self._indices)


def _end(ticket: Ticket) -> None:
    assert ticket.wait(WAIT_S)
    assert ticket.ok
