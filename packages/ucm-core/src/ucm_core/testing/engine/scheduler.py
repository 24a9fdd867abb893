"""The scheduler of the reference engine: admits, plans a step, and takes its results; it touches no bytes.

The order of one step::

    plan        a chunk of a prompt, or one token and its drafts, of each running request; what to save
    admit       the cache's verdict says where a request resumes; it gets pages, and joins the next step
    (ranks)     `ucm_core.testing.engine.rank`
    commit      tokens are accepted and pages left behind; or, where a load failed, a request starts again

Three rules keep wrong bytes out of the cache. What is saved ends with the tokens that were known when the
step was planned, so a draft is never named. A step that waits for loads of a request saves nothing of it:
whether they came is known when *all* ranks have ended, and what one rank computes from another's garbage
looks right there; the step after it saves that. And pages are free when no copy needs them, never earlier.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from random import Random

from ucm_core.coordinator.coordinator import Coordinator
from ucm_core.coordinator.coverage import joint_step
from ucm_core.testing.engine.keeping import Keeper
from ucm_core.testing.engine.request import Phase, Request
from ucm_core.testing.engine.tables import BlockTables, Pages
from ucm_core.testing.engine.work import Copy, Step, Work

__all__ = ["Counts", "Feed", "Scheduler"]

Failures = Mapping[Hashable, Mapping[str, Collection[int]]]
"""By request and row what did not load: blocks, and positions of snapshot rows."""


@dataclass(frozen=True, slots=True)
class Feed:
    """How much a step computes, and how well drafts are guessed."""

    batch: int = 4
    """Requests at a time."""
    chunk_tokens: int = 64
    """Tokens of a prompt in one step."""
    drafts: int = 0
    """Tokens guessed in each step after the prompt; 0 = no speculative decoding."""
    drafts_right: float = 0.6
    """The probability that a guess is right."""


@dataclass(slots=True)
class Counts:
    """What happened so far; counts only grow."""

    finished: int = 0
    """Requests that have all their tokens."""
    aborted: int = 0
    """Requests that nobody wanted any more."""
    preempted: int = 0
    """Times that a request lost its pages and started again."""
    rewound: int = 0
    """Times that a request started again because something did not load."""
    resumed_tokens: int = 0
    """Tokens that were loaded instead of computed."""
    drafts: int = 0
    """Tokens that were guessed."""
    rejected: int = 0
    """Guesses that were wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """One request in the step under way."""

    request: Request
    work: Work
    drafts: list[int]
    saving: bool
    """Whether the step saves what it completes."""

    @property
    def known(self) -> int:
        """End of the tokens that are not drafts."""
        return self.work.end - len(self.drafts)


