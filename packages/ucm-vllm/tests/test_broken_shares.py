"""Who shares blocks of a failed load never answers from garbage, whatever becomes of the one that loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from real_scheduler import PAGE_TOKENS, RealEngine, vllm_config

SEEDS = 8
PROMPT = list(range(10, 30))
"""Five blocks of four tokens; by itself it loads four of them, as its last token is always computed."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture
def engines(checkpoint: Path) -> Iterator[Callable[..., RealEngine]]:
    """Engines whose store holds `PROMPT`, with no prefix cache of their own; balances are zero at the end."""
    made: list[RealEngine] = []

    def make(**scheduling: Any) -> RealEngine:
        settings = {"blocks": 64, "max_num_batched_tokens": 64, "policy": "priority"} | scheduling
        engine = RealEngine(vllm_config(checkpoint, **settings))
        made.append(engine)
        engine.add("writer", PROMPT)
        engine.run()
        engine.forget_local()
        return engine

    yield make
    for engine in made:
        engine.run()
        engine.check()
        assert engine.half.request_count == 0
        engine.keys.leases.check_integrity()


def lose(engine: RealEngine, *objects: int) -> None:
    """The next load does not get these blocks."""

    def fails(_: Any, __: int) -> tuple[int, ...]:
        engine.worker.fails = lambda _, __: ()
        return objects

    engine.worker.fails = fails


def share(engine: RealEngine, *names: str, lost: Sequence[int] = (1,)) -> None:
    """One step in which the first of these loads, in vain, and the others share its blocks."""
    lose(engine, *lost)
    for name in names:
        engine.add(name, PROMPT, 3)
    engine.step()
    assert engine.worker.failures == 1
    first, *others = (engine.scheduler.kv_cache_manager.get_block_ids(name)[0] for name in names)
    assert all(table[:4] == first[:4] for table in others)


def told(engine: RealEngine) -> list[int]:
    """How many blocks each step so far told as broken by a step before."""
    return [len(pages) for pages in engine.worker.told]


