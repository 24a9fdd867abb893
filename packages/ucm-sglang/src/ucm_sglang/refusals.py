"""Refusing what does not fit, a line per reason."""

from __future__ import annotations

from ucm_core.errors import UcmError


def refuse(wrong: object, error: UcmError) -> None:
    """Raise ``error`` if ``wrong`` is true."""
    if wrong:
        raise error
