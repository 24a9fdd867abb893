"""The arrays that stores pass around, named by what they hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
"""Ids, places, addresses or sizes."""
Mask = npt.NDArray[np.bool_]
"""Which of some things."""
Slots = npt.NDArray[np.int32]
"""Slots of a ring; -1 = none."""
Versions = npt.NDArray[np.uint32]
"""Which stay of a slot."""
Names = npt.NDArray[np.uint8]
"""``uint8[n, 16]``: the part of keys that is in the names of files."""
