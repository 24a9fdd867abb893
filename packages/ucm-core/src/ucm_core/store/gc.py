"""The collector: keeps all files under a root below the capacity bound, oldest use first.

A pass begins when usage passes 95 % of the bound, or when a write was refused, and ends at 85 %. It looks at
every object under the root, of all namespaces and rows, takes whole families (all segments of one key) by the
most recent modification time of their files, and touches nothing else: no temporaries, no foreign files,
nothing that this process holds in its ring. One pass at a time per root; an open file survives its removal.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ucm_core.ops import metrics
from ucm_core.store import locks, names
from ucm_core.store.journal import Journal, Mask, Names, Place
from ucm_core.store.pool import IoPool, Priority
from ucm_core.store.tiers import log
from ucm_core.store.usage import Usage

START_FRACTION = 0.95
END_FRACTION = 0.85


@dataclass(frozen=True, slots=True)
class Collection:
    """What one pass did."""

    objects: int = 0
    """Files removed."""
    freed_bytes: int = 0


class _Family:
    """All segments of one key in one row: their paths, and when the last of them was used."""

    __slots__ = ("paths", "used_ns")

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.used_ns = 0

    def add(self, path: str, status: os.stat_result) -> None:
        self.paths.append(path)
        self.used_ns = max(self.used_ns, status.st_mtime_ns)


class Collector:
    """Removes the objects that were not used for longest, for all processes of one root.

    ``pinned`` answers the names (32 hex digits) that must stay, ``journal`` is told what went. Passes that
    nobody waits for run on ``pool``. Thread-safe; every method may be called on any thread and returns in the
    time of one pass at most.
    """

    def __init__(
        self,
        root: Path,
        usage: Usage,
        pool: IoPool,
        *,
        pinned: Callable[[], frozenset[str]] = frozenset,
        journal: Journal | None = None,
    ) -> None:
        self._root, self._usage, self._pool, self._pinned = root, usage, pool, pinned
        self._journal = journal or Journal()
        self._turn = threading.Lock()
        self._queued = threading.Lock()
        self._background = (Priority.BACKGROUND, self._collect_queued)

    def make_room(self) -> bool:
        """Make a pass because a write was refused. True when it is worth a second try.

        False while another process makes a pass, and when nothing may be removed.
        """
        with self._turn:
            try:
                removed = self._excess_bytes() > 0 and self._collect_alone().objects > 0
                return removed or self._excess_bytes() <= 0
            except OSError as error:
                log.warning("cannot make room in %s: %s", self._root, error)
                return False

    def note_written(self) -> None:
        """Queue a pass when one is due and none is queued. Never raises."""
        try:
            due = self._is_due()
        except OSError:
            return  # the root is going away; the writes themselves will say so
        if due and self._queued.acquire(blocking=False) and not self._pool.submit(*self._background):
            self._queued.release()

    def collect(self) -> Collection:
        """Make a pass if one is due; does nothing while another process makes one."""
        with self._turn:
            return self._collect_alone() if self._is_due() else Collection()

    def _is_due(self) -> bool:
        return self._usage.used_bytes > START_FRACTION * self._usage.capacity_bytes

    def _excess_bytes(self) -> int:
        return self._usage.used_bytes - int(END_FRACTION * self._usage.capacity_bytes)

    def _collect_queued(self) -> None:
        self._queued.release()
        self.collect()

    def _collect_alone(self) -> Collection:
        """Count anew, because nothing may be removed for bytes that are not there, then remove the excess."""
        descriptor = locks.open_lock_file(self._root / ".collector", create=True)
        try:
            if not locks.try_lock(descriptor):
                return Collection()
            self._usage.recount()
            excess_bytes = self._excess_bytes()
            return self._remove_oldest(excess_bytes) if excess_bytes > 0 else Collection()
        finally:
            locks.let_go(descriptor)

    def _remove_oldest(self, excess_bytes: int) -> Collection:
        objects = freed_bytes = 0
        pinned = self._pinned()
        for name, family in self._oldest_first():
            if freed_bytes >= excess_bytes:
                break
            if name not in pinned:
                removed = [size for path in family.paths if (size := _remove(path)) is not None]
                self._usage.give_back(sum(removed))
                self._note_gone(family.paths)
                objects += len(removed)
                freed_bytes += sum(removed)
        metrics.OBJECTS_DROPPED.labels(reason="capacity").inc(objects)
        log.info("removed %d objects, %d bytes, to stay below the capacity bound", objects, freed_bytes)
        return Collection(objects, freed_bytes)

    def _note_gone(self, paths: list[str]) -> None:
        for path in paths if self._journal.listening else ():
            namespace, row, _, file = Path(path).parts[-4:]
            key, _, segment = file.partition(".")
            name = np.frombuffer(bytes.fromhex(key), dtype=np.uint8)[None]
            self._journal.tell_absent(Place(namespace, row, segment), name, exist=partial(_there, path))

    def _oldest_first(self) -> Iterator[tuple[str, _Family]]:
        families = self._families()
        used_ns = np.fromiter((family.used_ns for _, _, family in families), np.int64, len(families))
        for place in np.argsort(used_ns, kind="stable"):
            _, name, family = families[place]
            yield name, family

    def _families(self) -> list[tuple[Path, str, _Family]]:
        found: dict[tuple[Path, str], _Family] = {}
        for row in names.row_directories(self._root):
            for entry in names.files_of_row(row):
                parsed = names.parse_object(entry.name)
                status = _status(entry) if parsed else None
                if parsed and status:
                    found.setdefault((row, parsed[0]), _Family()).add(entry.path, status)
        return [(row, name, family) for (row, name), family in found.items()]


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _there(path: str, names: Names) -> Mask:
    return np.full(len(names), os.path.lexists(path))


def _remove(path: str) -> int | None:
    """Remove one object; its size, or None when somebody else was first or the medium refuses."""
    try:
        size = os.stat(path, follow_symlinks=False).st_size  # noqa: PTH116 - one path at a time, by its string
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return None
    return size
