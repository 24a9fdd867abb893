"""Tables, pools and the contract's formula, for the tests of this folder."""

import hashlib
import struct

import numpy as np

from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.keys import row_seed
from ucm_core.spec.rows import Part, RowKind, SpecRow
from ucm_core.spec.table import SpecTable
from ucm_position_key import Component, KeyView, NodeIndex, Pool, PoolTable, Span

PART = (Part("k", (2,), "float32"),)
EMPTY = Span(0, 0)


def table_of(grain, *, blocks=1, grid=1, window=None):
    """Full, window and state rows and a follower; blocks and grid in grains."""
    size = grain * blocks
    rows = [
        SpecRow("full", RowKind.CHAIN, size, (0, 3), PART),
        SpecRow("window", RowKind.CHAIN, size, (1,), PART, window=window or 2 * grain),
        SpecRow("state", RowKind.SNAPSHOT, grain * grid, (2,), PART),
        SpecRow("keys", RowKind.FOLLOWER, size, (0, 3), PART, follows="full"),
        SpecRow("cross", RowKind.NONE, 0, (4,), ()),
    ]
    return SpecTable(tuple(rows), grain)


POOLS = (
    Pool("kv", Component.FULL, ("full",)),
    Pool("swa", Component.SWA, ("window",)),
    Pool("mamba", Component.MAMBA, ("state",)),
    Pool("indexer", Component.SIDE_CAR, ("keys",), source="kv"),
)


def model_of(table, **fields):
    """The identity of a model with this table."""
    known = {"config": "{}", "weights": "5a" * 32, "revision": None}
    known |= {"compute_dtype": "float32", "kv_dtype": "float32", "grain_tokens": table.grain_tokens}
    return ModelIdentity(table=table.digest.hex(), **(known | fields))


def pools_of(grain, *, view=KeyView.PLAIN, **sizes):
    table = table_of(grain, **sizes)
    return PoolTable(table, POOLS, model=model_of(table), view=view)


def index_of(grain, **sizes):
    return NodeIndex(pools_of(grain, **sizes))


def formula(ids, page_ids, seed=b""):
    """The chain of the contract, page by page, with nothing of the product: ``uint8[pages, 32]``."""
    digests = []
    for at in range(0, len(ids) - page_ids + 1, page_ids):
        page = ids[at : at + page_ids]
        wide = max(page) > 0xFFFFFFFF
        body = b"\xff" + struct.pack(f"<{page_ids}Q", *page) if wide else struct.pack(f"<{page_ids}I", *page)
        seed = hashlib.sha256(seed + body).digest()
        digests.append(seed)
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def key_of(pools, row, digest):
    """An object's key by its definition, with Python's own integers."""
    seed = row_seed(pools.identity.digest, {"keys": "full"}.get(row, row))
    return (int.from_bytes(seed) ^ int.from_bytes(bytes(digest))).to_bytes(32)


def as_keys(objects):
    return np.frombuffer(b"".join(item.key for item in objects), np.uint8).reshape(-1, 32)
