"""Two canonical spellings of plain data: bytes for digests, JSON text for people and manifests.

Both are functions of the *value*: the order of mapping keys and the spelling of a number (2 or 2.0) do not
matter, the order of a list does, and no two different values share a spelling. The bytes are typed and
length-framed, so joined fields cannot run into each other.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

from ucm_core.errors import IdentityError

__all__ = ["canonical_bytes", "canonical_json", "digest_of"]

_MAX_DEPTH = 100
_MAX_BITS = 8192
"""Far more than a float needs, fewer than what Python refuses to spell."""


def canonical_json(value: object) -> str:
    """Return the canonical JSON text of plain data; IdentityError names the path of anything else.

    >>> canonical_json({"b": 2.0, "a": [1, None]})
    '{"a":[1,null],"b":2}'
    """
    return json.dumps(_plain(value, "value"), sort_keys=True, separators=(",", ":"), default=_refuse_bytes)


def canonical_bytes(value: object) -> bytes:
    """Return the typed, length-framed, key-sorted encoding of plain data (``bytes`` allowed as leaves)."""
    return _encode(_plain(value, "value"))


def digest_of(tag: str, value: object) -> bytes:
    """Return BLAKE2b-256 of ``value`` under a domain ``tag``: digests of different tags never meet."""
    return hashlib.blake2b(canonical_bytes([tag, value]), digest_size=32).digest()


def _plain(value: Any, path: str, *, depth: int = 0) -> Any:
    """Return ``value`` with integral floats as ints, tuples as lists, and every mapping key checked."""
    if value is None or isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, int):
        return _whole(int(value), path)
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(value)
    if depth >= _MAX_DEPTH:
        raise IdentityError(f"{path[:80]}... is nested deeper than {_MAX_DEPTH}: its identity is unknown")
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]", depth=depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _key(key, path): _plain(item, f"{path}.{key}", depth=depth + 1) for key, item in value.items()
        }
    raise IdentityError(f"{path} is a {type(value).__name__}, not plain data: its identity is unknown")


def _whole(value: int, path: str) -> int:
    if value.bit_length() > _MAX_BITS:
        raise IdentityError(
            f"{path} is a number of {value.bit_length()} bits, more than {_MAX_BITS}: its identity is unknown"
        )
    return value


def _refuse_bytes(value: object) -> None:
    raise IdentityError(f"{value!r} has no JSON spelling; give bytes as hexadecimal text")


def _key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise IdentityError(f"{path} has the key {key!r}; keys of an identity are strings")
    return key


def _encode(value: Any) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, list):
        return b"l" + _frame_count(value) + b"".join(map(_encode, value))
    if isinstance(value, dict):
        # Sorted by UTF-8 bytes: a defined order, independent of locale and of insertion.
        items = sorted((_encode(key), item) for key, item in value.items())
        return b"d" + _frame_count(items) + b"".join(key + _encode(item) for key, item in items)
    return _encode_leaf(value)


def _encode_leaf(value: str | bytes | float) -> bytes:
    if isinstance(value, str):
        # surrogatepass: JSON text may hold lone surrogates, and they must stay distinct.
        return _frame(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _frame(b"x", value)
    if isinstance(value, int):
        return _frame(b"i", str(value).encode())
    return _frame(b"r", struct.pack("<d", value))


def _frame(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("<Q", len(body)) + body


def _frame_count(items: list[Any]) -> bytes:
    return struct.pack("<Q", len(items))
