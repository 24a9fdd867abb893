"""How a figure is taken: ours and a peer in turns, in one run, so that only their ratio counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """What one round took."""

    wall_s: float
    processor_s: float
    """Of all threads of the process that did the work: what others do to the machine counts less."""


Round = Callable[[], Cost]


@dataclass(frozen=True, slots=True)
class Measure:
    """What is read off a round, and how it is written."""

    unit: str
    of: Callable[[Cost], float]
    at_least: bool = False
    """More is better: the limit is the least ratio that is good enough."""


WALL = Measure("ms", lambda cost: cost.wall_s * 1e3)
PROCESSOR = Measure("ms of processor", lambda cost: cost.processor_s * 1e3)


def processor_per_gb(size_bytes: int) -> Measure:
    """Processor seconds for 1e9 bytes, of rounds that move ``size_bytes``."""
    return Measure("processor s/GB", lambda cost: cost.processor_s * 1e9 / size_bytes)


def rate(size_bytes: int) -> Measure:
    """1e9 bytes a second, of rounds that move ``size_bytes``."""
    return Measure("GB/s", lambda cost: size_bytes / cost.wall_s / 1e9, at_least=True)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the closing table."""

    name: str
    ours: float
    peer: str
    """What ours is held against: another way to do the same, or what is allowed."""
    theirs: float
    ratio: float
    """Ours over peer, the median of the rounds."""
    limit: float | None
    """The largest ratio that is good enough, or the least; None = told for comparison only."""
    measure: Measure = WALL

    @property
    def reached(self) -> bool:
        """Whether the figure keeps its limit."""
        if self.limit is None:
            return True
        return self.ratio >= self.limit if self.measure.at_least else self.ratio <= self.limit

    def line(self) -> str:
        """The figure as a row of the table."""
        values = f"{self.ours:10.4g} {self.theirs:10.4g} {self.measure.unit:<15}"
        sign = ">=" if self.measure.at_least else "<="
        limit = "          " if self.limit is None else f"{sign} {self.limit:5.2f}x"
        verdict = "" if self.limit is None else "ok" if self.reached else "MISSED"
        return f"{self.name:<52} {values} {self.ratio:6.2f}x {limit} {verdict:<6} ({self.peer})"


def timed(
    call: Callable[[], object], *, clock: Callable[[], float] = time.process_time, rest: float = 0.0
) -> Round:
    """A round that makes this call; ``clock`` reads the processor time, ``rest`` seconds pass before."""

    def round_() -> Cost:
        if rest:
            time.sleep(rest)
        wall_s, processor_s = time.perf_counter(), clock()
        call()
        return Cost(time.perf_counter() - wall_s, clock() - processor_s)

    return round_


def in_turns(rounds: Mapping[str, Round], times: int = 9) -> dict[str, list[Cost]]:
    """Run all rounds in turns, ``times`` often, one unmeasured turn first."""
    for round_ in rounds.values():
        round_()
    costs: dict[str, list[Cost]] = {name: [] for name in rounds}
    for _ in range(times):
        for name, round_ in rounds.items():
            costs[name].append(round_())
    return costs


def compare(
    name: str,
    ours: Sequence[Cost],
    theirs: Sequence[Cost],
    *,
    peer: str,
    limit: float | None,
    measure: Measure,
) -> Figure:
    """Hold costs of the same turns against each other."""
    pairs = [(measure.of(own), measure.of(other)) for own, other in zip(ours, theirs, strict=True)]
    own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Figure(name, own, peer, other, statistics.median(a / b for a, b in pairs), limit, measure)


def side_by_side(
    name: str,
    ours: Callable[[], object],
    *,
    peer: str,
    peer_call: Callable[[], object],
    limit: float,
    rounds: int = 9,
) -> Figure:
    """Run two calls in turns; the ratio of their wall times."""
    costs = in_turns({"ours": timed(ours), "theirs": timed(peer_call)}, rounds)
    return compare(name, costs["ours"], costs["theirs"], peer=peer, limit=limit, measure=WALL)


def allowed(name: str, value: float, most: float, *, unit: str) -> Figure:
    """Hold a value against the most that is allowed; where that is nothing, the ratio is 0 or infinity."""
    ratio = value / most if most else float("inf") if value else 0.0
    return Figure(name, value, "what is allowed", most, ratio, 1.0, Measure(unit, lambda _: value))


def within(
    name: str,
    ours: Callable[[], object],
    *,
    limit_s: float,
    rounds: int = 9,
    measure: Measure = WALL,
) -> Figure:
    """Run ours alone against a time; the median over rounds. Processor time is that of this thread."""
    costs = in_turns({"ours": timed(ours, clock=time.thread_time)}, rounds)["ours"]
    most = measure.of(Cost(limit_s, limit_s))
    return allowed(name, statistics.median(map(measure.of, costs)), most, unit=measure.unit)


def best_of(costs: Sequence[tuple[str, list[Cost]]]) -> tuple[str, list[Cost]]:
    """The fastest of several, by the median of its wall times."""
    return min(costs, key=lambda named: statistics.median(cost.wall_s for cost in named[1]))
