"""What the two halves of the connector tell each other: plans down with each step, reports up after it.

Everything here is plain, frozen and picklable: numbers, names and numpy arrays, no tensors and no handles. It
is the only channel between the halves besides the shared cache, so it works in one process and in two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator.attempts import Attempt
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.keys import Keys
from ucm_vllm.block_tables import NULL_PAGE, PAGE, PAYLOAD, Mask, of_payloads

Int64s = npt.NDArray[np.int64]

SaveEnd = tuple[Attempt, str]
"""A use of a request and the name of one of its saves, as `job_name` makes it."""


def job_name(job: str, worker: int) -> str:
    """The part of a save that one worker carries out."""
    return f"{job}/{worker}"


@dataclass(frozen=True, slots=True, eq=False)
class RowTransfer:
    """Objects of one row and where their bytes lie in the engine."""

    row: str
    """Name of the row."""
    keys: Keys
    """``uint8[objects, 32]``."""
    pieces: tuple[tuple[int, Int64s], ...]
    """(engine group, ``int64[pieces, 5]``) for each group that holds some of the row; see `block_tables`."""
    parents: Keys | None = None
    """``uint8[objects, 32]``: the keys of the blocks before them in the prefix, zeros where there is none.

    By them the ring keeps the head of a prefix. None: no object needs the one before it (a window, a state).
    """

    def pages(self, objects: Mask) -> set[int]:
        """Engine blocks that any of ``objects`` (``bool[objects]``) touches."""
        touched = [rows[objects[rows[:, PAYLOAD]], PAGE] for _, rows in self.pieces]
        return {int(page) for pages in touched for page in pages} - {NULL_PAGE}

    def only(self, objects: Mask) -> RowTransfer:
        """Those of ``objects`` (``bool[objects]``), in order."""
        chosen = tuple((group, of_payloads(rows, objects)) for group, rows in self.pieces)
        parents = None if self.parents is None else self.parents[objects]
        return RowTransfer(self.row, self.keys[objects], chosen, parents)


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """What one request needs before it resumes; all of it or nothing."""

    request_id: str
    rows: tuple[RowTransfer, ...]
    asynchronous: bool
    """False: before the forward of this very step. True: reported as received when it is there."""
    possible: bool = True
    """False when vLLM resumes where nothing can be served: every block is reported as failed."""
    use: int = 0
    """Which use of the request's id it belongs to; 0: of a request that is not known."""
    exposed: frozenset[int] = frozenset()
    """Engine blocks that this very step computes from the load and that others read in it: they fail with it.

    Who holds the failed block itself is found by vLLM, who holds a copy of that and one of these is not.
    """

    @property
    def attempt(self) -> Attempt:
        """What leases are kept by."""
        return Attempt(self.request_id, self.use)

    def pages(self) -> set[int]:
        """Every engine block that the load would write."""
        each = (transfer.pages(np.ones(len(transfer.keys), dtype=np.bool_)) for transfer in self.rows)
        return set().union(*each)


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Blocks and states of one request that are computed once this step has run."""

    request_id: str
    rows: tuple[RowTransfer, ...]
    use: int = 0
    """Which use of the request's id it belongs to."""
    job: str = ""
    """Its name among the saves of that use; empty where all of it is copied before the step ends."""
    failed: int = 0
    """Times that saves of this request were not carried out; then the next of equal holders writes."""

    @property
    def attempt(self) -> Attempt:
        """What completions are kept by."""
        return Attempt(self.request_id, self.use)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step, from the scheduler half to the worker half."""

    namespace: str | None
    """Where keys lead; the worker refuses another one. None: nothing is loaded or saved in this step."""
    generation: int = 0
    """Counts "weights changed"; the worker switches to it."""
    private_token: str = ""
    """Not empty while the weights exist only in this engine's memory."""
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    idle: bool = False
    """Nothing is computed in this step: the worker may wait a moment for a load instead of spinning."""
    failures_seen: int = 0
    """How many failed synchronous loads the scheduler half knew of; see `WorkerReport.failures`."""
    overwritten: frozenset[str] = frozenset()
    """Requests whose blocks this step may overwrite: no save of before may read them any more."""
    promised: tuple[Attempt, ...] = ()
    """Finished since the last plan while saves read their blocks: vLLM keeps those until it is told."""
    number: int = 0
    """Counts plans; the worker says which was the last that it carried out where ``ask`` is set."""
    broken: frozenset[int] = frozenset()
    """Engine blocks that this step reads although a failed load left garbage there: told as failed again."""
    ask: bool = False
    """The scheduler half waits to hear that this step is over; see `WorkerReport.step`."""


@dataclass(frozen=True, slots=True, eq=False)
class FailedLoad:
    """Objects that a load could not deliver; no keys where the store was not even asked."""

    request_id: str
    row: str
    keys: Keys
    """``uint8[failed, 32]``."""


@dataclass(frozen=True, slots=True)
class Happened:
    """Objects of one row that came to the medium, or are not there any more."""

    row: str
    names: tuple[bytes, ...]
    """The first 16 bytes of their keys."""
    stored: bool
    medium: str


@dataclass(frozen=True, slots=True, eq=False)
class WorkerReport:
    """One step, from the worker half to the scheduler half."""

    namespace: str | None = None
    """The namespace the worker is ready to serve; None while it is not."""
    failed: tuple[FailedLoad, ...] = ()
    broken_pages: frozenset[int] = frozenset()
    """Engine blocks that a synchronous load could not fill: garbage until they are written again."""
    dropped: frozenset[str] = frozenset()
    """Requests whose planned saves were not carried out."""
    ended: tuple[Attempt, ...] = ()
    """Uses of requests whose load has ended since the last report, well or not; once for every worker."""
    stored: tuple[tuple[str, Keys], ...] = ()
    """(row, keys) of objects that a save brought to the store since the last report."""
    happened: tuple[Happened, ...] = ()
    """What came to the medium and went since the last report; only where vLLM's KV events are enabled."""
    saved: tuple[SaveEnd, ...] = ()
    """Saves that read the engine's blocks no more, since the last report; one entry per worker."""
    step: int = 0
    """Number of the last step that is over and whose plan asked; with several workers of the slowest."""
    failures: int = 0
    """Synchronous loads that failed so far.

    A step that was planned before the scheduler half knew of them may compute on garbage: nothing of it is
    saved.
    """

    def merged(self, other: WorkerReport) -> WorkerReport:
        """Both reports as one; a namespace only where both agree on it."""
        return WorkerReport(
            namespace=self.namespace if self.namespace == other.namespace else None,
            failed=self.failed + other.failed,
            broken_pages=self.broken_pages | other.broken_pages,
            dropped=self.dropped | other.dropped,
            ended=self.ended + other.ended,
            stored=self.stored + other.stored,
            happened=self.happened + other.happened,
            saved=self.saved + other.saved,
            step=min(self.step, other.step),
            failures=max(self.failures, other.failures),
        )


@dataclass(frozen=True, slots=True)
class Handshake:
    """What the worker half knows when the engine starts: the scheduler half compares it with its own."""

    identity: ModelIdentity | None
    """None: the model cannot be identified, nothing is cached."""
    reason: str = field(default="")
    """Why it is None."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Numbers of the engine groups in which the worker's part of each row lies."""
