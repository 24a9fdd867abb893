"""What one call has begun: tickets that are over when it returns, because the memory is SGLang's again then.

SGLang stops its storage threads before a flush and a detach, and gives them ten seconds. So a call waits no
longer than `CALL_WAIT_S` for a medium, however that hangs; what has not come by then has failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import numpy as np

from ucm_core.coordinator.presence import Mask
from ucm_core.flow.ticket import Codes, ResultCode, Ticket
from ucm_core.ops import border, metrics
from ucm_core.spec.keys import Keys

__all__ = ["CALL_WAIT_S", "Move"]

CALL_WAIT_S = 8.0
"""How long one call waits for a medium."""


class Move:
    """The rows of one load or save of pages; a context manager, for one thread.

    When it is left, nothing is copied from or to SGLang's memory any more, whatever happened in between.
    """

    def __init__(self, operation: str, *, wait_s: float = CALL_WAIT_S) -> None:
        self._operation = operation
        self._deadline_s = time.monotonic() + wait_s
        self._rows: dict[str, tuple[Keys, Ticket]] = {}

    def begin(self, row: str, keys: Keys, *, ticket: Ticket) -> None:
        """Note what began: object ``i`` of the ticket is page ``i`` of the call."""
        self._rows[row] = keys, ticket

    def wait(self) -> None:
        """Wait for the results, a bounded time."""
        for _, ticket in self._rows.values():
            ticket.wait(self._left_s)

    def kept(self) -> Mask:
        """Which pages are where the call promised, with all rows, ``bool[n]``."""
        return _all_ok(ticket.object_results for _, ticket in self._rows.values())

    def on_medium(self) -> Mask:
        """Which pages are on the medium, with all rows, ``bool[n]``; waits for it, a bounded time."""
        for _, ticket in self._rows.values():
            ticket.wait_durable(self._left_s)
        return _all_ok(ticket.durable_results for _, ticket in self._rows.values())

    def failed(self) -> Iterator[tuple[str, Keys]]:
        """Per row the keys that are not where they belong."""
        for row, (keys, ticket) in self._rows.items():
            bad = ticket.object_results != ResultCode.OK
            if bad.any():
                yield row, keys[bad]

    def stored(self) -> Iterator[tuple[str, Keys]]:
        """Per row the keys whose bytes this save brought."""
        for row, (keys, ticket) in self._rows.items():
            yield row, keys[ticket.stored]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        late = {row: ticket for row, (_, ticket) in self._rows.items() if not ticket.done}
        for ticket in late.values():
            ticket.abandon()
        for ticket in late.values():
            ticket.wait()  # for what is being copied, not for a medium
        if late and kind is None:
            metrics.ERRORS.labels(where="page_wait").inc()
            border.complaints.say(
                f"{self._operation}_wait",
                f"a {self._operation} of rows {', '.join(late)} took too long: what is missing has failed",
            )

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())


def _all_ok(codes: Iterator[Codes]) -> Mask:
    whole: Mask = np.logical_and.reduce([each == ResultCode.OK for each in codes])
    return whole
