"""What a checkpoint directory says: its merged configuration and the digest of its weights."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ucm_core.errors import IdentityError
from ucm_core.spec.encoding import canonical_json, digest_of
from ucm_core.spec.identity import SAMPLED

__all__ = ["WeightDigester", "adapter_digest", "code_digest", "depends_on_length", "read_config"]

_DROPPED = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
_DROPPED_SUFFIX = "_token_id"
_LENGTH_DEPENDENT_ROPES = ("longrope", "su", "dynamic")
MAX_CONFIG_BYTES = 16 << 20
"""Far above any model's; a larger file is refused before it is read."""
_MAX_ENTRY_BYTES = 4096
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
"""Windows per file, and their size."""
_TICK_NS = 20_000_000
"""Longer than the file clock's step: two writes further apart have different change times."""


def read_config(directory: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return ``config.json`` with the engine's overrides merged in, without keys that change no value.

    ``overrides`` are data; mappings merge into mappings. Dropped, here and in nested ``*_config`` of
    sub-models: ``_name_or_path``, ``transformers_version``, ``torch_dtype``, ``dtype``, ``use_cache``,
    ``*_token_id``. Raises IdentityError when the file is missing, or when an override is no plain data (a
    callable): the identity is unknown then.
    """
    path = Path(directory) / "config.json"
    try:
        config = _read_json(path, MAX_CONFIG_BYTES)
    except (OSError, ValueError, RecursionError) as error:
        raise IdentityError(f"cannot read {path}: {error}; the identity is unknown") from error
    if not isinstance(config, dict):
        raise IdentityError(f"{path} holds a {type(config).__name__}, not a mapping; the identity is unknown")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise IdentityError(
            f"overrides are a {type(overrides).__name__}, not a mapping: the identity is unknown"
        )
    plain: dict[str, Any] = json.loads(canonical_json(_merged(config, overrides or {})))
    return _without_dropped(plain)


def depends_on_length(config: Mapping[str, Any]) -> bool:
    """Return whether rotary values depend on the engine's max_model_len, in any part of the model."""
    kind = config.get("rope_type", config.get("type"))
    return kind in _LENGTH_DEPENDENT_ROPES or any(
        depends_on_length(value) for value in config.values() if isinstance(value, Mapping)
    )


def adapter_digest(directory: Path) -> str:
    """Return the hex digest over a LoRA adapter's weights and configuration; IdentityError without them."""
    weights, config = Path(directory) / "adapter_model.safetensors", Path(directory) / "adapter_config.json"
    try:
        content = [_hash_file(weights).hex(), canonical_json(_read_json(config, MAX_CONFIG_BYTES))]
    except (OSError, ValueError, RecursionError) as error:
        raise IdentityError(
            f"the adapter in {directory} cannot be read: {error}; its digest is unknown"
        ) from error
    return digest_of("ucm-adapter-1", content).hex()


def code_digest(directory: Path) -> str:
    """Return the hex digest over names and bytes of the checkpoint's own code.

    That is all ``*.py`` beside its weights. IdentityError when one cannot be read.
    """
    files = sorted(path for path in Path(directory).glob("*.py") if path.is_file())
    try:
        return digest_of("ucm-code-1", [[path.name, _hash_file(path)] for path in files]).hex()
    except OSError as error:
        raise IdentityError(f"the code in {directory} cannot be read: {error}") from error


class WeightDigester:
    """Digests the weights of a checkpoint, each file at most once per machine.

    Every byte counts, unless ``sampled``: then the size and 64 evenly spread windows of 64 KiB of each file,
    which says so in the digest (``sampled:``) and shares with nobody who read all.
    Results are kept in ``cache_directory`` per file by (device, inode, size, mtime_ns, ctime_ns). One process
    computes at a time, under an open-file-description lock; the others wait and then read its results.
    Without a writable directory every call computes.
    """

    def __init__(self, cache_directory: Path, *, sampled: bool = False) -> None:
        """Remember where results are kept; nothing is created before the first call."""
        self.cache_directory = Path(cache_directory)
        self.sampled = sampled
        """Whether only samples are read."""
        self.files_hashed = 0
        """Files that this object read."""

    def digest(self, directory: Path) -> str:
        """Return 64 hex characters over names and bytes of all ``*.safetensors``, in name order.

        Before those over samples stands ``sampled:``.

        Raises IdentityError when there is none, when one cannot be read, or when one changes meanwhile.
        """
        files = sorted(Path(directory).glob("*.safetensors"), key=lambda path: path.name)
        if not files:
            raise IdentityError(f"no *.safetensors in {directory}: the weights are unknown")
        with self._lock():
            try:
                entries = [[path.name, self._file_digest(path)] for path in files]
            except OSError as error:
                raise IdentityError(f"the weights in {directory} cannot be read: {error}") from error
        if self.sampled:
            return SAMPLED + digest_of("ucm-weight-samples-1", entries).hex()
        return digest_of("ucm-weights-1", entries).hex()

    def _file_digest(self, path: Path) -> str:
        key = _file_key(path.stat())
        tag = "ucm-sampled-file-1" if self.sampled else "ucm-weight-file-1"
        kept = self.cache_directory / f"{digest_of(tag, key).hex()[:32]}.json"
        found = _read_entry(kept, key)
        if found is None:
            _let_the_clock_pass(key[-1])
            found = (_sample_file(path) if self.sampled else _hash_file(path)).hex()
            self.files_hashed += 1
            if _file_key(path.stat()) != key:
                raise IdentityError(f"{path} changed while it was read: the weights are unknown")
            _write_entry(kept, key, found)
        return found

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the directory's lock; go on without one where it cannot be had."""
        descriptor = self._open_lock()
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open_lock(self) -> int | None:
        try:
            self.cache_directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.cache_directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return None
        # struct flock: type, whence, start, length (0 = to the end), pid (0 for this kind of lock).
        request = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, request)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor


