"""Doubles in simulated time: a world with a clock, media whose transfers take given times, handles on them.

Nothing here sleeps or has threads: whoever waits lets the world's events happen, in order, until what it
waits for is there. So every figure of a schedule is exact.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence

from ucm_core.flow.handles import ComputeEvent
from ucm_core.flow.pipeline import LayerPipeline, StepLoad, StepReport, StepSave
from ucm_core.flow.ticket import ResultCode, Ticket


class World:
    """A clock, and what happens when; times in ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), what))

    def let_pass(self, time: float) -> None:
        """What an engine does while it computes."""
        self.run_until(lambda: False, self.now + time)

    def run_until(self, condition: Callable[[], bool], end: float) -> bool:
        """Let events happen until ``condition`` or ``end``; whether the condition holds."""
        while not condition():
            if not self._events or self._events[0][0] > end:
                if end == float("inf"):
                    raise AssertionError("nothing happens any more, and who waits would wait for ever")
                self.now = max(self.now, end)
                return condition()
            self.now, _, what = heapq.heappop(self._events)
            what()
        return True


class TicketDouble(Ticket):
    """A ticket whose waiting lets simulated time pass."""

    def __init__(self, world: World, objects: int, shards: int) -> None:
        super().__init__(objects, shards, durable=False)
        self._world = world

    def wait(self, timeout_s: float | None = None, *, shard: int | None = None) -> bool:
        end = float("inf") if timeout_s is None else self._world.now + max(0.0, timeout_s)
        return self._world.run_until(lambda: super(TicketDouble, self).wait(0, shard=shard), end)


class MediumDouble:
    """Brings one thing at a time per lane, the most urgent first; what has begun ends."""

    def __init__(self, world: World, lanes: int = 1) -> None:
        self._world = world
        self._idle = lanes
        self._queue: list[tuple[int, int, float, Callable[[], bool], Callable[[], object]]] = []
        self._order = itertools.count()

    def bring(
        self,
        urgency: int,
        time: float,
        *,
        begin: Callable[[], bool] = lambda: True,
        done: Callable[[], object],
    ) -> None:
        """``begin()`` says whether it is still wanted when its turn comes."""
        heapq.heappush(self._queue, (urgency, next(self._order), time, begin, done))
        self._begin()

    def _begin(self) -> None:
        while self._idle and self._queue:
            _, _, time, begin, done = heapq.heappop(self._queue)
            if not begin():
                continue
            self._idle -= 1
            self._world.at(self._world.now + time, lambda done=done: self._end(done))  # type: ignore[misc]

    def _end(self, done: Callable[[], object]) -> None:
        self._idle += 1
        done()
        self._begin()


class EventDouble:
    """An engine's stream that reaches the point at a given time."""

    def __init__(self, world: World, when: float) -> None:
        self.when = when
        self._world = world

    def wait(self, timeout_s: float | None = None) -> bool:
        end = float("inf") if timeout_s is None else self._world.now + timeout_s
        return self._world.run_until(lambda: self._world.now >= self.when, min(end, self.when))


