"""What the worker half has to tell: collected during a step, sent up with its report."""

from __future__ import annotations

from ucm_core.coordinator.attempts import Attempt
from ucm_core.spec.keys import Keys
from ucm_vllm.metadata import FailedLoad, Happened, SaveEnd, WorkerReport


class News:
    """What the next report will say; for the worker's thread."""

    def __init__(self) -> None:
        self.failed: list[FailedLoad] = []
        self.dropped: set[str] = set()
        self.ended: set[Attempt] = set()
        self.stored: list[tuple[str, Keys]] = []
        self.broken_pages: set[int] = set()
        self.saved: list[SaveEnd] = []
        self.happened: list[Happened] = []
        self._told: tuple[str | None, int, int] = (None, 0, 0)

    def take(
        self, namespace: str | None, *, failures: int, step: int, always: bool = False
    ) -> WorkerReport | None:
        """The report, or None when it would say nothing new."""
        news = self.failed or self.dropped or self.stored or self.ended or self.saved or self.happened
        if not (news or always) and self._told == (namespace, failures, step):
            return None
        report = WorkerReport(
            namespace=namespace,
            failed=tuple(self.failed),
            broken_pages=frozenset(self.broken_pages),
            dropped=frozenset(self.dropped),
            ended=tuple(self.ended),
            stored=tuple(self.stored),
            saved=tuple(self.saved),
            happened=tuple(self.happened),
            failures=failures,
            step=step,
        )
        self.__init__()  # type: ignore[misc]
        self._told = (namespace, failures, step)
        return report
