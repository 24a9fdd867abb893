"""Leases: what a verdict promised stays in the ring until it is loaded, or until nobody wants it any more.

One ledger entry per attempt of a request. It is replaced by the attempt's next verdict, released exactly once
and expires by itself when nobody releases it; whatever happens in whatever order, the balance ends at zero.
Pins hold room that nobody else can use, so they are bounded per row, the head of the prefix first; what does
not fit is not pinned, and its load may fail like that of anything on a medium.

The pins themselves belong to a store; they come in through one callable per row, which must not wait.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.lookups import STORE_FAILURES, Clock
from ucm_core.errors import SpecError
from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger
from ucm_core.spec.keys import Keys

__all__ = ["Lease", "LeaseStatistics", "LeasedRow", "Leases", "Pinned"]

LEASE_S = 60.0
"""Seconds after which a lease that nobody released ends."""

_log = quiet_logger(__name__)


class Pinned(Protocol):
    """Objects kept in a ring (`ucm_core.store.ledger.Pins`)."""

    @property
    def keys(self) -> Keys:
        """``uint8[n, 32]``: what is kept, a part of what was asked for."""

    def release(self) -> None:
        """Keep them no longer; a further call is a no-op."""


@dataclass(frozen=True, slots=True)
class LeasedRow:
    """How leases keep objects of one row."""

    pin: Callable[[Keys], Pinned]
    """Keeps what the ring holds of the keys; must not wait."""
    objects: int
    """The most that all leases together may keep, counted once per lease."""


@dataclass(frozen=True, slots=True)
class LeaseStatistics:
    """A moment of a ledger; numbers without "now" only grow.

    ``taken`` is always ``held + replaced + released + expired``.
    """

    held: int = 0
    """Leases now."""
    objects: int = 0
    """Objects pinned by them now, counted once per lease."""
    taken: int = 0
    """Leases that pinned anything, or whose end somebody waits for."""
    replaced: int = 0
    """Ended by the next lease of the same attempt."""
    released: int = 0
    """Ended by a release, or by `Leases.close`."""
    expired: int = 0
    """Ended by time: somebody forgot them."""
    idle_releases: int = 0
    """Releases that had nothing to end: a second one, one after expiry, one of an unknown attempt."""
    failures: int = 0
    """Rows that could not be pinned."""


class Lease:
    """What one verdict keeps in the ring. `release` ends it, once; a further call is a no-op."""

    __slots__ = ("_end", "at_end", "attempt", "pins", "until")

    def __init__(
        self, attempt: Attempt, pins: Mapping[str, Pinned], *, until: float, end: Callable[[Lease], None]
    ) -> None:
        self.attempt = attempt
        """Whose it is."""
        self.pins = pins
        """Per row what is kept; rows of which nothing is kept are not in it."""
        self.until = until
        """When it ends by itself, on the ledger's clock."""
        self.at_end: Callable[[], None] | None = None
        """Called once when it ends, however it does."""
        self._end = end

    @property
    def objects(self) -> int:
        """Objects it keeps, of all rows."""
        return sum(len(pins.keys) for pins in self.pins.values())

    def release(self) -> None:
        """Let the ring have its room again; never touches another lease, also not one of the same attempt."""
        self._end(self)


