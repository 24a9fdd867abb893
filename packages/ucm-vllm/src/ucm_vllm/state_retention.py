"""Which of the states that vLLM offers are kept: the policy of each row, and what it has to remember.

vLLM decides which positions exist. By default it offers the last boundary of each prompt and where prompts of
its own part ways, and all of it is kept; with ``prefix_cache_retention_interval`` it offers more, and the
settings say how much of that is worth its bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ucm_core.coordinator.coverage import joint_step
from ucm_core.coordinator.density import DensityBudget, DensityStatistics
from ucm_core.coordinator.lookups import Clock
from ucm_core.coordinator.retention import Progress, RetentionPolicy, keep
from ucm_core.coordinator.sightings import Sightings, SightingsStatistics
from ucm_core.spec.keys import Keys, PrefixChain
from ucm_core.spec.table import SpecRow
from ucm_vllm.block_tables import NULL_PAGE
from ucm_vllm.spec_from_engine import EngineSpec

Offers = Mapping[int, Mapping[int, int]]
"""Position -> engine group -> engine block that holds the group's state there."""


@dataclass(frozen=True, slots=True)
class StateRetentionStatistics:
    """What the scheduler half remembers about states."""

    sightings: SightingsStatistics
    budgets: Mapping[str, DensityStatistics]
    """Per row that has a budget."""


class StateRetention:
    """The policies of all rows of states and their memory; for the scheduler's thread."""

    def __init__(
        self, spec: EngineSpec, policies: Mapping[str, RetentionPolicy], *, clock: Clock = time.monotonic
    ) -> None:
        self._spec = spec
        self._policies = policies
        self._step_tokens = joint_step(spec.table, spec.align_tokens)
        self._sightings = Sightings(step_tokens=self._step_tokens)
        self._budgets = {
            row.name: DensityBudget(budget, row.block_bytes, half_life_s=policy.half_life_s, clock=clock)
            for row in spec.table.snapshot_rows
            for policy in (policies[row.name],)
            if (budget := policy.budget_bytes) is not None
        }
        # where all that is offered is kept, second sights change nothing
        self._asks_for_sights = any(
            policies[row.name].second_sight and policies[row.name].interval(row) is not None
            for row in spec.table.snapshot_rows
        )

    def see(self, chain: PrefixChain, *, served_tokens: int) -> int:
        """Where an earlier prompt could not be served either, 0 if nowhere; once per request."""
        return self._sightings.see(chain, served_tokens=served_tokens) if self._asks_for_sights else 0

    def kept(self, row: SpecRow, offers: Offers, *, progress: Progress) -> tuple[int, ...]:
        """The positions at which all groups of ``row`` offer a state that is worth keeping."""
        by_group = [
            [at for at, pages in offers.items() if pages.get(group.index, NULL_PAGE) != NULL_PAGE]
            for group in self._spec.rows[row.name]
        ]
        policy = self._policies[row.name]
        return keep(row, by_group, progress=progress, alignment_tokens=self._step_tokens, policy=policy)

    def sight(self, row: SpecRow, keys: Keys) -> Keys:
        """Count states that are offered or served now; the keys of those for which there is no room."""
        budget = self._budgets.get(row.name)
        return keys[:0] if budget is None else budget.sight(keys)

    def forget(self, row_name: str, keys: Keys) -> None:
        """States that could not be loaded take no room any more."""
        if row_name in self._budgets:
            self._budgets[row_name].forget(keys)

    def statistics(self) -> StateRetentionStatistics:
        """A moment of the counts."""
        budgets = {name: budget.statistics() for name, budget in self._budgets.items()}
        return StateRetentionStatistics(self._sightings.statistics(), budgets)

    def check_integrity(self) -> None:
        """SpecError when a bound does not hold."""
        self._sightings.check_integrity()
        for budget in self._budgets.values():
            budget.check_integrity()
