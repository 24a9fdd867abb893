"""Files: the durable tier of one row and segment, an object per file, no index.

What exists is what load will accept: a file gets its name when all its bytes are down. What load does not
accept (short, changed, swapped) is a miss, is removed, and the next write heals it. An error that may pass
(EIO, ESTALE, EACCES) removes nothing, and neither does an object of another format version, byte order or
geometry; what failed so is no reason for the next write to do nothing: it replaces it.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.errors import StoreError
from ucm_core.flow.ticket import Codes, ResultCode
from ucm_core.ops import metrics
from ucm_core.spec.keys import NAME_BYTES, Keys
from ucm_core.store import names
from ucm_core.store.arrays import Int64s, Mask, Names
from ucm_core.store.doubts import Doubts
from ucm_core.store.geometry import Geometry
from ucm_core.store.journal import Place
from ucm_core.store.root import CacheRoot

Results = npt.NDArray[np.int32]

SLICE_NAMES = 4096
"""The most names that one step of an enumeration holds: 64 KiB."""

_log = logging.getLogger("ucm_core.store")

RETRY_PAUSES_S = (0.002, 0.02)
"""Before the second and the third attempt of a write whose error may pass; there is no fourth."""

_MISS, _CORRUPT, _FOREIGN = 1, 2, 3  # as the native side says it; anything below zero is an errno
_FULL = (-errno.ENOSPC, -errno.EDQUOT)
_PASSING = tuple(
    -number
    for number in (
        *(errno.EIO, errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ENOBUFS, errno.ENOMEM, errno.EBUSY),
        *(errno.ETIMEDOUT, errno.EREMOTEIO, errno.EMFILE, errno.ENFILE, errno.ECONNRESET),
    )
)
_KEY_AT, _ROW_AT, _HEAD_BYTES = 56, 88, 120  # of the header page: key, row digest, end of both


@dataclass(frozen=True, slots=True)
class FileStatistics:
    """Objects counted since the tier was made, by what became of them."""

    read: int
    """Read and verified."""
    written: int
    """Published by this process."""
    corrupt: int
    """Found damaged and removed."""
    failed: int
    """Not read or not written because of an error of the system."""
    foreign: int
    """Found to be of another format version, byte order or geometry, and left alone."""


class FileTier:
    """The files of one row and segment below ``directory``. Thread-safe; calls work on the calling thread.

    Keys are ``uint8[n, 32]``; an object's file is named by the first 16 bytes, its header holds all 32.
    Payload addresses are ``int64[n]``, each of `Geometry.payload_bytes` bytes that stay valid during the
    call; aligned to 4096 they go past the page cache where the file system allows it.
    """

    def __init__(
        self, directory: Path, geometry: Geometry, *, row_seed: bytes, segment: str, root: CacheRoot
    ) -> None:
        if not names.is_segment(segment):
            raise StoreError(f"segment {segment!r} is no part of a file name; need 1 to 64 of a-z 0-9 . -")
        self.keeps = True
        """Whether anything can be on this medium."""
        self.directory = directory
        """Where the row's folders are."""
        self.geometry = geometry
        """The shape of every object."""
        self.segment = segment
        """The slice of the model that the objects hold."""
        self._root, self._path = root, os.fspath(directory)
        # The segment is in the digest, so that a file under another segment's name is not taken for its own.
        self._row_digest = hashlib.blake2b(row_seed + segment.encode(), digest_size=32).digest()
        self._objects = _native.ObjectFiles(
            os.fsencode(directory),
            segment.encode(),
            self._row_digest,
            (geometry.digest, geometry.shards, geometry.stride),
            uring=root.uring,
        )
        self._foreign, self._unreadable = Doubts(), Doubts()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._told: set[tuple[str, int]] = set()
        self._place = Place(directory.parent.name, directory.name, segment)

    def exist(self, keys: Keys) -> Mask:
        """Return where a whole object bears the key's name, ``bool[n]``; one path check each."""
        found = self._exist(keys)
        if self._root.journal.listening:
            self._note_absent(keys, ~found)
        return found

    def stored(self, keys: Keys) -> Mask:
        """Return which keys need no write, ``bool[n]``: a whole object is there, and did not fail to load."""
        return self.exist(keys) & ~self._unreadable.among(keys)

    def _exist(self, keys: Keys) -> Mask:
        if not self._root.available or not len(keys):
            return np.zeros(len(keys), dtype=np.bool_)
        found = self._objects.stat(np.ascontiguousarray(keys), not_before_ns=self._not_before_ns())
        present = found.view(np.bool_)
        return present & ~self._foreign.among(keys) if self._foreign else present

    def read(self, keys: Keys, payload_addresses: Int64s, *, shards: tuple[int, int] | None = None) -> Codes:
        """Read and verify objects, ``uint8[n, shards]`` of `ResultCode`; only where all are OK is a payload.

        With ``shards`` only ``[begin, end)`` of each: their codes, and their bytes in the payloads. OK, MISS,
        CORRUPT (the damaged shards; the others of that object are a MISS, because it is removed) or
        UNAVAILABLE (an error that may pass; nothing removed).
        """
        begin, end = shards or (0, self.geometry.shards)
        if not self._root.available or not len(keys):
            return np.full((len(keys), end - begin), ResultCode.MISS, dtype=np.uint8)
        results = self._objects.read(
            np.ascontiguousarray(keys),
            np.ascontiguousarray(payload_addresses, dtype=np.int64),
            direct=self._root.direct,
            not_before_ns=self._not_before_ns(),
            shards=(begin, end),
        )
        if not np.count_nonzero(results):
            self._trust(keys)
            self._count(read=len(keys))
            return np.zeros(results.shape, dtype=np.uint8)  # OK
        self._tell_failures(keys, results)
        return _codes(results)

    def _tell_failures(self, keys: Keys, results: Results) -> None:
        """Remove, remember and count what a read found, where not all of it was good."""
        good: Mask = np.logical_not(results.any(axis=1))
        corrupt: Mask = (results == _CORRUPT).any(axis=1)
        whole = results[:, 0]  # all codes but CORRUPT are those of a whole object
        self._remove(keys[corrupt], "corrupt")
        self._note_absent(keys, (whole == _MISS) & ~corrupt)
        self._trust(keys[good])
        self._doubt(keys, foreign=whole == _FOREIGN, failed=whole < 0)
        self._count(read=int(good.sum()), corrupt=int(corrupt.sum()))
        self._tell("read", whole)

    def write(self, keys: Keys, payload_addresses: Int64s, *, sync: bool = False) -> Codes:
        """Publish objects, ``uint8[n]`` of `ResultCode`; those that are `stored` already are OK untouched.

        OK, NO_SPACE (the bound or the file system) or UNAVAILABLE. What fails in a way that may pass is tried
        again, a few times within milliseconds. A key that is twice in the batch is written once. Padding
        between shards must be zero. ``sync``: on the device before this returns.
        """
        codes = np.full(len(keys), ResultCode.UNAVAILABLE, dtype=np.uint8)
        if not self._root.available or not len(keys):
            return codes
        first, inverse = _distinct(keys)
        codes[first[self.stored(keys[first])]] = ResultCode.OK
        todo = np.sort(first[codes[first] != ResultCode.OK])
        try:
            self._root.keep_hold()
            granted = self._root.usage.reserve_objects(todo.size, self.geometry.object_bytes)
            codes[todo[granted:]] = ResultCode.NO_SPACE
            codes[todo[:granted]] = self._write_reserved(
                keys[todo[:granted]], payload_addresses[todo[:granted]], sync=sync
            )
        except OSError as error:
            failure = _failure(error)
            codes[todo] = _codes(failure)
            self._tell("write", failure)
        return codes[first][inverse]

    def touch(self, keys: Keys) -> None:
        """Mark objects as used now, for the collector; absent ones are passed over."""
        if self._root.available and len(keys):
            self._objects.touch(np.ascontiguousarray(keys))

    def drop(self, keys: Keys) -> Mask:
        """Remove objects; return where there was one, ``bool[n]``. A reader that has it open reads on."""
        if not self._root.available:
            return np.zeros(len(keys), dtype=np.bool_)
        return self._remove(keys, "request")

    def keys(self) -> Keys:
        """Return the keys of all objects here, ``uint8[n, 32]``, by reading their headers."""
        found = [key for key in map(self._key_of, self._files()) if key is not None]
        return np.frombuffer(b"".join(found), dtype=np.uint8).reshape(-1, 32)

    def names(self) -> Iterator[Names]:
        """Yield the names of all objects here, ``uint8[n, 16]`` with ``n`` at most `SLICE_NAMES`.

        From the folders alone: no file is opened. What is written or removed meanwhile may be in it or not.
        """
        listed = map(_name_of, self._files())
        try:
            while found := list(itertools.islice(listed, SLICE_NAMES)):
                yield np.frombuffer(b"".join(found), dtype=np.uint8).reshape(-1, NAME_BYTES)
        except OSError as error:
            self._tell("list", _failure(error))

    def statistics(self) -> FileStatistics:
        """Return the counts so far."""
        with self._lock:
            counts = self._counts
            return FileStatistics(*(counts[field.name] for field in fields(FileStatistics)))

    def _not_before_ns(self) -> int:
        """When an object must have been used last not to be too old; 0: it never is."""
        ttl_s = self._root.ttl_s
        return 0 if ttl_s is None else max(1, time.time_ns() - int(ttl_s * 1e9))

    def _write_reserved(self, keys: Keys, addresses: Int64s, *, sync: bool) -> Codes:
        """Write what has room reserved, and settle the reservation whatever happens."""
        size, written, there = self.geometry.object_bytes, 0, 0
        try:
            if not os.path.isdir(self._path):  # noqa: PTH112 - for every piece of work
                self.directory.mkdir(parents=True, exist_ok=True)
            results = self._write_patiently(
                np.ascontiguousarray(keys), np.ascontiguousarray(addresses, dtype=np.int64), sync=sync
            )
            written = len(keys) - int(np.count_nonzero(results))
            if written < len(keys):  # or renamed, but the folder was not synced
                there = int(self._exist(keys[results != 0]).sum())
        finally:
            self._root.usage.settle(len(keys) * size, written_bytes=(written + there) * size)
        self._count(written=written)
        done = keys if written == len(keys) else keys[results == 0]
        self._trust(done)
        if self._root.journal.listening:
            self._root.journal.tell(self._place, done, stored=True, exist=self._exist)
        if written < len(keys):
            self._root.suspect_temporaries()
            self._tell("write", results)
        return _codes(results)

    def _write_patiently(self, keys: Keys, addresses: Int64s, *, sync: bool) -> Results:
        """Write, and again what failed by an error that may pass: new files each time, never half of one."""
        results = self._write_once(keys, addresses, sync=sync)
        for pause_s in RETRY_PAUSES_S:
            again = [n for n in np.flatnonzero(results).tolist() if results[n] in _PASSING]
            if not again:
                break
            time.sleep(pause_s)
            metrics.WRITE_RETRIES.inc(len(again))
            results[again] = self._write_once(keys[again], addresses[again], sync=sync)
        return results

    def _write_once(self, keys: Keys, addresses: Int64s, *, sync: bool) -> Results:
        temporary_names = self._root.temporary_names(len(keys))
        return self._objects.write(keys, addresses, temporary_names, direct=self._root.direct, sync=sync)

    def _trust(self, keys: Keys) -> None:
        """Forget what a lookup or a write must not take for whole: it was read or written."""
        self._foreign.clear(keys)
        self._unreadable.clear(keys)

    def _doubt(self, keys: Keys, *, foreign: Mask, failed: Mask) -> None:
        """Remember what a lookup or a write must not take for whole."""
        if failed.any():
            self._unreadable.add(keys[failed])
        if foreign.any():
            self._foreign.add(keys[foreign])
            self._count(foreign=int(foreign.sum()))
            self._say_foreign()

    def _say_foreign(self) -> None:
        with self._lock:
            new = ("read", _FOREIGN) not in self._told
            self._told.add(("read", _FOREIGN))
        if new:
            _log.warning(
                "objects in %s have another format version, byte order or geometry: they count as absent, and"
                " stay until the same object is saved again",
                self.directory,
            )

    def _remove(self, keys: Keys, reason: str) -> Mask:
        """Remove what bears the names: a file or a link, and a directory only when it is empty."""
        if not len(keys):
            return np.zeros(0, dtype=np.bool_)
        begin = self._root.usage.begin_removal()
        sizes = [
            _unlink(self.directory, os.fsdecode(name)) for name in names.object_names(keys, self.segment)
        ]
        removed = np.array([size is not None for size in sizes], dtype=np.bool_)
        metrics.OBJECTS_DROPPED.labels(reason=reason).inc(int(removed.sum()))
        self._note_absent(keys, removed)
        freed = sum(size or 0 for size in sizes)
        if freed:
            try:
                self._root.usage.end_removal(begin, removed_bytes=freed)
            except OSError as error:
                self._tell("count", _failure(error))
        return removed

    def _note_absent(self, keys: Keys, absent: Mask) -> None:
        journal = self._root.journal
        if journal.listening and self._root.available and absent.any():
            journal.tell_absent(self._place, keys[absent], exist=self._exist)

    def _tell(self, operation: str, results: Results) -> None:
        """Count failures, and log each kind once."""
        failures = results[results < 0]
        if not failures.size:
            return
        self._count(failed=failures.size)
        with self._lock:
            new = {(operation, int(code)) for code in failures} - self._told
            self._told |= new
        for _, code in new:
            _log.warning("cannot %s files in %s: %s", operation, self.directory, os.strerror(-code))

    def _count(self, **counts: int) -> None:
        with self._lock:
            for what, count in counts.items():
                self._counts[what] += count

    def _files(self) -> Iterable[os.DirEntry[str]]:
        if not self._root.available:
            return
        for entry in names.files_of_row(self.directory):
            parsed = names.parse_object(entry.name)
            if parsed and parsed[1] == self.segment:
                yield entry

    def _key_of(self, entry: os.DirEntry[str]) -> bytes | None:
        """Return the key in an object's header; None when the file is not one of this tier or gone."""
        try:
            with Path(entry.path).open("rb", buffering=_HEAD_BYTES) as file:
                head = file.read(_HEAD_BYTES)
        except OSError:
            return None
        key = head[_KEY_AT:_ROW_AT]
        ours = head[_ROW_AT:_HEAD_BYTES] == self._row_digest and entry.name.startswith(key[:NAME_BYTES].hex())
        return key if ours else None


