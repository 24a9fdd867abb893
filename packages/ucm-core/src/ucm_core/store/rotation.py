"""In which order the ranks of one engine read one list, so that a medium sees all of them and reads once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def rotated(count: int, rank: int, *, ranks: int) -> npt.NDArray[np.int64]:
    """``int64[count]``: every number below ``count`` once, in the order of ``rank`` out of ``ranks``.

    A rank begins with the numbers that leave its own remainder by ``ranks``, goes on with those of the next
    rank, and so round. As long as nobody is ahead by a turn no two ranks read the same number at a time, and
    what one has read the others find in the ring. One rank keeps the order. Raises ValueError unless
    ``0 <= rank < ranks``.

    >>> rotated(8, 1, ranks=4).tolist()
    [1, 5, 2, 6, 3, 7, 0, 4]
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not in [0, {ranks})")
    return np.argsort((np.arange(count) - rank) % ranks, kind="stable")
