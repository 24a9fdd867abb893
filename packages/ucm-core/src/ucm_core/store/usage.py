"""The usage counter: bytes of all objects under a root, writes under way included, for all its processes.

``<root>/.usage`` holds three numbers of 8 bytes: the total, its edition, and what was ever added to it. Its
lock guards them, and every writer's share in flight. Bytes are reserved before a write and settled after it,
so the total can be too high (until somebody counts) and never too low.

A count takes long, and nobody waits for it: `Usage.begin_count`, list the files, `Usage.end_count`. What was
there at the beginning is then listed, or was removed meanwhile, so the true total at the end is at most::

    listed + in flight at the beginning + added meanwhile

and at least what was listed less what was removed meanwhile, whatever others did. A total between the two is
kept; one above is too high, for example because a process died with bytes reserved, or files were deleted by
hand; one below is a lost one.

A total that was counted is a new edition. Whoever counted it did not see what somebody has just removed and
not taken off yet, so `Usage.end_removal` takes off nothing of an edition that is not the one before the
removal.
"""

from __future__ import annotations

import math
import os
import secrets
import struct
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ucm_core.store import locks, writers
from ucm_core.store.census import Census

_UNBOUNDED = sys.maxsize
_BOOKS = struct.Struct("<QQQ")
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class Books:
    """What the counter's file holds."""

    total_bytes: int
    edition: int
    """Another random number whenever the total was counted."""
    added_bytes: int
    """Sum of all reservations, less what of them was not written, modulo 2^64, from wherever it began."""

    def plus(self, size_bytes: int) -> Books:
        """After a reservation, or (negative) the part of one that was not written."""
        total_bytes = max(0, self.total_bytes + size_bytes)
        return Books(total_bytes, self.edition, (self.added_bytes + size_bytes) % _WORD)

    def minus(self, removed_bytes: int) -> Books:
        """After files were removed."""
        return replace(self, total_bytes=max(0, self.total_bytes - removed_bytes))

    def counted(self, total_bytes: int) -> Books:
        """After a count."""
        return Books(total_bytes, secrets.randbits(64), self.added_bytes)

    def added_since(self, before: Books) -> int:
        """What was added between two books."""
        return (self.added_bytes - before.added_bytes + _WORD // 2) % _WORD - _WORD // 2


@dataclass(frozen=True, slots=True)
class CountBegin:
    """The books when a count began."""

    books: Books
    in_flight_bytes: int


class Usage:
    """One process's view of the counter. Every call may raise OSError, as the file system does."""

    def __init__(self, root: Path, writer: writers.Writer, capacity_bytes: int | None = None) -> None:
        self._root, self._path = root, root / ".usage"
        self._writer = writer
        self._patience_s: float | None = None
        self._open_ends: deque[tuple[int, int]] = deque()
        self.capacity_bytes = _UNBOUNDED if capacity_bytes is None else capacity_bytes
        """The bound that `reserve` keeps."""

    @property
    def used_bytes(self) -> int:
        """The total now, counted from the files when nobody has counted before."""
        with self._locked() as descriptor:
            return self._books(descriptor).total_bytes

    def reserve(self, size_bytes: int) -> bool:
        """Reserve room for one write; False when the bound does not allow it. Settle it afterwards."""
        return self.reserve_objects(1, size_bytes) == 1

    def reserve_objects(self, count: int, object_bytes: int) -> int:
        """Reserve room for as many of ``count`` objects as the bound allows; return how many."""
        with self._locked() as descriptor:
            books = self._books(descriptor)
            granted = max(0, min(count, (self.capacity_bytes - books.total_bytes) // object_bytes))
            # The share first: if this process dies between the two, the total is the lower one and true.
            self._writer.in_flight_bytes += granted * object_bytes
            _write(descriptor, books.plus(granted * object_bytes))
            return granted

    def settle(self, reserved_bytes: int, *, written_bytes: int) -> None:
        """End a reservation: ``written_bytes`` of it became objects, the rest is given back.

        When this raises, the next call settles it as well.
        """
        self._open_ends.append((reserved_bytes, written_bytes))
        with self._locked() as descriptor:
            ends = list(self._open_ends)
            reserved, written = (sum(column) for column in zip(*ends, strict=True)) if ends else (0, 0)
            if written != reserved:
                _write(descriptor, self._books(descriptor).plus(written - reserved))
            for _ in ends:
                self._open_ends.popleft()
            self._writer.in_flight_bytes = max(0, self._writer.in_flight_bytes - reserved)

    def begin_removal(self) -> int | None:
        """Before objects are removed: what `end_removal` needs. Waits for nobody and raises nothing."""
        with suppress(OSError):
            descriptor = locks.open_lock_file(self._path, create=False)
            try:
                books = _read(descriptor)
            finally:
                os.close(descriptor)
            return None if books is None else books.edition
        return None

    def end_removal(self, begin: int | None, *, removed_bytes: int) -> None:
        """Take the bytes of what was removed since `begin_removal` off the total."""
        with self._locked() as descriptor:
            books = self._books(descriptor)
            if books.edition == begin:
                _write(descriptor, books.minus(removed_bytes))

    def recount(self) -> int:
        """Count the files anew, correct the total by that, and return it."""
        begin, census = self.begin_count(), Census(self._root)
        census.advance(math.inf)
        return self.end_count(begin, listed_bytes=census.total_bytes, complete=census.complete)

    def begin_count(self) -> CountBegin:
        """Before somebody lists all files; nobody has to wait meanwhile."""
        with self._locked() as descriptor:
            return CountBegin(self._books(descriptor), self._in_flight_bytes())

    def end_count(self, begin: CountBegin, *, listed_bytes: int, complete: bool) -> int:
        """Correct the total by what was listed since `begin_count`, and return it.

        It is never lowered by a list that is not ``complete``, and left alone when another count was faster.
        """
        with self._locked() as descriptor:
            now = self._books(descriptor)
            if now.edition != begin.books.edition:
                return now.total_bytes
            added = now.added_since(begin.books)
            removed = added - (now.total_bytes - begin.books.total_bytes)
            most = listed_bytes + begin.in_flight_bytes + added
            too_high = complete and now.total_bytes > most
            too_low = now.total_bytes < listed_bytes - removed
            if too_high or too_low:
                now = now.counted(most)
                _write(descriptor, now)
            return now.total_bytes

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the counter's lock; who waited for it in vain once does not wait again until it was there."""
        try:
            with locks.exclusive(self._path, timeout_s=self._patience_s) as descriptor:
                self._patience_s = None
                yield descriptor
        except TimeoutError:
            self._patience_s = 0.0
            raise

    def _books(self, descriptor: int) -> Books:
        return _read(descriptor) or self._begin_books(descriptor)

    def _begin_books(self, descriptor: int) -> Books:
        """New books where there are none, or damaged ones; everybody waits until the files are counted."""
        books = Books(0, 0, 0).counted(self._in_flight_bytes() + object_bytes(self._root))
        os.ftruncate(descriptor, 0)
        _write(descriptor, books)
        return books

    def _in_flight_bytes(self) -> int:
        return writers.living_in_flight_bytes(self._root / ".writers")


def object_bytes(root: Path) -> int:
    """Return the bytes of all objects under ``root``."""
    census = Census(root)
    census.advance(math.inf)
    return census.total_bytes


def _read(descriptor: int) -> Books | None:
    """Return the books; None where there are none, or damaged ones."""
    data = locks.read_most(descriptor, _BOOKS.size + 1)
    return Books(*_BOOKS.unpack(data)) if len(data) == _BOOKS.size else None


def _write(descriptor: int, books: Books) -> None:
    total_bytes = min(books.total_bytes, _WORD - 1)
    locks.write_all(descriptor, _BOOKS.pack(total_bytes, books.edition, books.added_bytes))
