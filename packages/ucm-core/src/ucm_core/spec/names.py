"""From any name to one file-name component: injective, bounded, confined, also on a case-blind file system.

A plain name (lower-case letters, digits, ``._-``, not starting with a dot) stands for itself. Every other
name becomes ``<readable rest>~<32 hex of its BLAKE2b>``; ``~`` never occurs in a plain name, so the two kinds
cannot meet.
"""

from __future__ import annotations

import hashlib
import re

from ucm_core.errors import IdentityError

__all__ = ["MAX_COMPONENT_BYTES", "path_component"]

MAX_COMPONENT_BYTES = 128
"""Longest component made here; file systems allow 255."""

_PLAIN = re.compile(r"[a-z0-9_-](?:[a-z0-9._-]{0,94}[a-z0-9_-])?\Z")
_UNSAFE = re.compile(r"[^a-z0-9_-]+")


def path_component(name: str) -> str:
    """Return the file-name component for ``name``; an empty name is an IdentityError.

    >>> path_component("window-128")
    'window-128'
    """
    if not name:
        raise IdentityError("an empty name has no file name")
    if _PLAIN.match(name):
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{_UNSAFE.sub('-', name.lower())[:64]}~{digest}"
