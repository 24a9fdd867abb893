"""The error tree of UCM.

::

    UcmError
    ├── ConfigError      (also ValueError)    a setting is unknown, missing or out of range
    ├── SpecError        (also ValueError)    a spec table, row, part, unit or position makes no sense
    ├── IdentityError    (also ValueError)    an identity is incomplete, ambiguous, or two halves disagree
    ├── LayoutError      (also ValueError)    an engine's tensor cannot be read in exactly one way
    └── StoreError       (also RuntimeError)  a store cannot do what was asked
        ├── NoSpace                           no slot or no disk space, after a bounded search
        └── ClosedError                       the object was closed

A miss is a value, never an error. Every message says what is wrong, gives both numbers where there are two,
and names the remedy where there is one.
"""

from __future__ import annotations

import reprlib

__all__ = [
    "ClosedError",
    "ConfigError",
    "IdentityError",
    "LayoutError",
    "NoSpace",
    "SpecError",
    "StoreError",
    "UcmError",
]


class UcmError(Exception):
    """Base of every error that UCM raises on purpose."""


class ConfigError(UcmError, ValueError):
    """A setting is unknown, missing or out of range; the message names the field."""


class SpecError(UcmError, ValueError):
    """A spec table, row, part, unit or position makes no sense; the message names the row and the numbers."""


class IdentityError(UcmError, ValueError):
    """An identity is incomplete or ambiguous, or two halves of an engine do not agree on it."""


class LayoutError(UcmError, ValueError):
    """An engine's tensor cannot be read in exactly one way; the message holds its shape."""


class StoreError(UcmError, RuntimeError):
    """A store cannot do what was asked; never raised for a miss."""


class NoSpace(StoreError):
    """No slot or no disk space was found in a bounded search."""


class ClosedError(StoreError):
    """The object was closed before this call."""


def shown(value: object) -> str:
    """Return ``value`` for a message: its ``repr``, cut short where a hostile one would have no end."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python spells no int of more than 4,300 digits
        return f"<{type(value).__name__} with a number of too many digits>"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 200, 200
