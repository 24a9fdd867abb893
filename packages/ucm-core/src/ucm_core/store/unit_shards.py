"""Which shards a call of a load or save by units means."""

from __future__ import annotations

from ucm_core.errors import LayoutError
from ucm_core.store.geometry import Geometry


def shard_range(shards: slice, geometry: Geometry) -> tuple[int, int]:
    """The shards ``[begin, end)`` that ``shards`` names; LayoutError for what is no range of an object's.

    >>> shard_range(slice(1, None), Geometry(3, 8))
    (1, 3)
    """
    count = geometry.shards
    begin = 0 if shards.start is None else shards.start
    end = count if shards.stop is None else shards.stop
    if shards.step not in {None, 1} or not 0 <= begin < end <= count:
        raise LayoutError(f"{shards} is no range of the {count} shards of an object")
    return begin, end
