"""Prefixes that were seen and could not be served: the memory behind the second-sight trigger.

The first request that lacks a state leaves a sight at every boundary past the point where it was served. The
second one that comes by and lacks a state there too shows that the prefix is shared, so a state at their
deepest common boundary is worth its bytes. What a request was served up to is no sight: nothing was lacking.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ucm_core.coordinator.lookups import names_of
from ucm_core.errors import SpecError
from ucm_core.spec.keys import PrefixChain

__all__ = ["Sightings", "SightingsStatistics"]


@dataclass(frozen=True, slots=True)
class SightingsStatistics:
    """What the memory of sights holds and found."""

    boundaries: int
    """Boundaries remembered."""
    capacity: int
    """The most that are remembered."""
    prompts: int
    """Prompts seen; only grows."""
    second_sights: int
    """Prompts that had an unserved boundary in common with an earlier one; only grows."""


class Sightings:
    """Boundaries at which this process could not serve a prompt, bounded.

    Not thread-safe; one per scheduler process. It remembers digests, so other requests' salts, adapters and
    media never count as the same prefix. The oldest sights are forgotten first.
    """

    def __init__(self, *, step_tokens: int, capacity: int = 65_536) -> None:
        """Remember boundaries every ``step_tokens`` (see `joint_step`), at most ``capacity`` of them."""
        if step_tokens < 1 or capacity < 1:
            raise SpecError(f"step_tokens {step_tokens} and capacity {capacity} must be at least 1")
        self._step_tokens = step_tokens
        self._capacity = capacity
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._prompts = self._second_sights = 0

    def see(self, chain: PrefixChain, *, served_tokens: int = 0) -> int:
        """Record a prompt, once, and return the deepest boundary that an earlier one lacked too; 0 if none.

        ``served_tokens``: where this one resumes; boundaries up to there are not looked at. SpecError for a
        negative number.
        """
        if served_tokens < 0:
            raise SpecError(f"served_tokens is {served_tokens}, must be at least 0")
        names = names_of(chain.block_digests(self._step_tokens))
        lacking = range(served_tokens // self._step_tokens, len(names))
        common = next((index + 1 for index in reversed(lacking) if names[index] in self._seen), 0)
        self._remember([names[index] for index in lacking])
        self._prompts += 1
        self._second_sights += common > 0
        return common * self._step_tokens

    def statistics(self) -> SightingsStatistics:
        """Return a moment of the counts."""
        return SightingsStatistics(len(self._seen), self._capacity, self._prompts, self._second_sights)

    def check_integrity(self) -> None:
        """Raise SpecError when the bound does not hold."""
        if len(self._seen) > self._capacity:
            raise SpecError(
                f"{len(self._seen)} sights are remembered, above the capacity of {self._capacity}"
            )

    def _remember(self, names: list[bytes]) -> None:
        # Deepest first, so that the head of a prefix, which more requests share, is forgotten last.
        for name in reversed(names[: self._capacity]):
            self._seen[name] = None
            self._seen.move_to_end(name)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
