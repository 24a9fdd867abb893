"""What one step does: plain data from the scheduler to the ranks, and what they report."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ucm_core.spec.keys import Keys
from ucm_core.testing.engine.model import Digests

__all__ = ["Copy", "Step", "Tally", "Work", "Wrong"]


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Objects of one request to load or to save, and the pages that they come to or from."""

    request: Hashable
    """Names the request in the pipeline."""
    keys: Mapping[str, Keys]
    """Per row the objects' keys, ``uint8[n, 32]``."""
    parents: Mapping[str, Keys | None]
    """Per row the keys of the blocks before them; None where no block needs the one before it."""
    blocks: Mapping[str, Sequence[int]]
    """Per row which blocks of the request they are; of a snapshot row the one state."""
    pages: Mapping[str, Sequence[int]]
    """Per row the request's pages; of a snapshot row the page of that state."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The tokens of one request that a step computes."""

    request: Hashable
    """Names it in the pipeline."""
    begin: int
    """First token that is computed; everything before it is read."""
    end: int
    """End of the tokens that are computed, drafts included."""
    digests: Digests
    """At each token up to `end`."""
    pages: Mapping[str, Sequence[int]]
    """Per chain row and follower the request's pages."""
    states_from: Mapping[str, int]
    """Per snapshot row the page of the state at `begin`."""
    states_to: Mapping[str, Sequence[int]]
    """Per snapshot row the pages of the states at the last positions up to `end`, one each."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Everything that the ranks do in one step."""

    works: Sequence[Work]
    """Requests that are computed."""
    loads: Sequence[Hashable] = ()
    """Requests whose loads must have come by the layer that reads them."""
    saves: Sequence[Copy] = ()
    """What can be kept when the step has run."""
    skipped: frozenset[int] = frozenset()
    """Layers whose hooks the engine forgets (a replayed graph)."""
    repeated: frozenset[int] = frozenset()
    """Layers that are called a second time; what the first call wrote is rubbish (rejected drafts)."""
    spoiled: set[Hashable] = field(default_factory=set)
    """Requests of which some rank read something wrong: what any rank computes on it is rubbish."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """Bytes that were read and were not those of the model."""

    request: Hashable
    """Who read them."""
    row: str
    """In which row."""
    layer: int
    """Before which layer."""
    entries: int
    """How many entries."""


@dataclass(slots=True)
class Tally:
    """What a rank did so far; counts only grow."""

    steps: int = 0
    """Steps that ran."""
    entries_read: int = 0
    """Entries and states that were read and compared with the model."""
    wrong: list[Wrong] = field(default_factory=list)
    """Those that were not right and that nobody took."""

    def take_wrong(self) -> list[Wrong]:
        """`wrong`, which is empty afterwards."""
        taken, self.wrong = self.wrong, []
        return taken
