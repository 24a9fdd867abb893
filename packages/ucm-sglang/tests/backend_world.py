"""A table, doubles of host pools, and a backend over a real cache, for the tests of this folder."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from ucm_core import CacheConfig, EngineLayout, Model, ModelIdentity, PartLayout
from ucm_core.engine_cache import EngineCache
from ucm_core.errors import IdentityError
from ucm_core.flow.copy import EngineBlocks
from ucm_core.spec.rows import Part, RowKind, SpecRow
from ucm_core.spec.table import SpecTable
from ucm_position_key import Component, KeyView, Pool
from ucm_sglang.page_backend import PageBackend
from ucm_sglang.page_cache import Pages

GRAIN = 16
PAGES = 64
WEIGHTS = "5a" * 32

FULL = SpecRow(
    "full", RowKind.CHAIN, GRAIN, (0, 2), (Part("k", (2, 8), "float32"), Part("v", (2, 8), "float32"))
)
WINDOW = SpecRow("window-40", RowKind.CHAIN, GRAIN, (1, 3), (Part("k", (2, 8), "float32"),), window=40)
STATE = SpecRow(
    "state", RowKind.SNAPSHOT, GRAIN, (4,), (Part("conv", (3, 5), "float32"), Part("ssm", (7,), "float32"))
)
KEYS = SpecRow("keys", RowKind.FOLLOWER, GRAIN, (0, 2), (Part("k", (4,), "float32"),), follows="full")

DENSE = SpecTable((FULL,), GRAIN)
HYBRID = SpecTable((FULL, WINDOW, STATE, KEYS), GRAIN)
MIXED = SpecTable((FULL, WINDOW), GRAIN)

KV = Pool("kv", Component.FULL, ("full",))
SWA = Pool("swa", Component.SWA, ("window-40",))
MAMBA = Pool("mamba", Component.MAMBA, ("state",))
INDEXER = Pool("indexer", Component.SIDE_CAR, ("keys",), source="kv")
POOLS = {"full": KV, "window-40": SWA, "state": MAMBA, "keys": INDEXER}


class MemoryDouble:
    """Stands for SGLang's pools: per row an array of bytes ``[pages, units, unit bytes]``."""

    def __init__(self, table, pools=None, pages=PAGES):
        self.table = table
        self.pools = pools or tuple(POOLS[row.name] for row in table.rows)
        self.held = table.rows
        self.bytes = {
            row.name: np.zeros((pages, len(row.units), row.unit_bytes), np.uint8) for row in table.rows
        }

    def rows(self, pool_name):
        return next(pool.rows for pool in self.pools if pool.name == pool_name)

    def blocks(self, pool_name, row_name, *, indices):
        size = 1 if self.table.row(row_name).kind is RowKind.SNAPSHOT else GRAIN
        pages = indices.reshape(-1, size)[:, 0] // size
        memory = self.bytes[row_name]
        _, units, unit_bytes = memory.shape
        stride = -(-unit_bytes // 4096) * 4096
        parts = tuple(
            PartLayout(
                memory.ctypes.data + unit * unit_bytes,
                units * unit_bytes,
                unit_bytes,
                unit_bytes,
                1,
                1,
                unit_bytes,
                1,
                unit * stride,
            )
            for unit in range(units)
        )
        pieces = np.zeros((len(pages), 5), np.int64)
        pieces[:, 0], pieces[:, 2], pieces[:, 4] = np.arange(len(pages)), pages, 1
        return EngineBlocks([EngineLayout(1, parts)], pieces)

    def fill(self, pool, hashes, pages):
        """Write what only these hashes have to the pages."""
        for row in pool.rows:
            for page, text in zip(pages, hashes, strict=True):
                self.bytes[row][page] = content(row, text, self.bytes[row][page].shape)

    def holds(self, pool, hashes, pages):
        """Which of the pages are what these hashes name, with every row of the pool."""
        return [
            all(
                np.array_equal(self.bytes[row][page], content(row, text, self.bytes[row][page].shape))
                for row in pool.rows
            )
            for page, text in zip(pages, hashes, strict=True)
        ]


def content(row, text, shape):
    """The bytes of an object, made of its name."""
    return np.frombuffer(
        hashlib.shake_256(f"{row}{text}".encode()).digest(int(np.prod(shape))), np.uint8
    ).reshape(shape)


def hashes_of(count, seed=0):
    """Page hashes of some prompt."""
    return [hashlib.sha256(f"{seed}/{page}".encode()).hexdigest() for page in range(count)]


def indices_of(pool, pages):
    """Indices of pages, or of a pool of states of slots."""
    numbers = np.asarray(pages, np.int64)
    return (
        numbers
        if pool.component is Component.MAMBA
        else (numbers[:, None] * GRAIN + np.arange(GRAIN)).ravel()
    )


def model_of(table, **changes):
    fields = {"config": "{}", "revision": None, "compute_dtype": "float32", "kv_dtype": "float32"}
    fields |= {"weights": None, "grain_tokens": table.grain_tokens, "table": table.digest.hex()}
    return Model(Path("/nowhere"), table, ModelIdentity(**(fields | changes)))


def config_of(root, **settings):
    return CacheConfig(
        **{"root": root, "ring_bytes": 4 << 20, "disk_bytes": 1 << 30, "grain_tokens": GRAIN} | settings
    )


def _digest(weights):
    if weights is None:
        raise IdentityError("no weights to digest")
    return weights


class World:
    """One attached backend: its cache, its host pools."""

    def __init__(self, root, table=DENSE, *, weights=WEIGHTS, view=KeyView.PLAIN, pools=None, **settings):
        model = model_of(table)
        seen = replace(model, identity=view.identity_of(model.identity))
        self.cache = EngineCache(seen, config_of(root, **settings), digest=lambda _: _digest(weights))
        self.memory = MemoryDouble(table, pools)
        self.backend = PageBackend(self.cache, model, view=view)
        self.backend.register(self.memory)

    @property
    def coordinator(self):
        return self.cache.current.coordinator

    def save(self, pool, hashes, pages, **how):
        self.memory.fill(pool, hashes, pages)
        return self.backend.save(Pages(pool.name, hashes, indices_of(pool, pages)), **how).tolist()

    def load(self, pool, hashes, pages):
        return self.backend.load(Pages(pool.name, hashes, indices_of(pool, pages))).tolist()

    def leading(self, hashes):
        return self.backend.restorable(hashes, {}).pages

    def files(self, row):
        """Files of a row's objects, of all generations."""
        root = Path(self.cache.config.root)
        return sorted(path for path in root.rglob("*") if path.is_file() and f"/{row}/" in str(path))


class StoreDouble:
    """Stands before a row's real store: says what it is asked, and does something first."""

    def __init__(self, store, first=lambda: None):
        self._store, self._first = store, first
        self.parents = []

    def __getattr__(self, name):
        return getattr(self._store, name)

    def load(self, keys, target, *, parents=None):
        self._first()
        return self._store.load(keys, target, parents=parents)

    def save(self, keys, source, *, parents=None, **how):
        self._first()
        self.parents.append(parents)
        return self._store.save(keys, source, parents=parents, **how)

    @classmethod
    def before(cls, world, row, first=lambda: None):
        """One before the store that ``world`` has now."""
        stores = world.cache.current.space.stores
        stores[row] = cls(stores[row], first)
        return stores[row]
