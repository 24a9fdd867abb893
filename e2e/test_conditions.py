"""Five models in every mode and under every condition: the tokens of vLLM without UCM, and nothing stays.

`--requests` says how many requests each condition has; 30 unless told. With `--record FILE` it is written
down what was aborted, preempted, loaded and not loaded; what the file says of other cases stays.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import pytest

from e2e.conditions import (
    ANSWER_TOKENS,
    CASES,
    CONDITIONS,
    MODES,
    Played,
    block_of,
    play,
    prompts_for,
    waves_of,
)
from e2e.harness import Order, Prompt
from e2e.models import MODELS
from e2e.record import count_tests, record
from e2e.runs import Runs


class Plays:
    """Plays each case once."""

    def __init__(self, runs: Runs, requests: int) -> None:
        self._runs = runs
        self._requests = requests
        self.without = cache(self._play_without)
        self.case = cache(self._play_case)
        self.played: dict[tuple[str, str, str], Played] = {}
        """By mode, family and condition."""

    def waves(self, family: str, condition: str) -> list[tuple[Order, ...]]:
        return waves_of(self._prompts(family), condition, requests=self._requests)

    def right(self, family: str) -> Mapping[Prompt, tuple[int, ...]]:
        return self.without(family)[0]

    def _prompts(self, family: str) -> tuple[Prompt, ...]:
        return prompts_for(family, max(9, self._requests // 6))

    def _play_without(self, family: str) -> tuple[Mapping[Prompt, tuple[int, ...]], Played]:
        """Without UCM: each prompt alone and computed whole, then the mixed waves."""
        prompts = self._prompts(family)
        with self._runs.engine("without", family, None, **MODES["whole"].arguments_for(family)) as engine:
            answers = engine.generate_apart(prompts, max_tokens=ANSWER_TOKENS)
            mixed = play(engine, self.waves(family, "mixed"))
        return {prompt: answer.tokens for prompt, answer in zip(prompts, answers, strict=True)}, mixed

    def _play_case(self, mode: str, family: str) -> Mapping[str, Played]:
        """One engine goes through all conditions, on a root of its own."""
        root, settings = self._runs.empty_root(f"{mode}-{family}"), MODES[mode].settings_for(family)
        arguments = MODES[mode].arguments_for(family)
        with self._runs.engine(mode, family, root, settings=settings, **arguments) as engine:
            for condition in CONDITIONS:
                damaged = root if condition == "damaged" else None
                waves = self.waves(family, condition)
                self.played[mode, family, condition] = play(engine, waves, damaged_root=damaged)
        return {condition: self.played[mode, family, condition] for condition in CONDITIONS}


@pytest.fixture(scope="session")
def plays(runs: Runs, request: pytest.FixtureRequest) -> Iterator[Plays]:
    plays = Plays(runs, request.config.getoption("--requests"))
    yield plays
    if (file := request.config.getoption("--record")) and not request.session.testsfailed:
        record(file, plays.played, tests=count_tests(request.session.items))


family_of_case = pytest.mark.parametrize(("mode", "family"), CASES)
every_condition = pytest.mark.parametrize("condition", CONDITIONS)


@pytest.fixture
def played(plays: Plays, mode: str, family: str, condition: str) -> Played:
    return plays.case(mode, family)[condition]


@pytest.mark.parametrize("family", MODELS)
def test_the_engine_agrees_with_itself_so_that_tokens_are_an_oracle(plays: Plays, family: str) -> None:
    right, mixed = plays.without(family)
    assert [outcome.tokens for _, outcome in mixed.pairs] == [right[order.prompt] for order, _ in mixed.pairs]


@every_condition
@family_of_case
def test_tokens_are_those_without_the_cache(plays: Plays, family: str, played: Played) -> None:
    right = plays.right(family)
    ended = [(order, outcome) for order, outcome in played.pairs if not outcome.aborted]
    assert ended
    assert [outcome.tokens for _, outcome in ended] == [right[order.prompt] for order, _ in ended]


@family_of_case
def test_what_an_aborted_request_said_was_right(plays: Plays, mode: str, family: str) -> None:
    right = plays.right(family)
    aborted = [pair for pair in plays.case(mode, family)["aborted"].pairs if pair[1].aborted]
    assert len(aborted) > len(plays.case(mode, family)["aborted"].pairs) // 5
    for order, outcome in aborted:
        assert outcome.tokens == right[order.prompt][: len(outcome.tokens)]


@every_condition
@family_of_case
def test_nothing_stays_held(played: Played) -> None:
    assert played.held == dict.fromkeys(played.held, 0)
    assert played.held.keys() >= {"blocks", "requests", "records", "loads", "leases", "pins"}


@every_condition
@family_of_case
def test_the_cache_served(family: str, played: Played, condition: str) -> None:
    """At least a block for every sixth request: others find blocks of vLLM, or come before a save.

    For every twelfth where half of all files are damaged before each wave.
    """
    served = sum(wave.external_tokens for wave in played.waves)
    assert served >= len(played.pairs) // (12 if condition == "damaged" else 6) * block_of(family)


@family_of_case
def test_damage_was_noticed_and_there_was_none_before(plays: Plays, mode: str, family: str) -> None:
    failed = [plays.case(mode, family)[name].counts["ucm_objects_failed_total"] for name in CONDITIONS]
    assert failed[CONDITIONS.index("aborted")] == 0 < failed[CONDITIONS.index("damaged")]


@pytest.mark.parametrize(("mode", "family"), [case for case in CASES if case[1] in MODES[case[0]].pools])
def test_a_tiny_pool_preempts(plays: Plays, mode: str, family: str) -> None:
    pairs = [pair for name in CONDITIONS for pair in plays.case(mode, family)[name].pairs]
    assert sum(outcome.preemptions for _, outcome in pairs) > 0


@pytest.mark.parametrize(("mode", "family"), [case for case in CASES if case[0] == "drafts"])
def test_some_drafts_are_right(plays: Plays, mode: str, family: str) -> None:
    assert plays.case(mode, family)["mixed"].counts["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize("family", MODELS)
def test_attaching_the_cache_changes_no_number_of_blocks(plays: Plays, family: str) -> None:
    """C-54: generation across an edge of blocks, with the cache and without."""
    without = block_counts(plays.without(family)[1])
    for mode in ("layerwise", "whole"):
        assert block_counts(plays.case(mode, family)["mixed"]) == without
    assert any(len(set(counts.values())) > 1 for counts in without), "no request crossed an edge"


def block_counts(played: Played) -> list[Mapping[int, tuple[int, ...]]]:
    """By request and tokens known, the blocks held in each group of the engine; the most of several."""
    found: list[Mapping[int, tuple[int, ...]]] = []
    for _, outcome in played.pairs:
        counts: dict[int, tuple[int, ...]] = {}
        for known, *held in outcome.blocks:
            counts[known] = max(counts.get(known, ()), tuple(held))
        found.append(counts)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_every_byte_of_mla_that_was_loaded_was_computed_once(plays: Plays, mode: str) -> None:
    """Tokens could hide a wrong byte: what is loaded for a block was computed for it before, by digests.

    Before in time: a request that comes later may compute and save while an earlier one waits for its load.
    """
    computed: dict[tuple[tuple[int, ...], str], set[str]] = {}
    loaded = 0
    pairs = [pair for name in CONDITIONS for pair in plays.case(mode, "mla")[name].pairs]
    for order, outcome in sorted(pairs, key=lambda pair: pair[1].digested_s):
        block_tokens = MODELS["mla"].engine_block_tokens
        # What vLLM computes again after a load that failed it goes on counting as cached.
        served = outcome.cached_tokens if outcome.loaded_tokens is None else outcome.loaded_tokens
        for (layer, index), digest in outcome.digests.items():
            known = computed.setdefault((order.prompt.tokens[: (index + 1) * block_tokens], layer), set())
            if (index + 1) * block_tokens <= served:
                assert digest in known
                loaded += 1
            known.add(digest)
    assert loaded > 100
