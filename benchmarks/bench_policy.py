"""Hit rates of the ring's policies on request traces: nothing is timed, and no machine matters.

A trace is a file of JSON lines with ``hash_ids``, one id per block of a prefix, as the Mooncake project
publishes them, in the folder that UCM_TRACES names. A request claims its blocks, fills what it owns and lets
go; its hits are the leading blocks that were there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.frame import Figure, Measure
from ucm_core.ops.config import RingPolicy
from ucm_core.store.ring import Outcome, Ring, RingOptions

POLICIES: tuple[RingPolicy, ...] = ("clock", "fifo", "lru", "sieve")
SLOTS = (1_000, 4_000, 16_000)
HIT_RATE = Measure("of the blocks", lambda _: 0.0, at_least=True)


@dataclass(frozen=True, slots=True)
class Replay:
    """How a trace goes through a ring."""

    policy: RingPolicy
    slots: int
    parents: bool = True
    """Whether claims say which block is before which."""
    marked: bool = False
    """Whether a block that comes is marked as used at once, as a CLOCK does whose bit is set on insert."""

    @property
    def name(self) -> str:
        """For the table."""
        marks = ", marked on insert" if self.marked else ""
        return f"{self.policy}, {self.slots} slots{'' if self.parents else ', no parents'}{marks}"


def figures() -> Iterator[Figure]:
    """Yield every policy at every size, then the default without what it is made of."""
    folder = os.environ.get("UCM_TRACES")
    if folder is None:
        print("policy: no traces; UCM_TRACES names their folder")
        return
    for path in sorted(Path(folder).glob("*.jsonl")):
        requests = [json.loads(line)["hash_ids"] for line in path.open(encoding="utf-8")]
        every = [Replay(policy, slots) for slots in SLOTS for policy in POLICIES]
        every += [Replay("clock", slots, parents=False) for slots in SLOTS]
        every += [Replay("clock", slots, parents=False, marked=True) for slots in SLOTS]
        most = endless(requests)
        for replay in every:
            found = hits(requests, replay)
            yield Figure(
                f"{path.stem[:24]}: {replay.name}",
                found, "a ring without end", most, found / most, None, HIT_RATE,
            )  # fmt: skip


def endless(requests: list[list[int]]) -> float:
    """The part of all blocks that somebody asked for before, as far as all before them were."""
    seen: set[int] = set()
    found = 0
    for ids in requests:
        found += next((n for n, each in enumerate(ids) if each not in seen), len(ids))
        seen.update(ids)
    return found / sum(map(len, requests))


def hits(requests: list[list[int]], replay: Replay) -> float:
    """The part of all blocks that was there, as far as all before them were."""
    found = 0
    options = RingOptions(policy=replay.policy)
    with Ring.open(
        None, slots=replay.slots, payload_bytes=4096, geometry_digest=bytes(32), options=options
    ) as ring:
        for ids in requests:
            keys = keys_of(ids)
            claims = ring.claim(keys, before(keys) if replay.parents else None)
            ready = claims.outcome == Outcome.READY
            found += len(ids) if ready.all() else int(ready.argmin())
            owned = claims.outcome == Outcome.OWNER
            ring.publish(claims.slots[owned])
            ring.release(claims.slots[claims.slots >= 0])
            if replay.marked:
                ring.touch(keys[owned])
        assert ring.statistics().policy == replay.policy
    return found / sum(map(len, requests))


def keys_of(ids: list[int]) -> np.ndarray:
    """Keys that are spread as digests are."""
    names = (hashlib.sha256(each.to_bytes(8, "little")).digest() for each in ids)
    return np.frombuffer(b"".join(names), dtype=np.uint8).reshape(-1, 32)


def before(keys: np.ndarray) -> np.ndarray:
    """The key before each; zeros before the first."""
    return np.concatenate((np.zeros((1, 32), dtype=np.uint8), keys[:-1]))
