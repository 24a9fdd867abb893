"""What became of the objects that were on their way when a store was closed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CloseReport:
    """The end of one row's store."""

    row: str
    """The row's name."""
    kept: int = 0
    """Objects that reached the medium while it was closing."""
    lost: int = 0
    """Objects that did not: refused by the medium, or not written within the time-out."""
    unfinished: int = 0
    """Pieces of work that still ran when the time was over; memory and files that they use stay open."""