def _open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file to be read; OSError for anything else: a pipe could hold its reader for ever."""
    stream = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: PTH123, SIM115
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return stream


def _read_json(path: Path, max_bytes: int) -> Any:
    """Return what a regular file of at most ``max_bytes`` holds; OSError, ValueError or RecursionError."""
    with _open_regular(path) as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes} bytes")
    return json.loads(data.decode("utf-8"))


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(before, value)
        else:
            merged[key] = value
    return merged


def _without_dropped(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` without the dropped keys, here and in the configurations of sub-models.

    A quantisation's own ``dtype`` says what the bytes mean and stays.
    """
    kept = {k: v for k, v in config.items() if k not in _DROPPED and not k.endswith(_DROPPED_SUFFIX)}
    for key, value in kept.items():
        if key.endswith("_config") and "quant" not in key and isinstance(value, dict):
            kept[key] = _without_dropped(value)
    return kept


def _file_key(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _let_the_clock_pass(changed_ns: int) -> None:
    """Wait until a write from now on would get another change time than ``changed_ns``.

    Without this, a file that is written, digested and written again within one step of the file clock would
    keep its key with other bytes. At most one step, so a clock that runs ahead elsewhere cannot hold us.
    """
    left_ns = changed_ns + _TICK_NS - time.time_ns()
    if left_ns > 0:
        time.sleep(min(left_ns, _TICK_NS) / 1e9)


def _hash_file(path: Path) -> bytes:
    with _open_regular(path) as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).digest()


def _sample_file(path: Path) -> bytes:
    """Return the digest of the file's size and of windows spread evenly over it, both ends included."""
    sampled = hashlib.blake2b(digest_size=32)
    with _open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        sampled.update(struct.pack("<Q", size))
        last = max(0, size - _SAMPLE_BYTES)
        for number in range(_SAMPLES):
            stream.seek(last * number // (_SAMPLES - 1))
            sampled.update(stream.read(_SAMPLE_BYTES))
    return sampled.digest()


def _read_entry(path: Path, key: list[int]) -> str | None:
    """Return the digest kept for ``key``; None for a missing, torn or foreign entry."""
    try:
        entry = _read_json(path, _MAX_ENTRY_BYTES)
        digest = entry["digest"]
        valid = entry["key"] == key and len(bytes.fromhex(digest)) == 32
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return str(digest) if valid else None


def _write_entry(path: Path, key: list[int], digest: str) -> None:
    """Keep a digest under a temporary name, then rename; a directory that cannot be written keeps nothing."""
    with contextlib.suppress(OSError):
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump({"key": key, "digest": digest}, stream)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
