"""Which finished requests' blocks vLLM must keep, because saves may still read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.completions import Completions
from ucm_vllm.metadata import SaveEnd, SavePlan, job_name

PATIENCE_S = 30.0
"""How long vLLM is told to wait for blocks instead of preempting: a medium may hang for ever."""


class BlockHolds:
    """As the scheduler half sees it, a save lasts from its plan until every worker has said that it is over.

    The workers know better, but later: so where this says that blocks must be kept, they are told to say when
    (`StepPlan.promised`), and they do so once for every promise, also when everything was over long ago.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.workers = 1
        """How many workers carry out each save."""
        self._saves = Completions()
        self._promised: list[Attempt] = []
        self._waiting: dict[str, float] = {}  # since when

    @property
    def waiting(self) -> bool:
        """Whether vLLM will get blocks back without doing anything for it, as far as one may hope."""
        earliest_s = self._clock() - PATIENCE_S
        return any(since_s > earliest_s for since_s in self._waiting.values())

    def planned(self, saves: Iterable[SavePlan]) -> None:
        """These saves go down with a plan; those without a job read nothing after their step."""
        for save in saves:
            for worker in range(self.workers if save.job else 0):
                self._saves.submit(save.attempt, job_name(save.job, worker))

    def over(self, ends: Iterable[SaveEnd]) -> None:
        """Workers said that saves read no more."""
        for attempt, job in ends:
            self._saves.end(attempt, job)
        self._saves.poll()  # of promises that the workers keep

    def finish(self, attempt: Attempt) -> bool:
        """The use of a request has ended; whether its blocks must be kept until the workers say otherwise."""
        self._saves.promise(attempt)
        if attempt in self._saves.poll():
            return False
        self._promised.append(attempt)
        self._waiting[attempt.request_id] = self._clock()
        return True

    def take_promised(self) -> tuple[Attempt, ...]:
        """What was promised since the last call."""
        promised, self._promised = tuple(self._promised), []
        return promised

    def released(self, request_ids: Iterable[str]) -> None:
        """VLLM has the blocks of these requests back."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def check_integrity(self) -> None:
        """SpecError when the books do not balance."""
        self._saves.check_integrity()