class Scheduler:
    """Decides who computes what. For one thread."""

    def __init__(
        self, coordinator: Coordinator, tables: BlockTables, feed: Feed, *, luck: Random | None = None
    ) -> None:
        self.coordinator = coordinator
        """Gives the verdicts."""
        self.tables = tables
        """Who has which page."""
        self.feed = feed
        """How much a step computes."""
        self.counts = Counts()
        """What happened."""
        self.waiting: deque[Request] = deque()
        """Requests without pages."""
        self.running: list[Request] = []
        """Requests that have pages; the last one is preempted first."""
        self.leaving: list[Request] = []
        """Finished requests whose last blocks the next step saves."""
        self.given_up: list[Hashable] = []
        """Admissions that lost their pages: their copies are to be cancelled before the next step."""
        self.freed: list[tuple[Hashable, Pages]] = []
        """Pages that are free once no copy of that admission needs them."""
        self._luck = luck or Random(0)
        self._keeper = Keeper(coordinator, tables)
        self._uses = itertools.count(1)
        self._loading: set[Hashable] = set()
        self._planned: list[_Planned] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.running or self.leaving)

    # -- admit

    def admit(self) -> list[Copy]:
        """Give pages to waiting requests while there are some; what to load for them."""
        loads = []
        while self.waiting and len(self.running) < self.feed.batch:
            request = self.waiting[0]
            verdict = self.coordinator.verdict(request.chain, request_tokens=len(request.tokens))
            if self.tables.table.follower_rows:  # they do not vote, and are asked before anything is loaded
                verdict = self.coordinator.clamp(request.chain, verdict)
            at = verdict.hit.resume_tokens
            if not self.tables.resume(request, at):
                break
            self.running.append(self.waiting.popleft())
            rows = (*self.tables.table.chain_rows, *self.tables.table.follower_rows)
            request.begin(next(self._uses), verdict, {row.name: at // row.block_tokens for row in rows})
            if at:
                self.counts.resumed_tokens += at
                self._loading.add(request.key)
                loads.append(self._keeper.load(request, verdict))
        return loads

    # -- plan

    def plan(self) -> Step:
        """The next step; requests are preempted where pages are short."""
        for request in list(self.running):
            if request in self.running:  # not preempted by one before it
                self._plan(request)
        saves = [self._keeper.save(request, request.computed, states={}) for request in self.leaving]
        saves += [
            self._keeper.save(planned.request, planned.known, states=planned.work.states_to)
            for planned in self._planned
            if planned.saving
        ]
        return Step(
            [planned.work for planned in self._planned],
            loads=[planned.request.key for planned in self._planned if not planned.saving],
            saves=[save for save in saves if save is not None],
        )

    def _plan(self, request: Request) -> None:
        drafts = self._drafts(request)
        end = self._end(request) + len(drafts)
        while (states := self.tables.grow(request, end, states=1 + len(drafts))) is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return
        work = Work(
            request.key,
            request.computed,
            end,
            digests=request.with_drafts(drafts),
            pages=self.tables.of_rows(request),
            states_from=dict(request.state_pages),
            states_to=states,
        )
        self._planned.append(_Planned(request, work, drafts, request.key not in self._loading))

    def _drafts(self, request: Request) -> list[int]:
        prefilled = len(request.tokens) > request.prompt_tokens
        if not self.feed.drafts or not prefilled or request.computed < len(request.tokens) - 1:
            return []
        return request.draft(self.feed.drafts, luck=self._luck, right=self.feed.drafts_right)

    def _end(self, request: Request) -> int:
        """Where this step's known tokens end; with states a boundary that the same prompt can use."""
        end = min(request.computed + self.feed.chunk_tokens, len(request.tokens))
        if not self.tables.table.snapshot_rows:
            return end
        step = joint_step(self.tables.table)
        boundary = min(end, len(request.tokens) - 1) // step * step
        return boundary if boundary > request.computed else end

    # -- commit

    def commit(self, failed: Failures) -> None:
        """Take the results of the planned step; a request of ``failed`` starts again."""
        for request in self.leaving:
            self.freed.append((request.key, self.tables.all_of(request)))
        self.leaving = []
        for planned in self._planned:
            key = planned.request.key
            self._loading.discard(key)
            if key in failed:
                self.freed.append((key, dict(planned.work.states_to)))
                self._rewind(planned.request, failed[key])
            else:
                self._advance(planned)
        self._planned = []

    def _advance(self, planned: _Planned) -> None:
        request, accepted = planned.request, 0
        if planned.known == len(request.tokens):
            accepted = request.accept(planned.drafts)
        self.counts.drafts += len(planned.drafts)
        self.counts.rejected += len(planned.drafts) - accepted
        request.computed = planned.known + accepted
        request.phase = Phase.RUNNING
        left = self.tables.leave_behind(request)
        self.freed += [(request.key, left), (request.key, self.tables.turn(request, planned.work, accepted))]
        self._keeper.owe(request)
        if request.done:
            request.phase = Phase.FINISHED
            self.counts.finished += 1
            self.running.remove(request)
            self.leaving.append(request)

    def _rewind(self, request: Request, failed: Mapping[str, Collection[int]]) -> None:
        if request.verdict is not None:
            self.coordinator.rewind(request.chain, request.verdict, failed=failed)
        self.counts.rewound += 1
        self._give_up(request)
        self.waiting.appendleft(request)

    # -- pages

    def preempt(self, request: Request) -> None:
        """Take all pages of a running request; it starts again when there are enough."""
        self.counts.preempted += 1
        self._give_up(request)
        self.waiting.appendleft(request)

    def abort(self, request: Request) -> None:
        """Nobody wants ``request`` any more, whatever its stage; one that has ended stays. Between steps."""
        if request.phase in {Phase.FINISHED, Phase.ABORTED}:
            return
        if request in self.running:
            self._give_up(request)
        else:
            self.waiting.remove(request)
        request.phase = Phase.ABORTED
        self.counts.aborted += 1

    def _give_up(self, request: Request) -> None:
        self.running.remove(request)
        self._loading.discard(request.key)
        self.given_up.append(request.key)
        self.freed.append((request.key, self.tables.all_of(request)))
        request.restart()
