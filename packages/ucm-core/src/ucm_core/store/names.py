"""Names in the cache directory: what a file or folder may be called, and what a found name means.

::

    <root>/<namespace: 32 hex>/manifest.json
                              /.left                            of a past generation
                              /<row slug>/<3 hex>/<32 hex>.<segment>              an object
                                                 /.<writer: 32 hex>.<n>.tmp       a write under way
    <root>/.writers/<writer: 32 hex>    .generations/<64 hex>    .digests/<32 hex>.json
    <root>/.usage    .collector
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ucm_core.spec.keys import NAME_BYTES

FAN_OUT_DIGITS = 3
"""Leading hex digits of an object's name that choose its folder."""
MANIFEST = "manifest.json"
LEFT = ".left"
"""In a namespace's directory: it is of a past generation."""

_PLAIN = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,63}")
_SEGMENT = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_FOLDER = re.compile(rf"[0-9a-f]{{{FAN_OUT_DIGITS}}}")
_TEMPORARY = re.compile(r"\.([0-9a-f]{32})\.[0-9a-z-]{1,40}\.tmp")
_OBJECT = re.compile(r"([0-9a-f]{32})\.([a-z0-9][a-z0-9.-]{0,63})")


def slug(name: str) -> str:
    """Return a file name for ``name``: bounded, never a path, different for different names in any case.

    Plain names stay as they are; all others get a digest behind "~", which plain names cannot hold.

    >>> slug("window-128")
    'window-128'
    >>> slug("org/a")[:8], slug("org/a") == slug("org-a")
    ('org-a~f2', False)
    """
    if _PLAIN.fullmatch(name) and name != MANIFEST:
        return name
    readable = re.sub(r"[^a-z0-9_-]+", "-", name.lower())[:40]
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{readable}~{digest}"


def is_segment(name: str) -> bool:
    """Whether ``name`` can stand behind the key in an object's name."""
    return _SEGMENT.fullmatch(name) is not None


def is_namespace(name: str) -> bool:
    """Whether ``name`` is that of a namespace's directory."""
    return _NAMESPACE.fullmatch(name) is not None


def object_names(keys: npt.NDArray[np.uint8], segment: str) -> list[bytes]:
    """Return "<folder>/<file>" below the row's directory for each key of ``uint8[n, 32]``."""
    suffix = f".{segment}"
    digits = keys[:, :NAME_BYTES].tobytes().hex()
    width = 2 * NAME_BYTES
    cut = (digits[begin : begin + width] for begin in range(0, len(digits), width))
    return [f"{name[:FAN_OUT_DIGITS]}/{name}{suffix}".encode() for name in cut]


def parse_object(name: str) -> tuple[str, str] | None:
    """Return (key digits, segment) of an object's file name; None for any other file."""
    found = _OBJECT.fullmatch(name)
    return (found[1], found[2]) if found else None


def folder_of(name: bytes) -> str:
    """Return the folder of the object named ``name`` (16 bytes)."""
    return name.hex()[:FAN_OUT_DIGITS]


def parse_temporary(name: str) -> str | None:
    """Return the writer's name from that of a temporary; None for any other file, foreign ones included."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None


def entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield everything in ``directory``; nothing when it is gone."""
    try:
        with os.scandir(directory) as found:
            yield from found
    except FileNotFoundError:
        return


def subdirectories(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the directories in ``directory``, links not followed; none when it is gone."""
    return (entry for entry in entries(directory) if entry.is_dir(follow_symlinks=False))


def row_directories(root: Path) -> Iterator[Path]:
    """Yield every row's directory under ``root``."""
    for namespace in subdirectories(root):
        if is_namespace(namespace.name):
            yield from (Path(row.path) for row in subdirectories(Path(namespace.path)))


def folders_of_row(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the folders in which a row's objects lie, links not followed."""
    return (folder for folder in subdirectories(directory) if _FOLDER.fullmatch(folder.name))


def files_of_row(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield every regular file in the folders of one row: objects, temporaries and foreign ones."""
    for folder in folders_of_row(directory):
        yield from _regular_files(Path(folder.path))


def files_of_root(root: Path) -> Iterator[os.DirEntry[str]]:
    """Yield every regular file that UCM may have put anywhere under ``root``, locks and counters excluded."""
    yield from _regular_files(root)
    for namespace in subdirectories(root):
        if is_namespace(namespace.name):
            yield from _regular_files(Path(namespace.path))
    for row in row_directories(root):
        yield from files_of_row(row)


def _regular_files(directory: Path) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in entries(directory) if entry.is_file(follow_symlinks=False))
