"""What a verdict costs: in the ring, on files alone, per row and block, and beside neighbours.

All figures start from ids: the prefix is hashed before (`bench_keys` measures that).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.frame import PROCESSOR, Figure, side_by_side, within
from benchmarks.peers import PEERS
from ucm_core import (
    Attempt,
    Cache,
    CacheConfig,
    Coordinator,
    ModelIdentity,
    Part,
    PrefixChain,
    RowKind,
    SpecRow,
    SpecTable,
)
from ucm_core.store.ring import Ring

BLOCKS = 1000
RESIDENT = 50_000
GRAIN_TOKENS = 64


def table_of(row_count: int) -> SpecTable:
    """``row_count`` full rows of one small layer each."""
    parts = (Part("k", (1, 8), "bfloat16"),)
    rows = (SpecRow(f"row{n}", RowKind.CHAIN, GRAIN_TOKENS, (n,), parts) for n in range(row_count))
    return SpecTable(tuple(rows), GRAIN_TOKENS)


def figures() -> Iterator[Figure]:
    """Yield the verdicts, then their parts."""
    for row_count in (1, 4):
        yield from in_the_ring(row_count)
    yield from on_files()
    yield from per_block()
    yield from ring_calls()


@contextmanager
def saved_cache(row_count: int) -> Iterator[tuple[Cache, PrefixChain]]:
    """A cache that holds `BLOCKS` blocks of every row, in the ring and on files."""
    table = table_of(row_count)
    identity = ModelIdentity(
        config="{}", weights="5a" * 32, revision=None,
        compute_dtype="bfloat16", kv_dtype="bfloat16", table=table.digest.hex(),
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as root,
        Cache.open(CacheConfig(root=Path(root), ring_bytes=1 << 27), table, identity=identity) as cache,
    ):
        chain = cache.chain(range(BLOCKS * GRAIN_TOKENS))
        payloads = {row.name: np.zeros((BLOCKS, 1, row.unit_bytes), np.uint8) for row in table.rows}
        cache.save(chain, payloads).wait_durable()
        asked = chain.token_count + 1
        assert cache.resolve(chain, request_tokens=asked).hit.resume_tokens == chain.token_count
        yield cache, chain


def in_the_ring(row_count: int) -> Iterator[Figure]:
    """A request of `BLOCKS` blocks per row, all in the ring: the decision, and with all marked as used."""
    with saved_cache(row_count) as (cache, chain):
        asked = chain.token_count + 1
        in_ring = [store.statistics().ring for store in cache.stores.values()]
        assert all(ring is not None and ring.ready == BLOCKS for ring in in_ring)
        what = f"verdict, {row_count} x {BLOCKS} blocks in the ring"
        yield within(
            what,
            lambda: cache.coordinator.verdict(chain, request_tokens=asked),
            limit_s=0.5e-3,
            rounds=99,
            measure=PROCESSOR,
        )
        yield within(
            "the same, with all marked as used",
            lambda: cache.resolve(chain, request_tokens=asked),
            limit_s=1e-3,
            rounds=99,
            measure=PROCESSOR,
        )
        yield leased(cache, chain)
        yield from beside_neighbours(what, cache, chain)


def leased(cache: Cache, chain: PrefixChain) -> Figure:
    """All that one verdict costs an adapter: decided, marked as used, kept in the ring, let go again."""

    def ask() -> None:
        verdict = cache.resolve(chain, request_tokens=chain.token_count + 1)
        lease = cache.lease(verdict, Attempt("request")).lease
        assert lease is not None
        lease.release()

    return within("the same, leased and released too", ask, limit_s=2e-3, rounds=99, measure=PROCESSOR)


def beside_neighbours(what: str, cache: Cache, chain: PrefixChain) -> Iterator[Figure]:
    """Neighbours that are installed, asked for as many ids."""
    row_count = len(cache.table.rows)
    for name, make in PEERS.items():
        try:
            ask = make(chain.digests, row_count)
        except ImportError as error:
            print(f"{name}: not compared, it is not installed here ({error})", flush=True)
            continue
        assert ask() == row_count * BLOCKS
        yield side_by_side(
            what,
            lambda: cache.coordinator.verdict(chain, request_tokens=chain.token_count + 1),
            peer=f"{name} asked for the same ids",
            peer_call=ask,
            limit=1.0,
            rounds=29,
        )


def on_files() -> Iterator[Figure]:
    """Only files hold the blocks: the verdict beside the bare presence checks."""
    with saved_cache(4) as (cache, chain):
        asked = chain.token_count + 1
        keys = cache.coordinator.verdict(chain, request_tokens=asked).keys
        for row, store in cache.stores.items():
            store._tiers.ring.drop(keys[row])  # type: ignore[attr-defined]
        tiers = {row: store._tiers for row, store in cache.stores.items()}  # type: ignore[attr-defined]
        assert not any(tiers[row].ring.lookup(keys[row]).any() for row in keys)
        yield side_by_side(
            f"verdict, 4 x {BLOCKS} blocks on files alone",
            lambda: cache.coordinator.verdict(chain, request_tokens=asked),
            peer="the bare presence checks",
            peer_call=lambda: [tiers[row].files.exist(keys[row]) for row in keys],
            limit=1.3,
            rounds=29,
        )


def per_block() -> Iterator[Figure]:
    """The cost per block stays flat while requests grow from 100 to 100,000 blocks."""
    table = table_of(1)
    with Ring.open(None, slots=120_000, payload_bytes=4096, geometry_digest=bytes(32)) as ring:
        chain = PrefixChain(grain_tokens=GRAIN_TOKENS)
        chain.extend(np.arange(100_000 * GRAIN_TOKENS, dtype=np.uint32))
        coordinator = Coordinator(table, {"row0": ring.lookup}, {"row0": bytes(32)})
        claims = ring.claim(chain.keys(bytes(32)))
        ring.publish(claims.slots)
        ring.release(claims.slots)

        def ask(blocks: int) -> None:
            for _ in range(100_000 // blocks):
                verdict = coordinator.verdict(chain, request_tokens=blocks * GRAIN_TOKENS + 1)
                assert verdict.hit.resume_tokens == blocks * GRAIN_TOKENS

        for blocks in (1_000, 10_000, 100_000):
            yield side_by_side(
                f"verdicts of {blocks} blocks, as many in all",
                lambda blocks=blocks: ask(blocks),  # type: ignore[misc]
                peer="verdicts of 100 blocks",
                peer_call=lambda: ask(100),
                limit=1.2,
                rounds=3,
            )


def ring_calls() -> Iterator[Figure]:
    """Yield lookup and pin of `BLOCKS` blocks out of a ring that is far larger than processor caches."""
    random = np.random.default_rng(0)
    keys = random.integers(0, 256, (RESIDENT, 32), dtype=np.uint8)
    wanted = np.ascontiguousarray(keys[random.permutation(RESIDENT)[:BLOCKS]])
    names = [key.tobytes() for key in wanted]
    dictionary = {key.tobytes(): slot for slot, key in enumerate(keys)}
    with Ring.open(None, slots=RESIDENT * 9 // 8, payload_bytes=4096, geometry_digest=bytes(32)) as ring:
        claims = ring.claim(keys)
        ring.publish(claims.slots)
        ring.release(claims.slots)
        assert ring.lookup(wanted).all()
        yield side_by_side(
            f"lookup of {BLOCKS} blocks in the ring",
            lambda: ring.lookup(wanted),
            peer="as many dictionary lookups",
            peer_call=lambda: [name in dictionary for name in names],
            limit=2.0,
        )
        yield side_by_side(
            f"pin and release of {BLOCKS} blocks in the ring",
            lambda: ring.release(ring.pin(wanted).slots),
            peer="as many dictionary lookups",
            peer_call=lambda: [name in dictionary for name in names],
            limit=4.0,
        )