class Leases:
    """The ledger of leases. Thread-safe: a release may come from the thread that ends a load.

    ``rows`` has one entry per row of which anything is kept, ``limit_s`` is counted on ``clock``. Expiry is
    looked after by the next call, not by a thread. SpecError for a limit that is not above zero.
    """

    def __init__(
        self, rows: Mapping[str, LeasedRow], *, limit_s: float = LEASE_S, clock: Clock = time.monotonic
    ) -> None:
        """Hold nothing yet."""
        short = {name: row.objects for name, row in rows.items() if row.objects < 0}
        if limit_s <= 0 or short:
            raise SpecError(f"limit_s {limit_s} must be above 0, objects {short} must not be negative")
        self._rows = dict(rows)
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[Attempt, Lease] = {}  # a new lease goes to the end, so expiries ascend
        self._used: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._closed = False

    def take(
        self, attempt: Attempt, keys: Mapping[str, Keys], *, at_end: Callable[[], None] | None = None
    ) -> Lease:
        """Keep what the ring holds of ``keys`` (per row ``uint8[n, 32]``, head of the prefix first).

        Replaces the attempt's lease: the new one is pinned before the old one is released, so that nothing in
        both is evicted in between. Never raises for a store that fails: then nothing of that row is kept.
        ``at_end`` is called once when the lease ends, however it does; it must neither wait nor raise. After
        `close` it keeps nothing.
        """
        with ExitStack() as afterwards, self._lock:
            self._expire(afterwards)
            old = self._held.get(attempt)
            if old is not None:
                self._strike(old, "replaced", afterwards)
            pins = self._pinned({} if self._closed else keys)
            lease = Lease(attempt, pins, until=self._clock() + self._limit_s, end=self._end)
            lease.at_end = at_end
            if self._closed and at_end is not None:
                afterwards.callback(at_end)
            elif pins or at_end is not None:
                self._held[attempt] = lease
                self._used.update(_sizes(lease))
                self._counts["taken"] += 1
        return lease

    def release(self, attempt: Attempt) -> None:
        """End the attempt's lease; a no-op, counted, where it has none."""
        self._finish(attempt, None)

    def close(self) -> None:
        """End all leases, for good. Idempotent."""
        with ExitStack() as afterwards, self._lock:
            self._closed = True
            for lease in list(self._held.values()):
                self._strike(lease, "released", afterwards)

    def statistics(self) -> LeaseStatistics:
        """Return a moment of the ledger."""
        with ExitStack() as afterwards, self._lock:
            self._expire(afterwards)
            return LeaseStatistics(len(self._held), self._used.total(), **self._counts)

    def check_integrity(self) -> None:
        """Raise SpecError when the books do not balance or a bound does not hold."""
        with self._lock:
            held, used, counts = list(self._held.values()), +self._used, Counter(self._counts)
        ended = counts["replaced"] + counts["released"] + counts["expired"]
        if counts["taken"] != len(held) + ended:
            raise SpecError(f"{counts['taken']} leases were taken, {ended} ended and {len(held)} are held")
        pinned: Counter[str] = Counter()
        for lease in held:
            pinned.update(_sizes(lease))
        if pinned != used or any(count > self._rows[name].objects for name, count in used.items()):
            raise SpecError(f"leases keep {dict(pinned)} objects, the books say {dict(used)}")

    # -- private; all but `_end` and `_finish` under the lock

    def _pinned(self, keys: Mapping[str, Keys]) -> dict[str, Pinned]:
        """Pin as much of ``keys`` as there is room for; rows of which nothing is pinned are left out."""
        with ExitStack() as undo:
            pins: dict[str, Pinned] = {}
            for name, part in keys.items():
                room = self._rows[name].objects - self._used[name] if name in self._rows else 0
                each = self._pin(name, part[:room]) if room > 0 and len(part) else None
                if each is not None:
                    undo.callback(_let_go, each)
                    pins[name] = each
            undo.pop_all()
        return pins

    def _pin(self, name: str, keys: Keys) -> Pinned | None:
        try:
            pins = self._rows[name].pin(keys)
        except STORE_FAILURES as error:
            _log.warning("row %s: nothing is pinned: %s", name, error)
            metrics.ERRORS.labels(where="lease").inc()
            self._counts["failures"] += 1
            return None
        if len(pins.keys):
            return pins
        _let_go(pins)
        return None

    def _expire(self, afterwards: ExitStack) -> None:
        now = self._clock()
        while self._held and (lease := next(iter(self._held.values()))).until <= now:
            self._strike(lease, "expired", afterwards)

    def _strike(self, lease: Lease, why: str, afterwards: ExitStack) -> None:
        """Strike a lease out of the books; its pins go ``afterwards``, when the lock is free."""
        del self._held[lease.attempt]
        self._used.subtract(_sizes(lease))
        self._counts[why] += 1
        if lease.at_end is not None:
            afterwards.callback(lease.at_end)
        for pins in lease.pins.values():
            afterwards.callback(_let_go, pins)

    def _end(self, lease: Lease) -> None:
        self._finish(lease.attempt, lease)

    def _finish(self, attempt: Attempt, lease: Lease | None) -> None:
        """End the attempt's lease, or only ``lease``."""
        with ExitStack() as afterwards, self._lock:
            self._expire(afterwards)
            held = self._held.get(attempt)
            if held is None or lease not in {None, held}:
                self._counts["idle_releases"] += 1
            else:
                self._strike(held, "released", afterwards)


def _sizes(lease: Lease) -> dict[str, int]:
    return {name: len(pins.keys) for name, pins in lease.pins.items()}


def _let_go(pins: Pinned) -> None:
    """Release pins; a store that fails keeps its room, and who ends a lease must not fail with it."""
    try:
        pins.release()
    except STORE_FAILURES as error:
        _log.warning("objects of a lease are kept in the ring: %s", error)
        metrics.ERRORS.labels(where="lease").inc()
