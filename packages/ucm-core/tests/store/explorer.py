"""Runs every interleaving of a few programs over a small world, with a death at every step.

A program is a generator that yields requests to the world, one per atomic step, and gets answers: it reads
like the code that it stands for. What it will do next follows from where it stands and from its variables,
so a line that yields must not hold a half-computed value, and variables hold hashable values. This makes
positions comparable, and the state of everything a handful of small numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

Request = tuple[Any, ...]
Program = Generator[Request, Any, None]

DONE, DEAD = 0, 1
_BITS = 16  # of the number of a position
_MASK = (1 << _BITS) - 1


class Violation(Exception):
    """Something that must never be so, is so."""


class World(Protocol):
    """What the programs share; immutable."""

    def apply(self, me: int, request: Request) -> Iterable[tuple[Any, Any]]:
        """Every (world afterwards, answer); none while the request has to wait. Raises Violation."""

    def crash(self, me: int) -> Any:
        """The world after participant ``me`` has died."""

    def check(self) -> None:
        """Raise Violation unless all is well."""


class Position(NamedTuple):
    """Where a participant stands."""

    me: int
    answers: tuple[Any, ...]
    """All it ever got, on one way to get here: enough to come here again."""
    request: Request


def where(program: Program) -> Hashable:
    """Lines and variables of a suspended program and of those that it calls."""
    frames, inner = [], program
    while inner is not None:
        frame = inner.gi_frame
        frames.append((frame.f_code, frame.f_lasti, tuple(frame.f_locals.items())))
        inner = inner.gi_yieldfrom
    return tuple(frames)


@dataclass(frozen=True, slots=True)
class Report:
    """What an exploration has seen."""

    states: int
    steps: int
    """Without deaths."""
    worlds: int


class Explorer:
    """All that can happen to ``programs`` (one per participant) in ``world``.

    ``quiet`` names requests that nobody else can notice, not even after a death: they go together with the
    step before them. ``settle`` looks at the world after everybody is done or dead, and raises Violation.
    """

    def __init__(
        self,
        world: World,
        programs: Sequence[Callable[[], Program]],
        *,
        quiet: frozenset[str] = frozenset(),
        settle: Callable[[Any], None] = lambda world: None,
    ) -> None:
        self._programs, self._quiet, self._settle = programs, quiet, settle
        self._worlds: list[Any] = []
        self._world_numbers: dict[Any, int] = {}
        self._positions: list[Position] = [Position(-1, (), ("done",)), Position(-1, (), ("dead",))]
        self._position_numbers: dict[Hashable, int] = {}
        self._moved: dict[tuple[int, Any], int] = {}
        self._shifts = [me * _BITS for me in range(len(programs))]
        self._world_shift = len(programs) * _BITS
        self._steps: dict[int, tuple[int, ...]] = {}
        self._deaths: dict[int, int] = {}
        self._first = self._intern(world) << self._world_shift
        self._first |= sum(self._start(me) << shift for me, shift in enumerate(self._shifts))

    def run(self) -> Report:
        """Look at every state. Raises Violation, with a shortest way there told."""
        parents, ways = {self._first: -1}, dict[int, list[int]]()
        level = [self._first]
        while level:
            following: list[int] = []
            for state in level:
                try:
                    ways[state] = self._after(state)
                except Violation as violation:
                    raise Violation(f"{violation}\n{self._story(parents, state)}") from None
                for new in (*ways[state], *self._dying(state)):
                    if new not in parents:
                        parents[new] = state
                        following.append(new)
            level = following
        self._check_progress(parents, ways)
        return Report(len(parents), sum(map(len, ways.values())), len(self._worlds))

    def _check_progress(self, parents: dict[int, int], ways: dict[int, list[int]]) -> None:
        """From every state there is a way, without a further death, to an end at which all is well."""
        well = {state for state, after in ways.items() if not after}
        left = [state for state in reversed(ways) if state not in well]
        while left:
            still = []
            for state in left:
                if well.isdisjoint(ways[state]):
                    still.append(state)
                else:
                    well.add(state)
            if len(still) == len(left):
                raise Violation(f"there is no way on\n{self._story(parents, still[-1])}")
            left = still

    def _after(self, state: int) -> list[int]:
        """The states one step after. None: all have ended, and that is well."""
        world, after = state >> self._world_shift, []
        for shift in self._shifts:
            position = state >> shift & _MASK
            if position > DEAD:
                key = world << _BITS | position
                changes = self._steps.get(key)
                if changes is None:
                    changes = self._steps[key] = tuple(self._changes(world, position))
                after += [state + change for change in changes]
        if not after:
            if any(state >> shift & _MASK > DEAD for shift in self._shifts):
                raise Violation("nobody can go on")
            self._settle(self._worlds[world])
        return after

    def _dying(self, state: int) -> list[int]:
        """The states after one death."""
        world, after = state >> self._world_shift, []
        for me, shift in enumerate(self._shifts):
            position = state >> shift & _MASK
            if position > DEAD:
                key = world << 4 | me
                if key not in self._deaths:
                    self._deaths[key] = self._intern(self._worlds[world].crash(me))
                after.append(state + self._change(world, self._deaths[key], shift, DEAD - position))
        return after

    def _change(self, old: int, new: int, shift: int, position: int) -> int:
        """What to add to a state whose world and one position change."""
        return (new - old << self._world_shift) + (position << shift)

    def _changes(self, world: int, position: int) -> Iterable[int]:
        shift = self._shifts[self._positions[position].me]
        for new, reached in self._outcomes(world, position):
            yield self._change(world, new, shift, reached - position)

    def _outcomes(self, world: int, position: int) -> Iterable[tuple[int, int]]:
        """Every (world, position) after one step, and after the quiet ones behind it."""
        me, _, request = self._positions[position]
        for after, answer in self._worlds[world].apply(me, request):
            reached = self._move(position, answer)
            if self._positions[reached].request[0] in self._quiet:
                yield from self._outcomes(self._intern(after), reached)
            else:
                yield self._intern(after), reached

    def _intern(self, world: Any) -> int:
        number = self._world_numbers.setdefault(world, len(self._worlds))
        if number == len(self._worlds):
            world.check()
            self._worlds.append(world)
        return number

    def _start(self, me: int) -> int:
        program = self._programs[me]()
        request = next(program)
        assert request[0] not in self._quiet, "a program begins with a step that others notice"
        return self._place(Position(me, (), request), program)

    def _move(self, position: int, answer: Any) -> int:
        """The position after ``answer``: the program runs again from its start, on the same answers."""
        key = (position, answer)
        if key not in self._moved:
            me, answers, _ = self._positions[position]
            program = self._programs[me]()
            next(program)
            for one in answers:
                program.send(one)
            try:
                self._moved[key] = self._place(
                    Position(me, (*answers, answer), program.send(answer)), program
                )
            except StopIteration:
                self._moved[key] = DONE
        return self._moved[key]

    def _place(self, position: Position, program: Program) -> int:
        key = (position.me, where(program))
        number = self._position_numbers.setdefault(key, len(self._positions))
        if number == len(self._positions):
            self._positions.append(position)
        return number

    def _story(self, parents: dict[int, int], state: int) -> str:
        """Who did what on the way to ``state``, and what each would do next."""
        way = [state]
        while (state := parents[state]) >= 0:
            way.append(state)
        way.reverse()
        lines = [self._told(before, after) for before, after in pairwise(way)]
        nexts = [self._positions[way[-1] >> shift & _MASK].request for shift in self._shifts]
        lines += [f"{me} would {request}" for me, request in enumerate(nexts)]
        return "\n".join([*lines, str(self._worlds[way[-1] >> self._world_shift])])

    def _told(self, before: int, after: int) -> str:
        for me, shift in enumerate(self._shifts):
            old, new = before >> shift & _MASK, after >> shift & _MASK
            if old != new:
                return f"{me} dies" if new == DEAD else f"{me} {self._positions[old].request}"
        return "?"
