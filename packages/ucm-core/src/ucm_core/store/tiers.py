"""What the two halves of a block store share: the tiers, the limits, a batch without repetitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ucm_core.errors import LayoutError
from ucm_core.flow.ticket import Codes, ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger
from ucm_core.spec.keys import Keys
from ucm_core.store.absent_tiers import NoFiles, NoRing
from ucm_core.store.arrays import Int64s, Mask
from ucm_core.store.files import FileTier
from ucm_core.store.ledger import TOUCH_INTERVAL_S
from ucm_core.store.pool import IoPool
from ucm_core.store.ring import Ring
from ucm_core.store.rotation import rotated

CHUNK_BYTES = 32 << 20
"""Payload bytes that one piece of I/O work moves: enough for the medium, few enough to share the work."""

COPY_CHUNKS = 4
"""Pieces of a load are larger by this where the ring holds them: a copy is so fast that its call counts."""

PRIVATE_BYTES = 256 << 20
"""Memory beside the rings that all saves of one cache may hold. Loads hold one piece per I/O thread."""

log = quiet_logger("ucm_core.store.work")


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How long a store may wait, and how far a save goes."""

    save_wait_s: float = 0.5
    """Longest time that one save waits for room in the ring or for another writer of the same key."""
    load_wait_s: float = 10.0
    """Longest time that one load waits for another reader of the same key before it reads by itself."""
    event_wait_s: float = 30.0
    """Longest time that a unit waits for its compute event; then it is not saved."""
    sync: bool = False
    """Flush files to the device before they count as stored."""
    ttl_s: float | None = None
    """Time after its last use after which an object is not found any more; None = no end."""
    private_bytes: int = PRIVATE_BYTES
    """What saves that find no room in the ring may hold beside it; one object at least, unless 0."""

    @property
    def touch_interval_s(self) -> int:
        """How often at most a use is noted on the medium: often enough for what is used to stay."""
        return TOUCH_INTERVAL_S if self.ttl_s is None else min(TOUCH_INTERVAL_S, int(self.ttl_s / 2))


