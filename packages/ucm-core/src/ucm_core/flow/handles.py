"""What the layer pipeline asks of a store: loads and saves whose shards come and go one unit at a time.

A shard is one unit of a row in one object: ``shards`` count from 0 over the units that the store's objects
hold. The stores make these handles; the pipeline decides in which order they are asked.
"""

from __future__ import annotations

from typing import Protocol

from ucm_core.flow.ticket import Ticket

__all__ = ["ComputeEvent", "UnitLoad", "UnitSave"]


class ComputeEvent(Protocol):
    """A point in an engine's stream of work: what was enqueued before it has run once it is done."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is reached; False when it was not within ``timeout_s``."""
        ...


class UnitLoad(Protocol):
    """Objects on their way to an engine, shard by shard."""

    @property
    def ticket(self) -> Ticket:
        """Codes of each shard of each object; shards that were never submitted are settled by `cancel`."""
        ...

    @property
    def together(self) -> int:
        """How many neighbouring shards at most are better submitted by one call; 1 where a medium is read."""
        ...

    @property
    def small(self) -> bool:
        """Whether all of it is a copy of few milliseconds, for which no medium is read."""
        ...

    def submit(self, shards: slice, *, urgency: int = 0, here: bool = False) -> None:
        """Bring these shards of every object to the target; returns at once.

        With ``here`` a load that is `small` is copied on this thread before this returns: to hand it to
        another would cost as much.

        Of what waits for a thread, the smallest ``urgency`` is brought first, across all loads of the store.
        A shard that was submitted before is not brought again.
        """
        ...

    def cancel(self) -> None:
        """What nobody copies to the target now is ``CANCELLED`` at once, also while a medium is read for it.

        The target is free when the ticket is done.
        """
        ...


class UnitSave(Protocol):
    """Objects on their way from an engine, shard by shard; nobody sees an object before all came."""

    @property
    def ticket(self) -> Ticket:
        """Codes of each object: ``OK`` once every process here can read it. Done: the source is free."""
        ...

    def submit(self, shards: slice, *, ready: ComputeEvent | None = None) -> None:
        """Gather these shards of every object once ``ready`` is reached; returns at once.

        Submitted again before `seal`, a shard is gathered again, and the last bytes win.
        """
        ...

    def seal(self) -> None:
        """No more shards come. Objects that have all are published; the others are given up and counted."""
        ...

    def abandon(self) -> None:
        """Give up what is not published, for example because the engine takes its memory back.

        What nobody reads from the source now is ``CANCELLED`` at once, also while a medium does not answer.
        """
        ...
