"""Removal: the part of a collector's pass that removes what a census found, in slices."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger
from ucm_core.store import names
from ucm_core.store.arrays import Int64s, Mask, Names
from ucm_core.store.census import Census, RowPlace
from ucm_core.store.journal import Place
from ucm_core.store.reach import Cover, View, unreachable
from ucm_core.store.root import CacheRoot

PARTS = 16
"""A choice takes at least one in so many of what is left, so that few choices come to the end of it."""
_FIRST = 1 << 62  # later than any time: what goes first counts as older by that much
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_log = quiet_logger("ucm_core.store.removal")


def eldest(used: Int64s, sizes: Int64s, *, excess_bytes: int) -> Int64s:
    """Numbers of those with the smallest ``used``, in that order, that have ``excess_bytes`` together.

    Or some more, or all. Partitions, and sorts only what it chose.

    >>> eldest(np.array([30, 10, 20]), np.array([5, 5, 5]), excess_bytes=6).tolist()
    [1, 2]
    """
    count = min(len(used), max(1, len(used) // PARTS))
    while True:
        chosen = np.argpartition(used, count - 1)[:count]
        if count == len(used) or sizes[chosen].sum() >= excess_bytes:
            ordered: Int64s = chosen[np.argsort(used[chosen], kind="stable")]
            return ordered
        count = min(len(used), 2 * count)


class Removal:
    """Removes families of a census, unless somebody uses them. Not thread-safe.

    A family is looked at once more before it goes: what was used since the census stays, and so does a state
    whose block is there again.
    """

    def __init__(self, root: CacheRoot, census: Census, view: View, *, slice_s: float) -> None:
        self._root, self._census, self._view, self._slice_s = root, census, view, slice_s
        self._families = census.families()
        self._left = np.arange(len(self._families.sizes))
        self._covers: Sequence[Cover] = ()
        self._lost: Mask = np.zeros(len(self._left), dtype=np.bool_)
        self._residents, self._in_use = view.residents(), frozenset[bytes]()
        self.objects: Counter[str] = Counter()
        """Files removed so far, by reason."""
        self.freed_bytes = 0

    def expired(self, time_ns: int) -> Iterator[None]:
        """Remove what nobody used since, a slice at a time."""
        old = self._families.used_ns < time_ns
        self._left = np.flatnonzero(~old)
        yield from self._work_off(np.flatnonzero(old), lambda: _FIRST, reason="expired")

    def eldest(self, excess_bytes: Callable[[], int]) -> Iterator[None]:
        """Remove what is of least use, a slice at a time, while there are ``excess_bytes``."""
        self._covers = self._view.covers()
        self._lost = unreachable(self._census, self._covers, residents=self._view.residents())
        order = self._families.used_ns - np.where(self._lost, _FIRST, 0)
        while self._left.size and (excess := excess_bytes()) > 0:
            chosen = eldest(order[self._left], self._families.sizes[self._left], excess_bytes=excess)
            yield from self._work_off(self._left[chosen], excess_bytes, reason="capacity")
            self._left = np.delete(self._left, chosen)

    def _work_off(self, chosen: Int64s, excess_bytes: Callable[[], int], *, reason: str) -> Iterator[None]:
        waiting = deque(chosen.tolist())
        while waiting and (excess := excess_bytes()) > 0:
            self._residents = self._view.residents()
            self._in_use = self._residents.in_use()
            self._remove_some(waiting, excess, reason=reason)
            yield

    def _remove_some(self, waiting: deque[int], excess_bytes: int, *, reason: str) -> None:
        """One slice; what it removed comes off the counter also when it does not come to its end."""
        deadline = time.monotonic() + self._slice_s
        begin, before = self._root.usage.begin_removal(), self.freed_bytes
        try:
            while waiting and self.freed_bytes - before < excess_bytes:
                self._remove_family(waiting.popleft(), reason)
                if time.monotonic() >= deadline:
                    break
        finally:
            self._root.usage.end_removal(begin, removed_bytes=self.freed_bytes - before)

    def _remove_family(self, number: int, reason: str) -> None:
        """Remove all files of a family, or none."""
        name = self._families.names[number].tobytes()
        place = self._census.place_of(number)
        if name in self._in_use or (self._lost[number] and self._is_covered(place, name)):
            return
        with _opened(self._root.path, place, name) as folder:
            files = _files_of(folder, name)
            used_ns = max((self._census.used_ns(status) for status in files.values()), default=0)
            if used_ns > self._families.used_ns[number]:
                return
            gone = [file for file in files if _unlink(folder, file)]
        self.objects[reason] += len(gone)
        self.freed_bytes += sum(files[file].st_size for file in gone)
        metrics.OBJECTS_DROPPED.labels(reason=reason).inc(len(gone))
        self._note_gone(place, name, gone)

    def _note_gone(self, place: RowPlace, name: bytes, files: list[str]) -> None:
        journal = self._root.journal
        for file in files if journal.listening else ():
            path = self._root.path.joinpath(*place, names.folder_of(name), file)
            segment = file.partition(".")[2]
            key = np.frombuffer(name, dtype=np.uint8)[None]
            journal.tell_absent(Place(*place, segment), key, exist=partial(_there, path))

    def _is_covered(self, place: RowPlace, name: bytes) -> bool:
        """Whether all blocks that a state needs are there by now."""
        needed = [(cover.blocks, cover.block_of(name)) for cover in self._covers if cover.states == place]
        return all(self._is_there(*block) for block in needed)

    def _is_there(self, place: RowPlace, name: bytes) -> bool:
        with _opened(self._root.path, place, name) as folder:
            return bool(_files_of(folder, name)) or self._residents.hold(name)


@contextmanager
def _opened(root: Path, place: RowPlace, name: bytes) -> Iterator[int | None]:
    """The folder of an object, links below the root not followed; None where that cannot be opened."""
    with ExitStack() as opened:
        try:
            descriptor = _open(root, opened)
            for part in (*place, names.folder_of(name)):
                descriptor = _open(part, opened, below=descriptor)
        except OSError as error:
            _pass_over(error)
            yield None
        else:
            yield descriptor


def _open(path: Path | str, opened: ExitStack, *, below: int | None = None) -> int:
    flags = _DIRECTORY | (0 if below is None else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=below)
    opened.callback(os.close, descriptor)
    return descriptor


def _files_of(folder: int | None, name: bytes) -> dict[str, os.stat_result]:
    """The files of one family in its folder; whatever else bears such a name is not ours."""
    if folder is None:
        return {}
    digits = name.hex()
    try:
        with os.scandir(folder) as entries:
            alike = [entry for entry in entries if entry.name.startswith(digits)]
            found = {entry.name: entry.stat(follow_symlinks=False) for entry in alike}
    except OSError as error:
        _pass_over(error)
        return {}
    return {
        file: status
        for file, status in found.items()
        if names.parse_object(file) and stat.S_ISREG(status.st_mode)
    }


def _unlink(folder: int | None, file: str) -> bool:
    try:
        os.unlink(file, dir_fd=folder)
    except OSError as error:
        _pass_over(error)
        return False
    return True


def _pass_over(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        metrics.ERRORS.labels(where="collector").inc()
        _log.warning("cannot remove an object, it stays: %s", error)


def _there(path: Path, names: Names) -> Mask:
    return np.full(len(names), os.path.lexists(path))
