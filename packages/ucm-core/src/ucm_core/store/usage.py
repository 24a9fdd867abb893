"""The usage counter: bytes of all objects under a root, writes under way included, for all its processes.

``<root>/.usage`` holds the total in 8 bytes; its lock guards the total and every writer's share in flight.
Bytes are reserved before a write and settled after it, so the total can be too high (until the next recount)
and never too low.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ucm_core.store import locks, names, writers

_UNBOUNDED = sys.maxsize


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
            return self._total(descriptor)

    def reserve(self, size_bytes: int) -> bool:
        """Reserve room for one write; False when the bound does not allow it. Settle it afterwards."""
        return self.reserve_objects(1, size_bytes) == 1

    def reserve_objects(self, count: int, object_bytes: int) -> int:
        """Reserve room for as many of ``count`` objects as the bound allows; return how many."""
        with self._locked() as descriptor:
            total = self._total(descriptor)
            granted = max(0, min(count, (self.capacity_bytes - total) // object_bytes))
            # The share first: if this process dies between the two, the total is the lower one and true.
            self._writer.in_flight_bytes += granted * object_bytes
            locks.write_number(descriptor, total + granted * object_bytes)
            return granted

    def settle(self, reserved_bytes: int, *, written_bytes: int) -> None:
        """End a reservation: ``written_bytes`` of it became objects, the rest is given back.

        When this raises, the next call settles it as well.
        """
        self._open_ends.append((reserved_bytes, written_bytes))
        with self._locked() as descriptor:
            ends = [self._open_ends.popleft() for _ in range(len(self._open_ends))]
            reserved, written = (sum(column) for column in zip(*ends, strict=True)) if ends else (0, 0)
            total = self._total(descriptor) - (reserved - written)
            locks.write_number(descriptor, max(0, total))
            self._writer.in_flight_bytes = max(0, self._writer.in_flight_bytes - reserved)

    def give_back(self, size_bytes: int) -> None:
        """Take the bytes of removed objects off the total."""
        with self._locked() as descriptor:
            locks.write_number(descriptor, max(0, self._total(descriptor) - size_bytes))

    def recount(self) -> int:
        """Count the files anew, add what living writers have in flight, and return the total.

        Writers wait meanwhile; a file whose reservation is not settled yet counts twice, on the safe side.
        """
        with self._locked() as descriptor:
            return self._recount(descriptor)

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

    def _total(self, descriptor: int) -> int:
        total = locks.read_number(descriptor)
        return self._recount(descriptor) if total is None else total

    def _recount(self, descriptor: int) -> int:
        in_flight = writers.living_in_flight_bytes(self._root / ".writers")
        total = in_flight + object_bytes(self._root)
        locks.write_number(descriptor, total)
        return total


def object_bytes(root: Path) -> int:
    """Return the bytes of all objects under ``root``."""
    total = 0
    for row in names.row_directories(root):
        for entry in names.files_of_row(row):
            if names.parse_object(entry.name):
                try:
                    total += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
    return total
