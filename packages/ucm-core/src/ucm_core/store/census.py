"""A census: every object under a root, by family, listed a step at a time into arrays.

A family is all segments of one key in one row. Listed are regular files with an object's name in the folder
where it belongs; nothing else, and no link is followed. What cannot be listed is passed over and said:
`Census.complete` is False then.
"""

from __future__ import annotations

import os
import stat
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger
from ucm_core.spec.keys import NAME_BYTES
from ucm_core.store import names

_TOLERANCE_NS = 60_000_000_000
"""Clocks of the nodes that share a root differ by less."""
_log = quiet_logger("ucm_core.store.census")


RowPlace = tuple[str, str]
"""Names of the directories of a namespace and, in it, of a row."""


@dataclass(frozen=True, slots=True, eq=False)
class Families:
    """What a census found, one entry per family."""

    names: npt.NDArray[np.uint8]
    """``uint8[n, 16]``, as in the files' names."""
    used_ns: npt.NDArray[np.int64]
    """Latest modification of any of its files, never after the census began, ``int64[n]``."""
    sizes: npt.NDArray[np.int64]
    """Bytes of its files together, ``int64[n]``."""


class Census:
    """One listing of ``root``. While it goes on files may come and go: they may be in it or not.

    ``correct_times``: a file of a time to come is given the present one, else it would never grow old.
    """

    def __init__(self, root: Path, *, correct_times: bool = False) -> None:
        self._correct_times = correct_times
        self.began_ns = time.time_ns()
        """Wall clock at the beginning, as the files' times."""
        self.complete = True
        """False when a directory or a file could not be looked at."""
        self._places: list[RowPlace] = []
        self._begins: list[int] = []  # families [begin, next begin) lie at the place of that number
        self._names, self._used, self._sizes = bytearray(), array("q"), array("q")
        self._folders = self._walk(root)

    def advance(self, slice_s: float) -> bool:
        """List folders for about ``slice_s`` seconds, one at least; False when everything is listed."""
        deadline = time.monotonic() + slice_s
        return any(time.monotonic() >= deadline for _ in self._folders)

    @property
    def total_bytes(self) -> int:
        """Bytes of all that was listed so far."""
        return sum(self._sizes)

    def families(self) -> Families:
        """The result, once `advance` has said False."""
        found = np.frombuffer(self._names, dtype=np.uint8).reshape(-1, NAME_BYTES)
        used, sizes = (np.frombuffer(column, dtype=np.int64) for column in (self._used, self._sizes))
        return Families(found, used, sizes)

    def place_of(self, family: int) -> RowPlace:
        """Where the family of that number lies."""
        return self._places[bisect_right(self._begins, family) - 1]

    def span_of(self, place: RowPlace) -> slice:
        """The numbers of a row's families; none where nothing was listed."""
        if place not in self._places:
            return slice(0, 0)
        row = self._places.index(place)
        return slice(*[*self._begins, len(self._sizes)][row : row + 2])

    def used_ns(self, status: os.stat_result) -> int:
        """When a file was used, in this census's terms: a time to come counts as its beginning."""
        return max(0, min(status.st_mtime_ns, self.began_ns))

    def _walk(self, root: Path) -> Iterator[None]:
        """Yield after every folder."""
        for namespace in self._each(names.subdirectories(root)):
            if not names.is_namespace(namespace.name):
                continue
            for row in self._each(names.subdirectories(Path(namespace.path))):
                self._places.append((namespace.name, row.name))
                self._begins.append(len(self._sizes))
                for folder in self._each(names.folders_of_row(Path(row.path))):
                    self._list(folder)
                    yield

    def _list(self, folder: os.DirEntry[str]) -> None:
        families: dict[str, tuple[int, int]] = {}
        for entry in self._each(names.entries(Path(folder.path))):
            parsed = names.parse_object(entry.name)
            status = self._status(entry) if parsed and parsed[0].startswith(folder.name) else None
            if parsed and status:
                used_ns, size = families.get(parsed[0], (0, 0))
                families[parsed[0]] = max(used_ns, self.used_ns(status)), size + status.st_size
        self._names += bytes.fromhex("".join(families))
        self._used.extend(used_ns for used_ns, _ in families.values())
        self._sizes.extend(size for _, size in families.values())

    def _status(self, entry: os.DirEntry[str]) -> os.stat_result | None:
        """What is known of a regular file; None for anything else, and for what is gone."""
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._pass_over(error)
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        if self._correct_times and status.st_mtime_ns > self.began_ns + _TOLERANCE_NS:
            with suppress(OSError):
                os.utime(entry.path, ns=(self.began_ns, self.began_ns), follow_symlinks=False)
        return status

    def _each(self, entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        try:
            yield from entries
        except OSError as error:
            self._pass_over(error)

    def _pass_over(self, error: OSError) -> None:
        self.complete = False
        metrics.ERRORS.labels(where="collector").inc()
        _log.warning("cannot list all of the cache, what cannot be seen stays: %s", error)
