"""Real stores for tests: a ring over files in a temporary root, and what is left of them without either."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

from ucm_core.store.absent_tiers import NoFiles, NoRing
from ucm_core.store.block import BlockStore
from ucm_core.store.files import FileTier
from ucm_core.store.gc import Collector
from ucm_core.store.geometry import Geometry
from ucm_core.store.hold import Hold
from ucm_core.store.pool import IoPool
from ucm_core.store.ring import Ring, RingOptions
from ucm_core.store.root import CacheRoot
from ucm_core.store.tiers import StoreLimits, Tiers
from ucm_core.testing.block_store import WAIT_S

ROW_SEED = bytes(range(32))
NAMESPACE = "ab" * 16
PATIENT = StoreLimits(save_wait_s=3600.0)
"""No machine is so slow that a save gives up."""


class Faults:
    """Makes chosen calls of the tiers fail: a double around a real ring or file tier that breaks at will."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        """Every call that was made, as "Ring.claim"."""
        self.broken: dict[str, int] = {}
        """How many of the next calls raise, by name."""

    def wrap(self, tier: Any) -> Any:
        """The tier behind this switchboard."""
        return _Wrapped(tier, self)

    def check(self, name: str) -> None:
        self.seen.add(name)
        if self.broken.get(name, 0):
            self.broken[name] -= 1
            raise OSError(f"{name} broken on purpose")


class Gate(Faults):
    """A double that holds one call of a tier until it is opened."""

    def __init__(self, held: str = "nothing") -> None:
        super().__init__()
        self.held = held
        self.reached, self.opened = threading.Event(), threading.Event()

    def check(self, name: str) -> None:
        super().check(name)
        if name == self.held:
            self.reached.set()
            assert self.opened.wait(WAIT_S)


class _Wrapped:
    def __init__(self, tier: Any, faults: Faults) -> None:
        self._tier, self._faults = tier, faults

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tier, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            self._faults.check(f"{type(self._tier).__name__}.{name}")
            answer = value(*arguments, **named)
            return self._faults.wrap(answer) if isinstance(answer, Hold) else answer

        return call


def open_store(
    directory: Path,
    geometry: Geometry,
    *,
    slots: int = 16,
    threads: int = 2,
    limits: StoreLimits = PATIENT,
    capacity_bytes: int | None = None,
    ring_name: str | None = None,
    faults: Faults | None = None,
    durable: bool = True,
    uring: bool = False,
) -> BlockStore:
    """A store over ``directory``; its root and its threads end with it. No slots: no ring."""
    root = CacheRoot(directory, capacity_bytes=capacity_bytes, uring=uring).open()
    files: Any = NoFiles(geometry)
    if durable:
        row = root.path / NAMESPACE / "row"
        files = FileTier(row, geometry, row_seed=ROW_SEED, segment="hx.u0-1.c0-1", root=root)
    ring: Any = NoRing()
    if slots:
        size, digest, options = geometry.payload_bytes, geometry.digest, RingOptions(shards=geometry.shards)
        ring = Ring.open(ring_name, slots=slots, payload_bytes=size, geometry_digest=digest, options=options)
    pool = IoPool(threads)
    if faults is not None:
        ring, files = faults.wrap(ring), faults.wrap(files)
    room = Collector(root, pool) if root.available else None
    store = BlockStore(Tiers(ring, files, pool, "row", limits), room=room)
    weakref.finalize(store, _end, root, pool)
    return store


def close_balanced(store: BlockStore) -> None:
    """Close it: then nothing is under way, and it holds no slot."""
    store.close()
    left = store.statistics()
    assert left.working == 0
    assert left.ring is None or left.ring.own_references == 0


def _end(root: CacheRoot, pool: IoPool) -> None:
    pool.close(60.0)
    root.close()
