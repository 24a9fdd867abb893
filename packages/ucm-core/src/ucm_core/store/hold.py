"""References to slots of a ring that are given back at the latest when nobody has them any more.

A native call notes in a `Hold` what it took before it returns. So nothing is lost when a signal's handler
raises between any two steps of the caller.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ucm_core import _native
from ucm_core.store.arrays import Int64s


class Hold:
    """The references of one claim; places are indices into it. To be used by one thread at a time."""

    def __init__(self, ring: _native.Ring, now_s: Callable[[], int]) -> None:
        self._ring, self._now_s = ring, now_s
        self.native = _native.Hold(ring)
        """For the calls that take references."""

    def publish(self, places: Int64s) -> None:
        """Those that are ours to fill are full: let everybody read them."""
        self.native.publish(_places(places))

    def abort(self, places: Int64s) -> None:
        """Give these back now, unfilled where they are not full."""
        self.native.abort(_places(places), self._now_s())

    def part(self, places: Int64s) -> Hold:
        """These, which are its own from now on."""
        part = Hold(self._ring, self._now_s)
        self.native.move_to(part.native, _places(places))
        return part

    def let_go(self) -> None:
        """Give all back, unfilled where they are not full; nothing twice, and nothing to a closed ring."""
        self.native.let_go(self._now_s())


class NoHold:
    """`Hold` of a ring without a slot: there is never anything to give back."""

    native = None
    """Nothing can be noted."""

    def publish(self, places: Int64s) -> None:
        """Nothing is ours."""

    def abort(self, places: Int64s) -> None:
        """Nothing is held."""

    def part(self, places: Int64s) -> NoHold:  # noqa: ARG002
        """As little."""
        return self

    def let_go(self) -> None:
        """Nothing is held."""


def _places(places: Int64s) -> Int64s:
    return np.ascontiguousarray(places, dtype=np.int64)
