"""The books of a request: where its prompt tokens came from, counted once when the request is over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ucm_core.errors import SpecError
from ucm_core.ops import metrics


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Tokens of one request, by source; ``local + hit - failed + computed = prompt``, always.

    A lookup that is repeated before anything came of it replaces ``prompt_tokens`` and ``local_tokens`` and
    adds nothing. SpecError for an account that does not balance.

    >>> account = TokenAccount(1000, local_tokens=600).promised(200).delivered(100)
    >>> account.queried_tokens, account.hit_tokens, account.failed_tokens, account.computed_tokens
    (400, 200, 100, 300)
    """

    prompt_tokens: int
    """Tokens that the request began with."""
    local_tokens: int
    """Those of them that the engine held itself."""
    hit_tokens: int = 0
    """Promised by verdicts that the engine took up, over all loads of the request."""
    failed_tokens: int = 0
    """Promised and not delivered."""

    def __post_init__(self) -> None:
        held = self.hit_tokens - self.failed_tokens
        if min(self.local_tokens, self.failed_tokens, held, self.computed_tokens) < 0:
            raise SpecError(
                f"{self} does not balance: local {self.local_tokens} + hit {self.hit_tokens}"
                f" - failed {self.failed_tokens} is not within prompt {self.prompt_tokens}"
            )

    @property
    def queried_tokens(self) -> int:
        """What the engine did not hold itself, and so asked for."""
        return self.prompt_tokens - self.local_tokens

    @property
    def computed_tokens(self) -> int:
        """What was left to compute, failed loads included."""
        return self.queried_tokens - self.hit_tokens + self.failed_tokens

    def promised(self, tokens: int) -> Self:
        """The account after a load of ``tokens`` began."""
        return replace(self, hit_tokens=self.hit_tokens + tokens)

    def delivered(self, tokens: int) -> Self:
        """The account after no more than the first ``tokens`` of what was promised last came."""
        held = self.hit_tokens - self.failed_tokens
        return replace(self, failed_tokens=self.failed_tokens + max(0, held - tokens))

    def count(self) -> None:
        """Add the account to the counters; once per request, when nothing in it changes any more."""
        metrics.REQUESTS.inc()
        metrics.PROMPT_TOKENS.inc(self.prompt_tokens)
        metrics.LOCAL_TOKENS.inc(self.local_tokens)
        metrics.QUERIED_TOKENS.inc(self.queried_tokens)
        metrics.HIT_TOKENS.inc(self.hit_tokens)
        metrics.FAILED_TOKENS.inc(self.failed_tokens)
        metrics.COMPUTED_TOKENS.inc(self.computed_tokens)
