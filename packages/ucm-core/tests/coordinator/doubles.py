"""A double of the stores: a set of object names per row, batched lookups, and a record of what was asked."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
from prometheus_client import REGISTRY

from ucm_core.coordinator.coordinator import Coordinator, CoordinatorLimits
from ucm_core.coordinator.coverage import cached_rows
from ucm_core.coordinator.lookups import names_of
from ucm_core.coordinator.presence import Presence
from ucm_core.spec.keys import Keys, PrefixChain, RequestIdentity, object_keys, row_seed
from ucm_core.spec.table import RowKind, SpecTable

NAMESPACE = bytes(range(32))


class StoreDouble:
    """Stands for one row's BlockStore or SnapshotStore: only existence."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.asked: list[int] = []
        self.broken: Exception | None = None

    def lookup(self, keys: Keys) -> np.ndarray:
        self.asked.append(len(keys))
        if self.broken:
            raise self.broken
        return np.array([name in self.names for name in names_of(keys)], dtype=np.uint8)

    def put(self, keys: Keys) -> None:
        self.names.update(names_of(keys))

    def drop(self, keys: Keys) -> None:
        self.names.difference_update(names_of(keys))


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Node:
    """A coordinator over store doubles."""

    def __init__(self, spec: SpecTable, limits: CoordinatorLimits | None = None) -> None:
        self.spec = spec
        self.clock = Clock()
        self.seeds = {row.name: row_seed(NAMESPACE, row.name) for row in cached_rows(spec)}
        self.stores = {row.name: StoreDouble() for row in cached_rows(spec)}
        lookups = {name: store.lookup for name, store in self.stores.items()}
        self.coordinator = Coordinator(spec, lookups, self.seeds, limits=limits, clock=self.clock)

    def keys(self, chain: PrefixChain, row: str, ends: Iterable[int]) -> Keys:
        grains = np.array(list(ends), dtype=np.int64) // chain.grain_tokens - 1
        return object_keys(self.seeds[row], chain.digests[grains])

    def store(self, chain: PrefixChain, presence: dict[str, Presence]) -> None:
        """Put what ``presence`` says of the prefix of ``chain`` into the stores."""
        for name, held in presence.items():
            row = self.spec.row(name)
            there = np.flatnonzero(held.blocks) if held.blocks is not None else []
            ends = (
                [(int(i) + 1) * row.block_tokens for i in there] if row.kind is not RowKind.SNAPSHOT else []
            )
            ends += [position for position in held.positions if position % chain.grain_tokens == 0]
            known = [end for end in ends if end <= chain.token_count]
            self.stores[name].put(self.keys(chain, name, known))


def chain_of(spec: SpecTable, tokens: int, *, seed: int = 0, salt: str | None = None) -> PrefixChain:
    made = PrefixChain(RequestIdentity(cache_salt=salt), grain_tokens=spec.grain_tokens)
    source = random.Random(seed)
    made.extend([source.randrange(50_000) for _ in range(tokens)])
    return made


def errors_counted(where: str) -> float:
    """What ``ucm_errors_total`` says of one border now."""
    return REGISTRY.get_sample_value("ucm_errors_total", {"where": where}) or 0.0
