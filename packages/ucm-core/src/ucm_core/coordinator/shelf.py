"""One row's side of the coordinator: its keys, its store's answers, its suspects and its directory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator.checkpoints import Checkpoints
from ucm_core.coordinator.coverage import Positions
from ucm_core.coordinator.lookups import RowLookup, Suspects
from ucm_core.coordinator.presence import Mask, Presence
from ucm_core.errors import SpecError
from ucm_core.spec.keys import Keys, PrefixChain
from ucm_core.spec.table import RowKind, SpecRow

__all__ = ["Shelf"]


@dataclass(frozen=True, slots=True, eq=False)
class Shelf:
    """What the coordinator knows and may ask about one cached row. Thread-safe."""

    row: SpecRow
    """The row."""
    seed: bytes
    """Its 32-byte row seed."""
    suspects: Suspects
    """Keys that failed to load."""
    lookup: RowLookup
    """Its store's lookup, made safe."""
    checkpoints: Checkpoints | None = None
    """The directory of its states; snapshot rows only."""

    def keys(self, chain: PrefixChain, ends: Positions) -> Keys:
        """Return the keys of the blocks or states that end at ``ends`` (tokens, multiples of the grain).

        A block is named by its last grain. SpecError when the chain has no digest for one of them.
        """
        grain = chain.grain_tokens
        known_tokens = chain.hashed_tokens
        if len(ends) and not 0 < int(ends.min()) <= int(ends.max()) <= known_tokens:
            raise SpecError(
                f"row {self.row.name!r}: blocks end at {int(ends.min())} to {int(ends.max())} tokens, the "
                f"chain has digests up to {known_tokens}"
            )
        if (ends % grain).any():
            raise SpecError(
                f"row {self.row.name!r}: {int(ends[0])} is no multiple of the grain of {grain} tokens"
            )
        return chain.keys(self.seed)[ends // grain - 1]

    def block_keys(self, chain: PrefixChain, *, begin: int, end: int) -> Keys:
        """Return the keys of the blocks ``[begin, end)``; errors as in `keys`, whose result it is, sooner."""
        step, rest = divmod(self.row.block_tokens, chain.grain_tokens)
        if rest or not 0 <= begin < end or end * self.row.block_tokens > chain.hashed_tokens:
            return self.keys(chain, self.ends(np.arange(begin, end)))
        return np.ascontiguousarray(chain.keys(self.seed)[(begin + 1) * step - 1 : end * step : step])

    def ends(self, indices: npt.ArrayLike) -> Positions:
        """Return the positions at which the blocks ``indices`` end."""
        return (np.asarray(indices, dtype=np.int64) + 1) * self.row.block_tokens

    def unit_ends(self, units: npt.ArrayLike) -> Positions:
        """Return where the units that a load names end: a snapshot row's are positions, all others blocks."""
        if self.row.kind is RowKind.SNAPSHOT:
            return np.asarray(units, dtype=np.int64)
        return self.ends(units)

    def states(self, keys: Keys, *, remembered: bool) -> Mask:
        """Return which states exist, ``bool[n]``: from memory first, or from the store alone."""
        if self.checkpoints is None:
            return self.lookup(keys)
        return self.checkpoints.held(keys) if remembered else self.checkpoints.confirm(keys)

    def presence(self, chain: PrefixChain, known_tokens: int) -> Presence:
        """Ask the store about everything up to ``known_tokens`` and return what is there."""
        step = self.row.block_tokens
        if self.row.kind is RowKind.SNAPSHOT:
            step = math.lcm(step, chain.grain_tokens)
        ends = np.arange(step, known_tokens + 1, step, dtype=np.int64)
        there = self.lookup(self.keys(chain, ends))
        if self.row.kind is RowKind.SNAPSHOT:
            return Presence(positions=frozenset(ends[there].tolist()))
        return Presence(there)

    def failed(self, keys: Keys, *, moment: float) -> None:
        """Distrust what was not saved after ``moment``."""
        self.suspects.add(keys, moment=moment)
        if self.checkpoints is not None:
            self.checkpoints.remove(keys)

    def saved(self, keys: Keys, *, moment: int) -> None:
        """Trust ``keys`` again, and know their states."""
        self.suspects.clear(keys, moment=moment)
        if self.checkpoints is not None:
            self.checkpoints.register(keys)

    def check_integrity(self) -> None:
        """Raise SpecError when a bound does not hold."""
        self.suspects.check_integrity()
        if self.checkpoints is not None:
            self.checkpoints.check_integrity()
