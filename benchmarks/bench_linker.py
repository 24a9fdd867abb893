"""SGLang's linker: lookups beside SGLang's own file backend, loads and offloads beside the core's own.

Runs with the python of SGLang's environment; without SGLang there are only our lookups. 1000 pages of three
components lie in the ring. Of each page there is everything: keys and values, a window of eight pages, a
state; so every length is legal, and all of it leased.

What is loaded lies in a ring, too, and goes to device pools, layer by layer, each waited for as in a forward;
what is offloaded goes from these pools into the ring. Files are left out, which are other threads' work
(`bench_file_tier`). The core loads and saves the same bytes of the same pools, by one call of its store.
"""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame import WALL, Figure, compare, in_turns, processor_per_gb, timed, within
from benchmarks.linked import Linked, opened
from benchmarks.pools import HEADS, LATENTS, PAGE_TOKENS, DevicePool
from benchmarks.rig import work_folder
from ucm_core import Part, RowKind, SpecRow, SpecTable
from ucm_core.flow.copy import BufferBlocks
from ucm_position_key import Component, Pool
from ucm_sglang.linked_pages import LinkedPages
from ucm_sglang.page_cache import Int64s, Pages

PAGES = 1000
WINDOW_PAGES = 8
SIDES = {"swa": WINDOW_PAGES, "mamba": 1}
MOST_S = 2e-3
ROUNDS = 49
LIMIT = 1.1
"""Of what the core's own loads and saves cost."""

PART = (Part("k", (1, 8), "float32"),)
STATE = (Part("ssm", (64,), "float32"),)
ROWS = (
    SpecRow("full", RowKind.CHAIN, PAGE_TOKENS, (0,), PART),
    SpecRow("window", RowKind.CHAIN, PAGE_TOKENS, (1,), PART, window=(WINDOW_PAGES - 1) * PAGE_TOKENS + 1),
    SpecRow("state", RowKind.SNAPSHOT, PAGE_TOKENS, (2,), STATE),
)
TABLE = SpecTable(ROWS, PAGE_TOKENS)
POOLS = (
    Pool("kv", Component.FULL, ("full",)),
    Pool("swa", Component.SWA, ("window",)),
    Pool("mamba", Component.MAMBA, ("state",)),
)


class Memory:
    """Stands for device pools: one page of zeros for every page."""

    pools = POOLS
    held = ROWS

    def rows(self, pool_name: str) -> tuple[str, ...]:
        """The one row of a pool."""
        return next(pool.rows for pool in POOLS if pool.name == pool_name)

    def blocks(self, pool_name: str, row_name: str, *, indices: Int64s) -> Any:
        """Zeros, as many pages as there are indices for."""
        del pool_name
        row = TABLE.row(row_name)
        per_page = 1 if row.kind is RowKind.SNAPSHOT else PAGE_TOKENS
        return BufferBlocks(np.zeros((len(indices) // per_page, 1, row.unit_bytes), np.uint8))


def figures() -> Iterator[Figure]:
    """Ours against a time; against SGLang's file backend where there is one."""
    hashes = [hashlib.sha256(str(page).encode()).hexdigest() for page in range(PAGES)]
    what = f"linker lookup, {PAGES} pages of 3 components in the ring"
    with work_folder() as folder:
        pages = kept(folder / "root", hashes)
        ours = partial(pages.lookup, "r", hashes, side_pools=SIDES)
        assert ours() == tuple(range(1, PAGES + 1))
        yield within(what, ours, limit_s=MOST_S, rounds=ROUNDS)
        if importlib.util.find_spec("sglang") is None:
            print("linker: SGLang's file backend is not measured, it is not installed here", flush=True)
        else:
            theirs = file_backend(folder / "files", hashes)
            costs = in_turns({"ours": timed(ours), "theirs": timed(theirs)})
            yield compare(
                what, costs["ours"], costs["theirs"], peer="SGLang's file backend", limit=None, measure=WALL
            )
        pages.close()
        for pool in (HEADS, LATENTS):
            yield from copies(pool, folder / pool.kind)


def copies(pool: DevicePool, root: Path) -> Iterator[Figure]:
    """A load and an offload of one pool's pages, beside the core's."""
    linked = Linked(pool, root)
    rounds = {"load": linked.load, "core's load": linked.load_by_core}
    costs = in_turns({name: timed(call) for name, call in rounds.items()})
    costs |= in_turns(
        {"offload": linked.saving(linked.offload), "core's save": linked.saving(linked.save_by_core)}
    )
    measure = processor_per_gb(linked.size_bytes)
    for ours, theirs in (("load", "core's load"), ("offload", "core's save")):
        what = f"linker {ours}, {pool.name}"
        yield compare(what, costs[ours], costs[theirs], peer=f"the {theirs}", limit=LIMIT, measure=measure)
    linked.pages.close()


def kept(root: Path, hashes: list[str]) -> LinkedPages:
    """A linker's pages, with every page of every component in its ring."""
    pages, _ = opened(root, TABLE, ring_bytes=96 << 20, disk_bytes=1 << 30)
    pages.register(Memory())
    for begin in range(0, PAGES, 100):
        part = hashes[begin : begin + 100]
        tokens = np.zeros(len(part) * PAGE_TOKENS, np.int64)
        states = np.zeros(len(part), np.int64)
        offload = pages.offload(
            [Pages("kv", part, tokens), Pages("swa", part, tokens), Pages("mamba", part, states)]
        )
        offload.wait(time.monotonic() + 60)
        assert pages.is_kept(offload)
    return pages


def file_backend(folder: Path, hashes: list[str]) -> Callable[[], object]:
    """The same lookup of SGLang's `HiCacheFile`, whose files are there."""
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheFile,
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )

    folder.mkdir()
    backend = HiCacheFile(
        HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=False, is_page_first_layout=False, model_name="m",
        ),
        file_path=str(folder),
    )  # fmt: skip
    sides = [
        PoolTransfer(name, keys=["__placeholder__"] * count, hit_policy=PoolHitPolicy.TRAILING_PAGES)
        for name, count in ((PoolName.SWA, WINDOW_PAGES), (PoolName.MAMBA, 1))
    ]
    for name in (None, PoolName.SWA, PoolName.MAMBA):
        for key in hashes:
            component = (
                backend._get_component_key(key) if name is None else backend._get_component_key(key, name)
            )
            (folder / f"{component}.bin").touch()
    answer = backend.batch_exists_v2(hashes, sides)
    assert answer.kv_hit_pages == PAGES
    return lambda: backend.batch_exists_v2(hashes, sides)
