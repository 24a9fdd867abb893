"""The host ring: fixed-size slots of shared memory that hold blocks by content, for all processes of a node.

A reference keeps a slot from being reused. These calls take and give references, always one per key and call:

=========  ================================================================================
`claim`    takes one on every slot it returns (``OWNER``, ``READY``, ``LOADING``)
`pin`      takes one on every slot it returns (``READY``, ``LOADING``)
`publish`  takes and gives none: the owner may read on, and releases when it is done
`abort`    gives the claim's back: the owner's memory may be reused at once
`release`  gives one back
`close`    gives all back; so does the death of the process, noticed by whoever needs room or waits
=========  ================================================================================

Who goes when a claim needs room? First what has expired (`RingOptions.ttl_s`) or failed, then whom the
policy names. Under every policy a block goes only when nobody references it and no other block in the ring
follows it (`Ring.claim` says who follows whom), so a prefix goes from its tail, and one that outgrows the
ring keeps its head: the rest gets NO_SPACE. Of a batch whose keys name no parents the tail goes first. A
block is asked to go when its turn comes in the line, in order of arrival; one that nothing follows any more
comes to the front. What is referenced when its turn comes waits for another. A hit is a claim, pin or touch
of a key that is there.

========  =================================================================================
`clock`   among blocks that may go, one that was hit since its last turn outlives every one that was not
`fifo`    among blocks that may go, the first to come is the first to go; hits change nothing
`lru`     of every eight in line that may go, the one goes whose last hit (or arrival) is longest ago, counted
          in arrivals; so in a ring of up to eight blocks the one longest unused, in a larger one nearly so
`sieve`   as `clock`, but what was hit keeps its place, so that new blocks that are not hit go soon
========  =================================================================================

A search ends after two rounds. After a process died while it changed the ring, the line is in order of
arrival again (`lru`: of last hits).
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.errors import ClosedError, ConfigError, NoSpace, StoreError
from ucm_core.flow.copy import Strides
from ucm_core.ops.config import RingPolicy
from ucm_core.spec.keys import Keys
from ucm_core.store import huge_pages, region, sizing
from ucm_core.store.anchors import Anchors
from ucm_core.store.arrays import Mask, Slots, Versions
from ucm_core.store.hold import Hold, NoHold

_Number = TypeVar("_Number", np.int32, np.uint32)
_SLOTS_END = 1 << 31
_LAST_SECOND = (1 << 32) - 1
_log = logging.getLogger(__name__)
_POLICIES: tuple[RingPolicy, ...] = get_args(RingPolicy)


class Outcome(IntEnum):
    """What became of one key of a claim, a pin or a wait."""

    OWNER = 0
    """The slot is ours to fill; then `Ring.publish` or `Ring.abort`."""
    READY = 1
    """The block is there and may be read."""
    LOADING = 2
    """Somebody else fills the slot; `Ring.wait`."""
    NO_SPACE = 3
    """Nothing may go, or there is no memory for the slot; or the key has expired and is still read; or the
    ring cannot be changed now."""
    FAILED = 4
    """The owner gave up or died; release and claim again."""
    TIMEOUT = 5
    """Still loading when the time was over."""
    ABSENT = 6
    """The ring does not hold the key (`Ring.pin` only)."""


class Touch(IntEnum):
    """What a touch found of one key."""

    ABSENT = 0
    """The ring does not hold it."""
    KNOWN = 1
    """It was touched within the interval."""
    DUE = 2
    """This is its first touch within the interval."""


@dataclass(frozen=True, slots=True)
class RingOptions:
    """How a ring works. All processes that share one must agree on policy, time to live and shards."""

    policy: RingPolicy = "clock"
    ttl_s: float | None = None
    """Time after its claim, and after its last hit, from which on a block counts as absent, rounded up to
    seconds; None = never."""

    prefault: bool = False
    """Take all memory at once and map it, instead of each slot's when the slot is first used."""
    huge_pages: bool = False
    """Ask the kernel for huge pages under the payloads; the log says it when shared memory gets none."""
    shards: int = 1
    """Parts of a payload, all of one size, that become ready one by one."""

    def __post_init__(self) -> None:
        """Raise `ucm_core.ConfigError` for what no ring can do."""
        if self.policy not in _POLICIES:
            raise ConfigError(f"a ring has no policy {self.policy!r}; choose one of {', '.join(_POLICIES)}")
        if self.ttl_s is not None and not 0 < self.ttl_s <= _LAST_SECOND:
            raise ConfigError(f"ttl_s = {self.ttl_s} is not in (0, {_LAST_SECOND}]; None = blocks stay")

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Policy, whole seconds and shards as they stand in a region."""
        return _POLICIES.index(self.policy), math.ceil(self.ttl_s or 0), self.shards


DEFAULT_OPTIONS = RingOptions()


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """One entry per key of a claim or pin."""

    slots: Slots
    """``int32[n]``; -1 = none, and then no reference either."""
    outcome: npt.NDArray[np.uint8]
    """``uint8[n]`` of `Outcome`."""
    version: Versions
    """``uint32[n]``; (slot, version) names this stay of this key, for ever."""


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """A ring at one moment; slots unless said otherwise."""

    empty: int
    loading: int
    ready: int
    failed: int
    pinned: int
    """With at least one reference, of any participant."""
    own_references: int
    """References that this participant holds."""
    participants: int
    evictions: int
    """Blocks evicted since the region was made, by all participants."""
    expired: int
    """Blocks that went since then because their time was over."""
    reaped: int
    """Participants found dead since then."""
    repairs: int
    """Times that the structure was rebuilt because a process died while it changed it."""
    refusals: int
    """Claims since then for whose slot there was no memory."""
    policy: RingPolicy
    """The one that works, for all participants."""


class Ring:
    """One process's share of a ring, made by `Ring.open`. Calls may come from any thread; none holds the GIL.

    Calls after `close`, and calls in a forked child, raise ClosedError. Slots out of range are an IndexError.
    A process that is stopped while it changes the ring stops nobody: what needs a change meanwhile is
    NO_SPACE or not done, after two seconds the first time; `statistics` and `check_integrity` raise
    StoreError.
    """

    def __init__(self, native: _native.Ring, path: Path | None) -> None:
        self._native = native
        self._expires = native.ttl_s > 0
        self._anchors = Anchors()
        self._close = weakref.finalize(self, _leave, native, path, os.getpid())
        _open_here.add(native)

    @classmethod
    def open(
        cls,
        name: str | None,
        *,
        slots: int,
        payload_bytes: int,
        geometry_digest: bytes,
        options: RingOptions = DEFAULT_OPTIONS,
    ) -> Self:
        """Create the ring ``name`` of this user, or join it; None = a private one without a name.

        A ring that lives keeps its own number of slots; 0 slots join one that lives, or are NoSpace. Raises
        StoreError when it differs in anything else, NoSpace when shared memory is too small. Removes regions
        of this user that nobody lives in any more.

        The memory of a payload is taken when its slot is first claimed (`RingOptions.prefault`: now); should
        others have taken it by then, the claim is NO_SPACE.
        """
        if not isinstance(geometry_digest, bytes) or len(geometry_digest) != 32:
            raise StoreError(
                f"geometry_digest is {geometry_digest!r}; a ring needs the 32 bytes of `Geometry.digest`"
            )
        join_only = name is not None and slots == 0
        size = _native.ring_bytes(slots + join_only, payload_bytes, options.shards)
        if name is None:
            return cls(_open_private(size, slots, payload_bytes, geometry_digest, options), None)
        region.sweep()
        with region.enter(name) as entered:
            if entered.fresh and join_only:
                raise NoSpace(f"nobody lives in {entered.path}, and 0 slots make no ring")
            if entered.fresh:
                region.allocate(entered, size, structure=size - slots * payload_bytes)
                native = _native.Ring(
                    entered.descriptor, slots, payload_bytes, geometry_digest, *options.numbers
                )
            else:
                living = _check_header(entered, payload_bytes, geometry_digest, options)
                native = _join(entered, living, payload_bytes, options)
            _prepare(native, entered.path, options)
            return cls(native, entered.path)

    @property
    def slots(self) -> int:
        """How many slots the ring has."""
        return self._native.slots

    @property
    def payload_bytes(self) -> int:
        """Bytes of one slot's payload."""
        return self._native.payload_bytes

    @property
    def shards(self) -> int:
        """How many parts a payload has that become ready one by one."""
        return self._native.shards

    @property
    def participant(self) -> int:
        """Number of this participant in the ring, in [0, 64)."""
        return self._native.participant

    def lookup(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """``uint8[n]``, 1 = READY now; takes no reference and marks nothing. ``keys`` is ``uint8[n, 32]``."""
        return self._native.lookup(np.ascontiguousarray(keys), self._now_s())

    def hold(self) -> Hold:
        """What can have references that a claim takes, and gives them back when nobody has it any more."""
        return Hold(self._native, self._now_s)

    def claim(
        self,
        keys: Keys,
        parents: Keys | None = None,
        *,
        whole: bool = False,
        demand: bool = False,
        hold: Hold | NoHold | None = None,
    ) -> Claims:
        """Take a reference on every key that is there or coming, and an empty slot to fill for every other.

        ``parents``, ``uint8[n, 32]``: for each key that of the block before it in its prefix, all zeros where
        it has none. While a block is followed by another in the ring it is not evicted, whoever named them.
        A parent for which this process found no room stands for the last one before it that had some.
        No key of a batch evicts another, nor what one follows. A key that stands twice in it is OWNER, then
        LOADING at the same slot.

        ``whole``: all keys, or NO_SPACE for all; then nothing is referenced, and what would have had to go is
        there as before. ``demand``: somebody waits for the bytes. Other claims leave a sixteenth of the slots
        empty for those. ``hold``, here and below: has the references, instead of the caller.
        """
        before = self._anchors_of(parents)
        claims = Claims(
            *self._native.claim(
                np.ascontiguousarray(keys), before, self._now_s(), whole, demand, _noted(hold)
            )
        )
        self._note_anchors(keys, parents, claims)
        return claims

    def note_refused(self, keys: Keys, parents: Keys | None) -> None:
        """Take ``keys``, in the order of a prefix, for ones that found no room, and do not try them."""
        if parents is not None:
            self._anchors.note(keys, parents, refused=np.ones(len(keys), dtype=np.bool_))

    def pin(self, keys: Keys, *, hold: Hold | NoHold | None = None) -> Claims:
        """Take a reference on every key that is there or coming; others are ABSENT.

        A key whose slot is just being looked at by an evictor may be called absent although it stays.
        """
        return Claims(*self._native.pin(np.ascontiguousarray(keys), self._now_s(), _noted(hold)))

    def scatter(self, keys: Keys, strides: Strides) -> bool:
        """Copy the payloads of ``keys``, all READY, to engine memory (`ucm_core.flow.copy.strides_of`).

        False: not all are, and no byte was copied. Takes no reference that outlives the call.
        """
        return self._native.scatter(np.ascontiguousarray(keys), strides, self._now_s())

    def gather(
        self,
        keys: Keys,
        strides: Strides,
        *,
        parents: Keys | None = None,
        units: tuple[int, int],
        hold: Hold | NoHold | None = None,
    ) -> Claims:
        """`claim` distinct ``keys``, then fill the slots that are ours from engine memory, and publish them.

        Those are OWNER nevertheless. ``units``: how many a payload has, and how many bytes of one are not
        padding.
        """
        before, now_s = self._anchors_of(parents), self._now_s()
        claims = Claims(
            *self._native.gather(np.ascontiguousarray(keys), before, now_s, strides, units, _noted(hold))
        )
        self._note_anchors(keys, parents, claims)
        return claims

    def wait(
        self, slots: Slots, versions: Versions, *, timeout_s: float, shard: int | None = None
    ) -> npt.NDArray[np.uint8]:
        """Wait until referenced slots are no longer loading: ``uint8[n]`` of READY, FAILED or TIMEOUT.

        With ``shard``, until that one is READY, which it stays whatever becomes of the others. The death of
        an owner is noticed within a fraction of a second and makes FAILED. References stay.
        """
        return self._native.wait(_slots(slots), _versions(versions), timeout_s, shard)

    def publish(self, slots: Slots, versions: Versions | None = None) -> Mask:
        """Declare owned slots full and wake those who wait. The references stay.

        False = refused, nothing changed: the slot is no longer loading for us. Give ``versions`` where
        another thread of this process may have aborted the claim in between.
        """
        return self._native.publish(_slots(slots), versions).view(np.bool_)

    def publish_shards(self, slots: Slots, versions: Versions, *, begin: int, end: int) -> Mask:
        """Declare shards ``[begin, end)`` of owned slots full and wake those who wait for one of them.

        The last shard publishes the slot. Results as in `publish`; a range that is none is an IndexError.
        """
        return self._native.publish_shards(_slots(slots), _versions(versions), begin, end).view(np.bool_)

    def abort(self, slots: Slots, versions: Versions | None = None) -> Mask:
        """Give owned slots up unfilled, with their references; wake those who wait. Results as in `publish`.

        The memory may be another block's at once: no write to it may be on its way any more.
        """
        return self._native.abort(_slots(slots), versions).view(np.bool_)

    def release(self, slots: Slots) -> None:
        """Give one reference back per slot. Raises StoreError, after the rest, for slots we hold none of."""
        wanted = _slots(slots)
        done = self._native.release(wanted, self._now_s()).view(np.bool_)
        if np.count_nonzero(done) < done.size:
            raise StoreError(
                f"slots {wanted[~done].tolist()} hold no reference of participant {self.participant}"
            )

    def touch(self, keys: Keys, *, interval_s: int = 60) -> npt.NDArray[np.uint8]:
        """Mark resident keys as used, for the clock: ``uint8[n]`` of `Touch`.

        ``DUE`` is said to one caller of all processes per ``interval_s`` seconds and key.
        """
        return self._native.touch(np.ascontiguousarray(keys), _shared_clock_s(), interval_s)

    def drop(self, keys: Keys) -> Mask:
        """Forget READY keys that nobody references; True = it was there and is gone."""
        return self._native.drop(np.ascontiguousarray(keys)).view(np.bool_)

    def residents(self) -> tuple[Keys, Mask]:
        """All keys that are here or coming, ``uint8[n, 32]``, and ``bool[n]``: which anybody references.

        Looks at every slot and takes nothing: each answer is of its own moment.
        """
        keys, referenced = self._native.residents()
        return keys.reshape(-1, 32), referenced.view(np.bool_)

    def addresses(self, slots: Slots) -> npt.NDArray[np.int64]:
        """``int64[n]`` addresses of payloads, 4096-aligned: read while referenced, written by the owner."""
        return self._native.addresses(_slots(slots))

    def statistics(self) -> RingStatistics:
        """The ring at this moment; looks at every slot."""
        counts = self._native.statistics()
        return RingStatistics(policy=_POLICIES[counts.pop("policy")], **counts)

    def check_integrity(self) -> None:
        """Raise StoreError when index, free slots, states or references contradict each other."""
        problem = self._native.check_integrity()
        if problem:
            raise StoreError(f"the ring is inconsistent: {problem}")

    def close(self) -> None:
        """Leave the ring; our claims that are still loading fail. The last to leave removes the region."""
        self._close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._close.alive

    def _anchors_of(self, parents: Keys | None) -> Keys | None:
        return None if parents is None else self._anchors.of(np.ascontiguousarray(parents))

    def _note_anchors(self, keys: Keys, parents: Keys | None, claims: Claims) -> None:
        if parents is not None:
            self._anchors.note(keys, parents, refused=claims.outcome == Outcome.NO_SPACE)

    def _now_s(self) -> int:
        return _shared_clock_s() if self._expires else 0

    def __enter__(self) -> Self:
        if self.closed:
            raise ClosedError("the ring is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_open_here: weakref.WeakSet[_native.Ring] = weakref.WeakSet()


def _noted(hold: Hold | NoHold | None) -> _native.Hold | None:
    return None if hold is None else hold.native


def _forget_in_child() -> None:
    """A forked child must not keep its parent's locks alive: the parent's death would go unnoticed."""
    for native in _open_here:
        native.close_descriptor()


os.register_at_fork(after_in_child=_forget_in_child)


def _leave(native: _native.Ring, path: Path | None, opened_by: int) -> None:
    if os.getpid() == opened_by:
        region.leave(native.fd, path, leave_ring=native.leave)
    native.close_descriptor()


def _open_private(
    size: int, slots: int, payload_bytes: int, geometry_digest: bytes, options: RingOptions
) -> _native.Ring:
    if size > (there := sizing.available_bytes()):  # such memory has no file system that would refuse it
        raise NoSpace(region.no_space(None, needed=size, there=there))
    descriptor = os.memfd_create("ucm-ring", os.MFD_CLOEXEC)
    try:
        region.take(descriptor, size, structure=size - slots * payload_bytes, path=None)
        native = _native.Ring(descriptor, slots, payload_bytes, geometry_digest, *options.numbers)
    finally:
        os.close(descriptor)
    _prepare(native, None, options)
    return native


def _prepare(native: _native.Ring, path: Path | None, options: RingOptions) -> None:
    """Do to the memory what the options ask for; NoSpace, and the ring is left, when there is not enough."""
    if options.huge_pages:
        refused = huge_pages.refusal(None if path is None else path.parent)
        if refused or not native.ask_for_huge_pages():
            _say_no_huge_pages(refused or "the kernel knows none")
    if options.prefault and (error := native.take_all()):
        needed = native.slots * native.payload_bytes
        free = region.free_bytes(native.fd)
        native.leave()
        native.close_descriptor()
        raise NoSpace(f"{os.strerror(error)}: {region.no_space(path, needed=needed, there=free)}")


@cache
def _say_no_huge_pages(reason: str) -> None:
    """Once: every ring of a process is refused for the same reason."""
    _log.warning("rings get no huge pages: %s", reason)


def _check_header(
    entered: region.Entered, payload_bytes: int, geometry_digest: bytes, options: RingOptions
) -> int:
    """Return the number of slots of a living ring; StoreError when it is not the same kind of ring."""
    header = _native.ring_header(entered.descriptor)
    if header is None or not 0 < header[1] < _SLOTS_END:
        raise StoreError(f"{entered.path} is in use and is not a ring")
    version, slots, living_bytes, living_digest, policy, ttl_s, shards = header
    pairs: dict[str, tuple[object, object]] = {
        "header version": (version, _native.RING_VERSION),
        "payload bytes": (living_bytes, payload_bytes),
        "geometry digest": (living_digest.hex(), geometry_digest.hex()),
        "policy": (dict(enumerate(_POLICIES)).get(policy, policy), options.policy),
        "ttl_s (0 = none)": (ttl_s, options.numbers[1]),
        "shards": (shards, options.shards),
        "file size": (
            os.fstat(entered.descriptor).st_size,
            _native.ring_bytes(slots, payload_bytes, options.shards),
        ),
    }
    for what, (there, wanted) in pairs.items():
        if there != wanted:
            raise StoreError(f"{entered.path} is in use with {what} {there}, not {wanted}: use another root")
    return slots


def _join(entered: region.Entered, slots: int, payload_bytes: int, options: RingOptions) -> _native.Ring:
    try:
        return _native.Ring(entered.descriptor, slots, payload_bytes, None, *options.numbers)
    except RuntimeError as error:
        raise StoreError(f"{entered.path} cannot be joined: {error}") from error


def _shared_clock_s() -> int:
    """Whole seconds, never 0, of the clock that all processes of a node share."""
    return int(time.monotonic()) % _LAST_SECOND + 1


def _versions(versions: Versions) -> Versions:
    return _whole(versions, np.uint32, "versions")


def _slots(slots: Slots) -> Slots:
    return _whole(slots, np.int32, "slots")


def _whole(given: npt.ArrayLike, kind: type[_Number], what: str) -> npt.NDArray[_Number]:
    """``kind[n]``; IndexError for what it cannot hold: numpy would make the number of another slot of it."""
    numbers = np.ascontiguousarray(given)
    if numbers.dtype == kind:
        return numbers
    with np.errstate(invalid="ignore"):
        cast = numbers.astype(kind, copy=False)
    if cast is not numbers and not np.array_equal(cast, numbers):
        raise IndexError(f"{what} {numbers.tolist()} are not all whole numbers that {kind.__name__} holds")
    return cast