@dataclass(frozen=True, slots=True)
class Tiers:
    """A ring over files, the threads that move bytes between them, and the limits."""

    ring: Ring | NoRing
    files: FileTier | NoFiles
    pool: IoPool
    row: str
    """The row's name, for metrics."""
    limits: StoreLimits
    rank: int = 0
    """Which of the `ranks` processes this is that load the same lists."""
    ranks: int = 1

    @property
    def chunk_objects(self) -> int:
        """Objects per piece of I/O work: bounded by bytes, and so that all threads together fit the ring.

        A ring of fewer slots than threads is gone past anyway, and bounds nothing.
        """
        by_bytes = max(1, CHUNK_BYTES // self.files.geometry.payload_bytes)
        by_slots = self.ring.slots // self.pool.threads
        return min(by_bytes, by_slots or by_bytes)

    def on_file(self, keys: Keys, *, absent: bool) -> Mask:
        """Which keys a save need not gather, ``bool[n]``.

        None is looked for where the caller calls them ``absent``; unless files are flushed: one that came
        meanwhile may not be flushed yet by whoever wrote it.
        """
        if absent and not self.limits.sync:
            return np.zeros(len(keys), dtype=np.bool_)
        return self.files.stored(keys)

    @property
    def wave_objects(self) -> int:
        """Objects that a save gathers before it hands them to the threads: a few pieces of I/O work.

        While they write, gathering goes slower; so most batches are gathered whole first. Half of the ring is
        left to others.
        """
        piece = self.chunk_objects
        return max(piece, min(4 * piece, self.ring.slots // 2))

    def chunks(self, count: int, *, times: int = 1) -> Iterator[Int64s]:
        """``range(count)``, `rotated`, in pieces of ``times`` `chunk_objects`, less to keep threads busy.

        ``times`` above one are copies: pieces of `chunk_objects` at least, for `IoPool.copy_threads`.
        """
        if times == 1:
            size = min(self.chunk_objects, -(-count // self.pool.threads))
        else:
            share = max(self.chunk_objects, -(-count // self.pool.copy_threads))
            size = min(times * self.chunk_objects, share)
        size = max(1, size)
        order = rotated(count, self.rank, ranks=self.ranks)
        for begin in range(0, count, size):
            yield order[begin : begin + size]


def check_keys(keys: Keys, who: str = "keys") -> None:
    """Raise LayoutError for what is no ``uint8[n, 32]``."""
    if not isinstance(keys, np.ndarray):
        raise LayoutError(f"{who} are a {type(keys).__name__}; need uint8[n, 32]")
    if keys.ndim != 2 or keys.shape[1] != 32 or keys.dtype != np.uint8:
        raise LayoutError(f"{who} are {keys.dtype}{list(keys.shape)}; need uint8[n, 32]")


def check_batch(keys: Keys, parents: Keys | None) -> None:
    """Raise LayoutError unless ``keys`` are keys and ``parents``, where there are any, one for each."""
    check_keys(keys)
    if parents is None:
        return
    check_keys(parents, "parents")
    if len(parents) != len(keys):
        raise LayoutError(f"{len(keys)} keys and {len(parents)} parents; need one for each")


def check_target(target: object) -> None:
    """Raise LayoutError where a load has nowhere to go."""
    if target is None:
        raise LayoutError("a load has no target; give one, or use prefetch to bring blocks into the ring")


def check_source(source: object) -> None:
    """Raise LayoutError where a save has nothing to keep."""
    if source is None:
        raise LayoutError("a save has no source; give one, or use reserve to write a block in place")


class KeyBatch:
    """The distinct keys of a batch, numbered in order of first appearance, and where each of them stands.

    >>> import numpy as np
    >>> batch = KeyBatch(np.repeat(np.array([[7], [5], [7]], dtype=np.uint8), 32, axis=1))
    >>> batch.keys[:, 0].tolist(), batch.first.tolist()
    ([7, 5], [0, 1])
    >>> batch.positions(np.array([0])).tolist()
    [0, 2]
    """

    def __init__(self, keys: Keys, parents: Keys | None = None) -> None:
        check_batch(keys, parents)
        raw = keys.tobytes()
        each = [raw[begin : begin + 32] for begin in range(0, len(raw), 32)]
        self.count = len(each)
        self.names = list(dict.fromkeys(each))
        self._repeats = len(self.names) < self.count
        self._order = self._begin = self.first = np.arange(self.count)
        self.keys: Keys = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 32)
        if self._repeats:
            self._find_repeats(each)
        self._parents = None if parents is None else parents[self.first]

    def parents(self, ids: Int64s) -> Keys | None:
        """For the distinct keys ``ids`` the keys of the blocks before them, as `Ring.claim` takes them."""
        return None if self._parents is None else self._parents[ids]

    def _find_repeats(self, each: list[bytes]) -> None:
        numbers = {name: number for number, name in enumerate(self.names)}
        inverse = np.array([numbers[name] for name in each], dtype=np.int64)
        self._order = np.argsort(inverse, kind="stable")
        self._begin = np.searchsorted(inverse[self._order], np.arange(len(self.names) + 1))
        self.first = self._order[self._begin[:-1]]
        self.keys = np.frombuffer(b"".join(self.names), dtype=np.uint8).reshape(-1, 32)

    def __len__(self) -> int:
        return len(self.names)

    def expand(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Positions in the batch of the distinct keys ``ids``, and for each its key's place in ``ids``."""
        if not self._repeats:
            return ids, np.arange(ids.size)
        begin, end = self._begin[ids], self._begin[ids + 1]
        count = end - begin
        which = np.repeat(np.arange(len(ids)), count)
        offset = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        return self._order[begin[which] + offset], which

    def positions(self, ids: Int64s) -> Int64s:
        """Positions in the batch of the distinct keys ``ids``."""
        return self.expand(ids)[0]

    def settle(self, ticket: Ticket, ids: Int64s, *, codes: npt.ArrayLike) -> None:
        """Settle all positions of the distinct keys ``ids``: a code for all, for each, or for each shard."""
        positions, which = self.expand(ids)
        given = np.asarray(codes, dtype=np.uint8)
        ticket.settle(positions, given[which] if given.ndim else given)


class Room(Protocol):
    """Whoever keeps the files below the capacity bound (`ucm_core.store.gc.Collector`)."""

    def make_room(self) -> bool:
        """A write was refused: remove what is old. True when it is worth a second try."""

    def note_written(self) -> None:
        """Files were written; returns at once."""

    def take_stock(self) -> None:
        """Count what is there, some time soon; returns at once."""


def copy_each(copy: Callable[[Int64s, Int64s], None], index: Int64s, *, address: Int64s, who: str) -> Codes:
    """Copy all objects at once; when that raises, one by one, so that exactly those that raise are INVALID.

    ``copy`` is `BlockSource.gather` or `BlockTarget.scatter`, ``who`` it is of, for the log.
    """
    codes = np.zeros(index.size, dtype=np.uint8)
    try:
        copy(index, address)
    except Exception:
        log.warning("%s failed for a batch of %d; trying one by one", who, index.size, exc_info=True)
        for place in range(index.size):
            try:
                copy(index[place : place + 1], address[place : place + 1])
            except Exception:  # noqa: BLE001 - as above
                codes[place] = ResultCode.INVALID
    return codes


def count_failures(operation: str, codes: Codes) -> None:
    """Count every code that is not ``OK`` under ``ucm_objects_failed_total``."""
    if not np.count_nonzero(codes):
        return
    values, counts = np.unique(codes[codes != ResultCode.OK], return_counts=True)
    for value, count in zip(values, counts, strict=True):
        reason = ResultCode(int(value)).name.lower()
        metrics.OBJECTS_FAILED.labels(operation=operation, reason=reason).inc(int(count))
