"""Linked pages over a real cache and doubles of device pools, and a request that loads them."""

import threading
import time
from collections.abc import Iterator

import pytest
from backend_world import DENSE, WEIGHTS, MemoryDouble, config_of, indices_of, model_of

from ucm_core.engine_cache import EngineCache
from ucm_core.store.files import FileTier
from ucm_sglang.layer_loads import LayerCounter
from ucm_sglang.linked_pages import LinkedPages
from ucm_sglang.page_cache import Pages

WAIT_S = 120
SIDES = {"swa": 3, "mamba": 1}


class LinkedWorld:
    """One linker's pages: its cache, its device pools, its counter."""

    def __init__(self, root, table=DENSE, *, lookup_budget_s=WAIT_S, **settings):
        self.cache = EngineCache(model_of(table), config_of(root, **settings), digest=lambda _: WEIGHTS)
        self.memory = MemoryDouble(table)
        self.pages = LinkedPages(self.cache, model_of(table), lookup_budget_s=lookup_budget_s, ask_s=WAIT_S)
        self.pages.register(self.memory)
        self.counter = LayerCounter()

    @property
    def leases(self):
        return self.cache.current.statistics().leases

    def save(self, *parts):
        """Offload a node, of each part a pool, hashes, and pages that they lie in; whether it was kept.

        Its files are down when this returns: none of its slots in the ring is busy any more.
        """
        for pool, hashes, pages in parts:
            self.memory.fill(pool, hashes, pages)
        offload = self.pages.offload([pages_of(*part) for part in parts])
        offload.wait(time.monotonic() + WAIT_S)
        for _, ticket in offload.rows.values():
            ticket.wait_durable(WAIT_S)
        return self.pages.is_kept(offload)

    def lookup(self, hashes, sides=None, *, name="r"):
        return self.pages.lookup(name, hashes, side_pools=sides or {})

    def start(self, *parts, name="r"):
        """Begin to load to other pages; the batch's number."""
        index = self.counter.begin(self.pages.begin_loads({name: [pages_of(*part) for part in parts]}))
        self.counter.set_consumer(index)
        return index

    def load(self, *parts, name="r"):
        return self.counter.finish(self.start(*parts, name=name))

    def holds(self, pool, hashes, pages):
        return all(self.memory.holds(pool, hashes, pages))

    def close(self):
        self.counter.reset()
        self.pages.close()


def pages_of(pool, hashes, pages):
    return Pages(pool.name, hashes, indices_of(pool, pages))


class HungReads:
    """A double of a medium that answers no read while it hangs."""

    def __init__(self, monkeypatch):
        self.hangs, self.waiting = False, []
        self.reached, self.go = threading.Event(), threading.Event()
        real = FileTier.read

        def read(files, *arguments, **more):
            if self.hangs:
                self.waiting.append(files)
                self.reached.set()
                assert self.go.wait(WAIT_S)
            return real(files, *arguments, **more)

        monkeypatch.setattr(FileTier, "read", read)


@pytest.fixture
def medium(monkeypatch) -> Iterator[HungReads]:
    medium = HungReads(monkeypatch)
    yield medium
    medium.go.set()
