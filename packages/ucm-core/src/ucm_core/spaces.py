"""Spaces: all that a cache has open of one namespace, and how the next generation's follows.

Everything of a space hangs together: stores, keys, books and leases are of one identity. So a space is never
changed, only left for the next one, and whoever began something in it ends it there.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ucm_core.coordinator.coordinator import Coordinator
from ucm_core.coordinator.coverage import coverage
from ucm_core.coordinator.leases import LeasedRow, Leases
from ucm_core.errors import ClosedError, StoreError, UcmError
from ucm_core.events import Followed
from ucm_core.ops import metrics
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.keys import Keys
from ucm_core.spec.table import SpecTable
from ucm_core.store.absent import ObjectStore
from ucm_core.store.arrays import Mask
from ucm_core.store.close_report import CloseReport
from ucm_core.store.gc import Collector
from ucm_core.store.journal import Place
from ucm_core.store.ledger import Residents
from ucm_core.store.names import slug
from ucm_core.store.pool import IoPool
from ucm_core.store.reach import Cover, mask
from ucm_core.store.ring import RingOptions
from ucm_core.store.root import CacheRoot
from ucm_core.store.stack import (
    CLOSE_WAIT_S,
    Plans,
    StoreParts,
    absent_stores,
    close_stores,
    key_seeds,
    open_stores,
)
from ucm_core.store.tiers import StoreLimits

__all__ = ["Space", "Spaces"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Space:
    """Everything that belongs to one namespace."""

    identity: ModelIdentity
    """With its generation."""
    stores: Mapping[str, ObjectStore]
    """Per cached row; they keep nothing while the identity is unknown or the root cannot be used."""
    seeds: Mapping[str, bytes]
    """Per cached row the 32-byte seed of its keys."""
    coordinator: Coordinator
    leases: Leases

    def revoke(self) -> None:
        """Let no load of it end well any more, also of those under way."""
        for store in self.stores.values():
            store.revoke()

    def close(self, timeout_s: float = CLOSE_WAIT_S) -> tuple[CloseReport, ...]:
        """Let saves under way reach the medium, in bounded time; what became of them, row by row."""
        self.leases.close()
        return close_stores(self.stores, timeout_s)


class Spaces:
    """The spaces of one cache, one after the other, over one root and one pool of threads. Thread-safe."""

    def __init__(
        self, config: CacheConfig, table: SpecTable, *, identity: ModelIdentity, plans: Plans
    ) -> None:
        """Open the space of ``identity``; StoreError for a root that is a file."""
        self._table = table
        self._plans = plans
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = self._stuck = False
        self._reports: tuple[CloseReport, ...] = ()
        self.root = CacheRoot(config.root, ttl_s=config.ttl_s, uring=config.io_engine == "uring").open()
        """Where all of them lie."""
        self._pool = IoPool(config.thread_count(), write_threads=config.write_threads)
        try:
            self._parts = self._store_parts(config)
            self.current = self._open(self._current_generation(identity))
            """The space now; the last one after `close`."""
            if self._parts.room is not None:
                self._parts.room.take_stock()
        except BaseException:
            self._let_go()
            raise

    def opened(self) -> Space:
        """The space now; ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the cache is closed; open it again")
        return self.current

    def followed(self) -> Followed:
        """Where the objects of the space now lie."""
        space = self.current
        plans = self._plans.items() if space.identity.known and self.root.available else ()
        name = space.identity.namespace
        # a family is removed as one, so its first segment tells of all
        places = {row: Place(name, slug(row), held[0].segment) for row, held in plans if held}
        return Followed(places, space.stores)

    def residents(self) -> Residents:
        """What the rings of the space now hold."""
        return Residents.together(store.residents() for store in self.current.stores.values())

    def covers(self) -> list[Cover]:
        """Which block a state of the space now needs, of each chain row that attention looks back into."""
        space, table = self.current, self._table
        rows = [row for row in table.chain_rows if coverage(row, row.block_tokens)]
        pairs = [(states, blocks) for states in table.snapshot_rows for blocks in rows]
        seeds, name = space.seeds, space.identity.namespace
        return [
            Cover((name, slug(one.name)), (name, slug(other.name)), mask(seeds[one.name], seeds[other.name]))
            for one, other in pairs
        ]

    def move_on(self, private_token: str) -> None:
        """Go to the next generation; StoreError, with that done, where others could not be told.

        Where no new stores can be opened the next space keeps nothing.
        """
        with self._lock:
            old = self.opened()
            old.revoke()
            raised, refusal = self._raised(old.identity, private_token)
            try:
                self.current = self._open(raised)
            except UcmError as error:
                _log.warning("a new generation began, and nothing is cached any more: %s", error)
                metrics.ERRORS.labels(where="generation").inc()
                self.current = self._space_of(raised, absent_stores(self._plans))
        self.root.journal.lose()
        self._leave(old, CLOSE_WAIT_S)
        if refusal is not None:
            raise StoreError(
                f"tier 'file' was not reset: {refusal}; this cache finds nothing of before, others still may:"
                f" make {self.root.path} writable, open the cache again and repeat"
            )

    def close(self, timeout_s: float = CLOSE_WAIT_S) -> tuple[CloseReport, ...]:
        """Let saves under way reach the medium (in bounded time), then let go of everything. Idempotent.

        In a forked child it does nothing: everything is the parent's, and its threads may hold locks there.
        """
        if os.getpid() != self._pid:
            return ()
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._closed:
                return self._reports
            self._closed = True
        self._reports = self._leave(self.current, timeout_s)
        self._let_go(max(0.0, deadline - time.monotonic()))
        return self._reports

    # -- private

    def _leave(self, space: Space, timeout_s: float) -> tuple[CloseReport, ...]:
        reports = space.close(timeout_s)
        self._stuck |= any(report.unfinished for report in reports)
        return reports

    def _let_go(self, timeout_s: float = CLOSE_WAIT_S) -> None:
        if self._pool.close(timeout_s) and not self._stuck:
            self.root.close()  # else its lock stays: who still writes needs its name and its counter

    def _store_parts(self, config: CacheConfig) -> StoreParts:
        limits = StoreLimits(config.save_wait_s, config.load_wait_s, sync=config.sync, ttl_s=config.ttl_s)
        ring = RingOptions(
            config.ring_policy,
            config.ttl_s,
            prefault=config.ring_prefault,
            huge_pages=config.ring_huge_pages,
        )
        durable = config.disk_bytes != 0
        parts = StoreParts(self.root, self._pool, limits, room=None, durable=durable, ring=ring)
        if not self.root.available or not parts.durable:
            return parts
        usage = self.root.usage
        try:
            usage.capacity_bytes = config.disk_limit_bytes(usage.used_bytes)
        except OSError as error:
            self.root.lose(error)
            usage.capacity_bytes = config.disk_limit_bytes()
        room = Collector(self.root, self._pool, view=self, ttl_s=config.ttl_s)
        return replace(parts, room=room)

    def _current_generation(self, identity: ModelIdentity) -> ModelIdentity:
        """The identity in the root's generation, unless it names one (another half of this engine does)."""
        named = identity.generation or identity.private_token
        if named or not identity.known or not self.root.available:
            return identity
        current = identity.with_generation(self.root.generation(identity.base_digest))
        with suppress(StoreError):  # the root is lost then, and nothing will be found
            while self.root.left(current.namespace):  # the counter was deleted, what it counted was not
                current = self._next(current, private_token="")
        return current

    def _raised(self, old: ModelIdentity, private_token: str) -> tuple[ModelIdentity, StoreError | None]:
        """The identity in the next generation; in one that nobody else has, where the root refuses."""
        try:
            raised = self._next(old, private_token)
            if old.known:
                self.root.leave(old.namespace)
            while raised.known and self.root.holds(raised.namespace):  # the counter began anew once
                raised = self._next(raised, private_token)
        except StoreError as error:
            return old.with_generation(old.generation, secrets.token_hex(16)), error
        return raised, None

    def _next(self, identity: ModelIdentity, private_token: str) -> ModelIdentity:
        """The identity in the generation that the root's counter names when it was raised by one."""
        return identity.with_generation(self.root.raise_generation(identity.base_digest), private_token)

    def _open(self, identity: ModelIdentity) -> Space:
        if not identity.known:
            _log.warning("the model's weights are unknown, so nothing is cached")
        if identity.known and self.root.available:
            namespace = self.root.namespace(identity)
            try:
                stores = open_stores(self._plans, identity.digest, namespace=namespace, parts=self._parts)
                return self._space_of(identity, stores)
            except OSError as error:
                self.root.lose(error)
        return self._space_of(identity, absent_stores(self._plans))

    def _space_of(self, identity: ModelIdentity, stores: Mapping[str, ObjectStore]) -> Space:
        seeds = key_seeds(self._table, identity.digest)
        lookups = {row: stores[row].lookup if row in stores else _nothing for row in self._plans}
        # never all slots: saves and loads of others must get on
        leases = Leases({row: LeasedRow(store.pin, 3 * store.slots // 4) for row, store in stores.items()})
        return Space(identity, stores, seeds, Coordinator(self._table, lookups, seeds), leases)


def _nothing(keys: Keys) -> Mask:
    """The answer of a row of which this process has no segment."""
    return np.zeros(len(keys), dtype=np.bool_)
