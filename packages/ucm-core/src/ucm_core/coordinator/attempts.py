"""Attempts: what ledgers are kept by, because engines use a request's id again."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Attempt"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One use of a request's id.

    >>> Attempt("r7", 1) == Attempt("r7", 2)
    False
    """

    request_id: str
    """The engine's name for the request."""
    use: int = 0
    """Which use of that id; whoever hands out ids counts them."""

    def __str__(self) -> str:
        return f"{self.request_id}#{self.use}"