class LoadDouble:
    """A `UnitLoad` whose shard ``k`` takes ``times[k]`` on a medium; None waits for its turn for ever.

    ``bad[k]`` are objects that fail there. ``asked`` records (time, shard) of what was submitted first,
    ``calls`` the shards of each call.
    """

    def __init__(
        self,
        medium: MediumDouble,
        world: World,
        *,
        times: Sequence[float | None],
        objects: int = 1,
        bad: Mapping[int, Sequence[int]] | None = None,
        together: int = 1,
        small: bool = False,
    ) -> None:
        self.together, self.small = together, small
        self._medium, self._world, self._times = medium, world, times
        self._bad = bad or {}
        self._ticket = TicketDouble(world, objects, len(times))
        self._open = set(range(len(times)))
        self.asked: list[tuple[float, int]] = []
        self.calls: list[list[int]] = []
        self.calls_here = 0
        self.landed: dict[int, float] = {}

    @property
    def ticket(self) -> Ticket:
        return self._ticket

    def submit(self, shards: slice, *, urgency: int = 0, here: bool = False) -> None:
        assert self.small or not here
        self.calls_here += here
        self.calls.append(list(range(len(self._times))[shards]))
        for shard in self.calls[-1]:
            if shard in {known for _, known in self.asked}:
                continue
            self.asked.append((self._world.now, shard))
            time = self._times[shard]
            if time is not None:
                self._medium.bring(
                    urgency,
                    time,
                    begin=lambda shard=shard: self._begin(shard),  # type: ignore[misc]
                    done=lambda shard=shard: self._land(shard),  # type: ignore[misc]
                )

    def cancel(self) -> None:
        """What has begun lands nevertheless."""
        for shard in self._open:
            self._settle(shard, ResultCode.CANCELLED)
        self._open = set()

    def _begin(self, shard: int) -> bool:
        wanted = shard in self._open
        self._open.discard(shard)
        return wanted

    def _land(self, shard: int) -> None:
        self.landed[shard] = self._world.now
        one = slice(shard, shard + 1)
        self._ticket.settle(self._bad.get(shard, []), ResultCode.MISS, shards=one)
        self._settle(shard, ResultCode.OK)

    def _settle(self, shard: int, code: ResultCode) -> None:
        self._ticket.settle(range(len(self._ticket.results)), code, shards=slice(shard, shard + 1))


class SaveDouble:
    """A `UnitSave` of one object whose gathers end ``time`` after they read; ``memory[k]`` is shard ``k``."""

    def __init__(self, medium: MediumDouble, world: World, *, memory: list[int], time: float = 0.0) -> None:
        self._medium, self._world, self._time = medium, world, time
        self._memory = memory
        self._ticket = TicketDouble(world, 1, 1)
        self._waiting = 0
        self._sealed = False
        self.gathered: dict[int, int] = {}
        self.published: list[int] | None = None
        self.ended: float | None = None
        self.submitted: list[int] = []

    @property
    def ticket(self) -> Ticket:
        return self._ticket

    def submit(self, shards: slice, *, ready: ComputeEvent | None = None) -> None:
        assert not self._sealed, "a sealed save was given more"
        begin = ready.when if isinstance(ready, EventDouble) else self._world.now
        for shard in range(len(self._memory))[shards]:
            self.submitted.append(shard)
            self._waiting += 1
            if begin > self._world.now:
                self._world.at(begin, lambda shard=shard: self._gather(shard))  # type: ignore[misc]
            else:
                self._gather(shard)

    def seal(self) -> None:
        self._sealed = True
        self._publish()

    def abandon(self) -> None:
        self._ticket.settle_rest(ResultCode.CANCELLED)

    def _gather(self, shard: int) -> None:
        """Read as early as a store may."""
        self.gathered[shard] = self._memory[shard]
        self._medium.bring(0, self._time, done=self._end_gather)

    def _end_gather(self) -> None:
        self._waiting -= 1
        self._publish()

    def _publish(self) -> None:
        if self._sealed and not self._waiting and not self._ticket.done:
            whole = len(self.gathered) == len(self._memory)
            self.published = [self.gathered[k] for k in range(len(self._memory))] if whole else None
            self.ended = self._world.now
            self._ticket.settle([0], ResultCode.OK if whole else ResultCode.CANCELLED)


def run_step(
    world: World,
    pipeline: LayerPipeline,
    *,
    layers: Sequence[int],
    loads: Sequence[StepLoad] = (),
    saves: Sequence[StepSave] = (),
    compute: float = 10.0,
) -> StepReport:
    """One step of an engine that computes all requests layer by layer."""
    pipeline.begin_step(loads, saves)
    for layer in layers:
        pipeline.before_layer(layer)
        world.let_pass(compute)
        pipeline.after_layer(layer)
    return pipeline.end_step()
