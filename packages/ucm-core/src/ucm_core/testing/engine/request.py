"""One request in the reference engine: its tokens, how far it has come, and the pages that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random

import numpy as np

from ucm_core.coordinator.coordinator import Verdict
from ucm_core.spec.keys import PrefixChain
from ucm_core.testing.engine.model import Digests, PrefixModel

__all__ = ["Phase", "Request"]


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """It holds nothing."""
    READY = "ready"
    """It holds pages; loads for it may be under way."""
    RUNNING = "running"
    """At least one step has computed it."""
    FINISHED = "finished"
    """All its tokens are there."""
    ABORTED = "aborted"
    """Nobody wants it any more."""


@dataclass(slots=True, eq=False)
class Request:
    """What the scheduler knows of a request. Not frozen: it lives."""

    name: str
    """What people call it."""
    tokens: list[int]
    """Prompt and output so far: known, and none of them a rejected draft."""
    prompt_tokens: int
    """How many of them were asked."""
    output_tokens: int
    """How many are to be made."""
    chain: PrefixChain
    """Over `tokens`."""
    model: PrefixModel
    """Says what follows."""
    phase: Phase = Phase.WAITING
    """Where it is."""
    computed: int = 0
    """Tokens whose bytes are in the engine's memory, ``[0, computed)``."""
    resumed: int = 0
    """Tokens that were loaded instead of computed."""
    use: int = 0
    """Which admission of any request this is: engines use names again, also of requests that still run."""
    verdict: Verdict | None = None
    """What is loaded for it."""
    tables: dict[str, list[int]] = field(default_factory=dict)
    """Per chain row the page of each page-long stretch of tokens; 0 = not kept."""
    state_pages: dict[str, int] = field(default_factory=dict)
    """Per snapshot row the page of the state at `computed`."""
    saved: dict[str, int] = field(default_factory=dict)
    """Per chain row and follower the block up to which everything was given to the cache."""
    kept_state: int = 0
    """The deepest position whose states were given to the cache."""
    due_state: int = 0
    """`computed`, where its states are to be given to the cache by the next step; 0 = they are not."""
    _digests: Digests = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    @property
    def key(self) -> tuple[str, int]:
        """Names this admission of the request in the pipeline."""
        return self.name, self.use

    @property
    def done(self) -> bool:
        """Whether all output is there."""
        return len(self.tokens) >= self.prompt_tokens + self.output_tokens

    @property
    def digests(self) -> Digests:
        """The digest at each of `tokens`."""
        if (have := len(self._digests)) < len(self.tokens):
            after = int(self._digests[-1]) if have else None
            more = self.model.digests(self.tokens[have:], after=after)
            self._digests = np.concatenate([self._digests, more])
        return self._digests

    def with_drafts(self, drafts: Sequence[int]) -> Digests:
        """The digest at each of `tokens` and then of ``drafts``."""
        known = self.digests
        return np.concatenate([known, self.model.digests(drafts, after=int(known[-1]))]) if drafts else known

    def draft(self, count: int, *, luck: Random, right: float) -> list[int]:
        """Guess the next ``count`` tokens; each is right with the probability ``right``."""
        drafts: list[int] = []
        for _ in range(count):
            true = self.model.next_token(int(self.with_drafts(drafts)[-1]))
            drafts.append(true if luck.random() < right else (true + 1) % self.model.vocabulary)
        return drafts

    def accept(self, drafts: Sequence[int]) -> int:
        """Append the leading drafts that are right and the token after them; how many drafts were right."""
        accepted = 0
        while not self.done:
            token = self.model.next_token(int(self.digests[-1]))
            self.tokens.append(token)
            self.chain.extend([token])
            if accepted == len(drafts) or drafts[accepted] != token:
                break
            accepted += 1
        return accepted

    def begin(self, use: int, verdict: Verdict, saved: dict[str, int]) -> None:
        """Resume where ``verdict`` says; ``saved``: by row the block up to which the cache has all."""
        self.use = use
        self.phase = Phase.READY
        self.verdict = verdict
        self.computed = self.resumed = self.kept_state = verdict.hit.resume_tokens
        self.saved = saved

    def restart(self) -> None:
        """Forget all pages: they are somebody else's from now on."""
        self.phase = Phase.WAITING
        self.computed = self.resumed = self.kept_state = self.due_state = 0
        self.verdict = None
        self.tables, self.state_pages, self.saved = {}, {}, {}
