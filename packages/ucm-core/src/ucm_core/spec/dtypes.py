"""Names and sizes of the element types that cached bytes may have.

The name is the meaning of the bits, not their width: ``float8_e4m3fn`` and ``int8`` are equally wide and
never interchangeable. ``auto`` is a wish, not a type, and is refused.
"""

from __future__ import annotations

import difflib

from ucm_core.errors import SpecError

__all__ = ["DTYPES", "itemsize"]

_SIZES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
}

DTYPES = tuple(_SIZES)
"""All canonical names."""


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of ``dtype``.

    Raises SpecError for ``auto`` and for every name that is not canonical.

    >>> itemsize("bfloat16")
    2
    """
    size = _SIZES.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        raise SpecError(f"dtype {dtype!r} is not a resolved type; {_remedy(dtype)}")
    return size


def _remedy(dtype: object) -> str:
    close = difflib.get_close_matches(str(dtype).removeprefix("torch."), DTYPES, n=2)
    return f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(DTYPES)}"
