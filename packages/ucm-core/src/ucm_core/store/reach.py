"""Which states can still be resumed from, as far as names tell.

A state at a position is of use only together with the blocks before it. The last of these, which ends at that
position, is named by the same prefix digest, and names are digests XOR the seed of their row: so the one name
is the other XOR a mask that both rows fix (`Cover`). No file has to be read for that, and none to be written.

Of rows whose seeds nobody here knows, those of other models for example, all states count as reachable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ucm_core.spec.keys import NAME_BYTES
from ucm_core.store.arrays import Mask, Names
from ucm_core.store.census import Census, RowPlace
from ucm_core.store.ledger import NO_RESIDENTS, Residents

GRACE_NS = 60 * 10**9
"""A state that was used within this time counts as reachable: its block may still be on its way."""


@dataclass(frozen=True, slots=True)
class Cover:
    """Every state of one row needs a block of another: the one whose name is its own XOR ``mask``."""

    states: RowPlace
    blocks: RowPlace
    mask: bytes
    """`mask` of the two rows."""

    def block_of(self, state: bytes) -> bytes:
        """Name of the block that the state named ``state`` needs, both of 16 bytes."""
        return mask(state, self.mask)


def mask(seed: bytes, other: bytes) -> bytes:
    """The first 16 bytes of two rows' seeds, XORed: what their names of the same prefix differ by."""
    return bytes(one ^ two for one, two in zip(seed[:NAME_BYTES], other[:NAME_BYTES], strict=True))


class View(Protocol):
    """What this process knows about the objects beyond their files."""

    def residents(self) -> Residents:
        """What the rings hold that this process has open."""

    def covers(self) -> Sequence[Cover]:
        """What the states of this process's rows need."""


class _Nothing:
    """Knows nothing."""

    def residents(self) -> Residents:
        """None."""
        return NO_RESIDENTS

    def covers(self) -> Sequence[Cover]:
        """None."""
        return ()


NOTHING: View = _Nothing()


def unreachable(census: Census, covers: Sequence[Cover], *, residents: Residents) -> Mask:
    """Which families of a census are states without a block that they need, ``bool[families]``.

    None where the census is not complete. Compares the first 8 bytes of names, which errs on the safe side.
    """
    families = census.families()
    words, resident = _words(families.names), _words(residents.names)
    lost = np.zeros(len(words), dtype=np.bool_)
    for cover in covers if census.complete else ():
        states, blocks = census.span_of(cover.states), census.span_of(cover.blocks)
        needed = words[states] ^ np.frombuffer(cover.mask[:8], dtype=np.uint64)
        lost[states] |= ~np.isin(needed, np.concatenate([words[blocks], resident]))
    lost &= families.used_ns < census.began_ns - GRACE_NS
    return lost


def _words(names: Names) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(names[:, :8]).view(np.uint64).reshape(-1)
