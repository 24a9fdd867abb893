"""What a verdict over 1000 present blocks costs, and the lookup in the ring that it rests on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.frame import Figure, side_by_side, within
from ucm_core import Cache, CacheConfig, ModelIdentity, canonical_table
from ucm_core.store.ring import Ring

BLOCKS = 1000
RESIDENT = 50_000
ALLOWED_S = 1e-3


ONE_ROW = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def figures() -> Iterator[Figure]:
    """Yield the verdict, then its parts."""
    with tempfile.TemporaryDirectory() as root:
        yield from verdicts(Path(root))
    yield from ring_calls()


def verdicts(root: Path) -> Iterator[Figure]:
    """A request of 1000 blocks, all in the ring: keys, lookups, decision."""
    table = canonical_table(ONE_ROW, kv_dtype="bfloat16")
    identity = ModelIdentity(
        config="{}", weights="5a" * 32, revision=None,
        compute_dtype="bfloat16", kv_dtype="bfloat16", table=table.digest.hex(),
    )  # fmt: skip
    with Cache.open(CacheConfig(root=root, ring_bytes=1 << 26), table, identity=identity) as cache:
        chain = cache.chain(range(BLOCKS * table.grain_tokens))
        payloads = {
            row.name: np.zeros((BLOCKS, len(row.units), row.unit_bytes), np.uint8) for row in table.rows
        }
        cache.save(chain, payloads).wait_durable()
        asked = chain.token_count + 1
        in_ring = [store.statistics().ring for store in cache.stores.values()]
        assert all(ring is not None and ring.ready == BLOCKS for ring in in_ring)
        assert cache.resolve(chain, request_tokens=asked).hit.resume_tokens == chain.token_count
        yield within(
            f"verdict over {BLOCKS} blocks in the ring",
            lambda: cache.coordinator.verdict(chain, request_tokens=asked),
            limit_s=ALLOWED_S,
        )
        yield within(
            f"the same, with {BLOCKS} blocks marked as used",
            lambda: cache.resolve(chain, request_tokens=asked),
            limit_s=ALLOWED_S,
        )


def ring_calls() -> Iterator[Figure]:
    """Yield lookup and pin of 1000 blocks out of a ring that is far larger than the processor's caches."""
    random = np.random.default_rng(0)
    keys = random.integers(0, 256, (RESIDENT, 32), dtype=np.uint8)
    wanted = np.ascontiguousarray(keys[random.permutation(RESIDENT)[:BLOCKS]])
    names = [key.tobytes() for key in wanted]
    dictionary = {key.tobytes(): slot for slot, key in enumerate(keys)}
    with Ring.open(None, slots=RESIDENT, payload_bytes=4096, geometry_digest=bytes(32)) as ring:
        claims = ring.claim(keys)
        ring.publish(claims.slots)
        ring.release(claims.slots)
        assert ring.lookup(wanted).all()
        yield within(f"lookup of {BLOCKS} blocks in the ring", lambda: ring.lookup(wanted), limit_s=ALLOWED_S)
        yield side_by_side(
            f"lookup of {BLOCKS} blocks in the ring",
            lambda: ring.lookup(wanted),
            peer="as many dictionary lookups",
            peer_call=lambda: [name in dictionary for name in names],
            limit=2.0,
        )
        yield within(
            f"pin and release of {BLOCKS} blocks in the ring",
            lambda: ring.release(ring.pin(wanted).slots),
            limit_s=ALLOWED_S,
        )
