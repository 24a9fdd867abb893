"""What a verdict costs: 1000 present blocks looked up in the ring: against a dictionary and a limit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.frame import Figure, side_by_side, within
from ucm_core.store.ring import Ring

BLOCKS = 1000
RESIDENT = 50_000
ALLOWED_S = 1e-3


def figures() -> Iterator[Figure]:
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