def take_all_blocks(engine: RealEngine) -> None:
    """Somebody else takes what is free."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks())


# -- the one that is to compute them again goes away


def test_it_computes_them_and_nobody_need_be_told(engines: Any) -> None:
    engine = engines()
    share(engine, "loads", "shares")
    engine.run()
    assert sum(told(engine)) == 0


def test_it_is_aborted(engines: Any) -> None:
    engine = engines()
    share(engine, "loads", "shares")
    engine.abort("loads")
    engine.run()
    assert sum(map(bool, told(engine))) == 1


def test_it_is_aborted_while_the_load_fails(engines: Any) -> None:
    engine = engines()
    lose(engine, 1)
    engine.add("loads", PROMPT)
    engine.add("shares", PROMPT, 3)
    engine.step(abort_meanwhile=["loads"])
    engine.run()
    assert sum(told(engine)) == 0


def test_so_is_the_next_one_that_is_to_compute_them(engines: Any) -> None:
    engine = engines()
    share(engine, "loads", "second", "third", "fourth")
    for name in ("loads", "second"):
        engine.abort(name)
        engine.step()
    engine.run()
    assert sum(map(bool, told(engine))) == 2


def test_all_are(engines: Any) -> None:
    engine = engines()
    share(engine, "loads", "shares")
    for name in ("loads", "shares"):
        engine.abort(name)
    engine.step()
    engine.add("later", PROMPT, 3)
    engine.run()
    assert sum(told(engine)) == 0


def test_it_is_preempted_in_the_step_in_which_the_other_goes_on(engines: Any) -> None:
    engine = engines()
    engine.add("decodes", [7] * 7, 8)
    engine.step()  # its second block is full by now
    share(engine, "loads", "shares")
    engine.requests["loads"].priority = 9  # of its own accord vLLM preempts the others first
    take_all_blocks(engine)
    scheduled = engine.step()
    assert scheduled.preempted_req_ids == {"loads"}
    assert "shares" in scheduled.num_scheduled_tokens
    assert told(engine)[-1] > 0


def test_it_computes_them_piece_by_piece(engines: Any) -> None:
    """VLLM lets the others go on meanwhile."""
    engine = engines(long_prefill_token_threshold=PAGE_TOKENS)
    share(engine, "loads", "shares", lost=(1, 3))
    engine.run()
    assert sum(map(bool, told(engine))) == 1


# -- blocks of others


def test_blocks_that_somebody_else_has_now_are_not_told(engines: Any) -> None:
    engine, other = engines(blocks=7), range(40, 60)
    engine.add("writes", other)
    engine.run()
    share(engine, "loads")
    broken = engine.half.broken_pages
    engine.abort("loads")
    engine.forget_local()
    engine.add("other", other, 3)
    engine.step()
    assert not broken.isdisjoint(engine.tables["other"][:4])
    engine.run()
    assert sum(told(engine)) == 0


def test_what_was_computed_from_a_load_is_told_with_it(engines: Any) -> None:
    """A copy of the failed block hides from vLLM who computes on what follows it."""
    engine = engines()
    manager = engine.scheduler.kv_cache_manager
    engine.add("copies", PROMPT)
    engine.step()
    manager.evict_blocks({engine.tables["copies"][0]})
    engine.run()
    lose(engine, 1)
    for name, last in (("loads", 5), ("shares", 6)):
        engine.add(name, [*PROMPT, 4, 4, 4, 4, last], 3)
    engine.step()
    loads, shares = engine.tables["loads"], engine.tables["shares"]
    assert loads[1] != shares[1]
    assert loads[5] == shares[5]
    engine.run()


# -- at random


class Churn:
    """Requests of common beginnings come, lose what they load, run out of blocks and are aborted."""

    def __init__(self, engine: RealEngine, seed: int) -> None:
        self._engine, self._random, self._seed = engine, Random(seed), seed
        self._manager = engine.scheduler.kv_cache_manager
        self._held: list[Any] = []
        self._bases = [self._tokens(28) for _ in range(2)]
        self._count = 0
        engine.worker.fails = lambda _, count: [one for one in range(count) if self._chance(0.25)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self._chance(0.4):
                self._come()
            if self._chance(0.2):
                self._manager.evict_blocks(set(range(1, self._manager.block_pool.num_gpu_blocks)))
            self._squeeze()
            for name in self._some(0.3):
                self._engine.abort(name)
            self._engine.step(abort_meanwhile=self._some(0.1))
        self._let_go()
        self._engine.run()
        self._engine.check()

    def _come(self) -> None:
        base = self._random.choice(self._bases)
        for _ in range(self._random.randrange(1, 4)):
            self._count += 1
            prompt = base[: self._random.randrange(8, 29)] + self._tokens(self._random.randrange(6))
            self._engine.add(
                f"{self._seed}-{self._count}",
                prompt,
                self._random.randrange(1, 5),
                priority=self._random.randrange(3),
            )

    def _squeeze(self) -> None:
        """Somebody else takes blocks, or gives them back."""
        free = self._manager.block_pool.get_num_free_blocks()
        if self._chance(0.15):
            self._held += self._manager.block_pool.get_new_blocks(self._random.randrange(free + 1))
        elif self._chance(0.5):
            self._let_go()

    def _let_go(self) -> None:
        self._manager.block_pool.free_blocks(self._held)
        self._held = []

    def _some(self, chance: float) -> list[str]:
        alive = [name for name, one in self._engine.requests.items() if not one.is_finished()]
        return [self._random.choice(alive)] if alive and self._chance(chance) else []

    def _chance(self, chance: float) -> bool:
        return self._random.random() < chance

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, 400) for _ in range(count)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("threshold", [0, 6])
def test_whatever_happens(engines: Any, policy: str, threshold: int) -> None:
    engine = engines(
        blocks=40, max_num_batched_tokens=24, policy=policy, long_prefill_token_threshold=threshold
    )
    for seed in range(SEEDS):
        Churn(engine, seed).run(40)
    assert engine.worker.failures > 20
    assert any(told(engine))