def _name_of(entry: os.DirEntry[str]) -> bytes:
    return bytes.fromhex(entry.name[: 2 * NAME_BYTES])


def _distinct(keys: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where each distinct key stands first, and for every key which of those it is."""
    packed, numbers = keys.tobytes(), dict[bytes, int]()
    each = [packed[begin : begin + 32] for begin in range(0, len(packed), 32)]
    inverse = np.array([numbers.setdefault(name, len(numbers)) for name in each], dtype=np.int64)
    if len(numbers) == len(each):
        return inverse, inverse
    return np.unique(inverse, return_index=True)[1], inverse


def _codes(results: Results) -> Codes:
    """Translate the native results."""
    if not results.any():
        return np.zeros(results.shape, dtype=np.uint8)  # OK
    codes = np.full(results.shape, ResultCode.UNAVAILABLE, dtype=np.uint8)
    codes[results == 0] = ResultCode.OK
    codes[(results == _MISS) | (results == _FOREIGN)] = ResultCode.MISS
    codes[results == _CORRUPT] = ResultCode.CORRUPT
    codes[np.isin(results, _FULL)] = ResultCode.NO_SPACE
    return codes


def _failure(error: OSError) -> npt.NDArray[np.int32]:
    """Return an error of the system as a native result."""
    return np.array([-(error.errno or errno.EIO)], dtype=np.int32)


def _unlink(directory: Path, name: str) -> int | None:
    """Remove what bears the name "<folder>/<file>" and return its bytes; None when nothing was removed.

    A link in the folder's place is not followed.
    """
    folder, _, file = name.partition("/")
    try:
        descriptor = os.open(directory / folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(file, dir_fd=descriptor)
            return 0
        os.unlink(file, dir_fd=descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return status.st_size
