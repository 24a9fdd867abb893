"""When vLLM may use blocks again that saves read: after finish, abort, preemption, and at shutdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import families
import torch
from engine_doubles import request
from halves import Halves
from slow_saves import SlowStore

from ucm_core.coordinator.attempts import Attempt
from ucm_vllm import worker_saves
from ucm_vllm.block_holds import PATIENCE_S, BlockHolds
from ucm_vllm.metadata import SavePlan

PAGES = ([1, 2, 3],)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    """Saves wait until they are let go; nobody waits for them longer than a moment."""
    monkeypatch.setattr(worker_saves, "SETTLE_WAIT_S", 0.05)
    return SlowStore(monkeypatch)


@pytest.fixture
def engine(engines: Any, store: SlowStore) -> Iterator[Halves]:
    """All balances are zero at the end."""
    engine = engines()
    yield engine
    store.let_go()
    engine.step_until(lambda _: engine.worker.open_saves == 0)
    assert engine.scheduler.request_count == 0
    assert not engine.scheduler.frees_blocks_soon
    engine.worker.check_integrity()
    engine.scheduler.check_integrity()


def compute(engine: Halves, asked: Any, tables: Any = PAGES) -> Any:
    """One step that computes and saves a whole prompt."""
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, tables, external_tokens=0)
    return engine.step((asked, 0, asked.num_tokens, tables))


def stored(engine: Halves, asked: Any) -> list[bool]:
    """Which blocks of a prompt the store holds."""
    cache = engine.scheduler_cache.current
    assert cache is not None
    keys = cache.coordinator.keys(
        cache.chain(list(asked.all_token_ids)), "full", begin_block=0, end_block=asked.num_tokens // 64
    )
    return list(map(bool, cache.stores["full"].lookup(keys)))


# -- finish: C-40, C-41


def test_blocks_are_kept_while_a_save_reads_them_and_given_back_once(
    engine: Halves, store: SlowStore
) -> None:
    compute(engine, request(300))
    assert engine.scheduler.finished("r")
    assert engine.scheduler.frees_blocks_soon
    assert [engine.step().sent for _ in range(3)] == [set()] * 3
    store.let_go()
    engine.step_until(lambda step: step.sent == {"r"})
    assert [engine.step().sent for _ in range(3)] == [set()] * 3
    assert stored(engine, request(300)) == [True] * 4


def test_a_failure_at_the_end_of_a_request_keeps_its_blocks(
    engine: Halves, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("a defect")

    asked = request(300)
    compute(engine, asked)
    monkeypatch.setattr("ucm_core.cache.Cache.release", refuse)
    assert engine.scheduler.finished("r")
    monkeypatch.undo()
    store.let_go()
    assert engine.step_until(lambda step: bool(step.sent)).sent == {"r"}


def test_nothing_to_save_is_nothing_to_wait_for(engine: Halves) -> None:
    compute(engine, request(60))
    assert not engine.scheduler.finished("r")


def test_what_was_saved_before_is_nothing_to_wait_for(engine: Halves, store: SlowStore) -> None:
    store.slow = False
    compute(engine, request(300))
    engine.finish("r")
    store.slow = True
    compute(engine, request(300, "again"))
    assert not engine.scheduler.finished("again")


def test_whole_saves_have_copied_when_the_step_ends(engines: Any, store: SlowStore) -> None:
    engine = engines(layerwise=False)
    compute(engine, request(300))
    assert not engine.scheduler.finished("r")
    assert engine.worker.open_saves == 0


def test_states_have_been_copied_when_the_step_ends(engines: Any, store: SlowStore) -> None:
    engine, asked = engines(families.GRANITE), request(256)
    tables = ([0, 1], [0, 2], [0, 3], [4, 5, 6])
    engine.scheduler.matched_tokens(asked, 0)
    offers = {"r": [(0, 11, 256), (1, 12, 256), (2, 13, 256)]}
    plan = engine.plan((asked, 0, 256, tables), offers=offers)
    assert [bool(save.job) for save in plan.saves] == [True, False]
    engine.execute(plan)
    assert engine.worker.open_saves == 1
    store.let_go()
    engine.finish("r")


def test_a_save_that_ends_before_the_request_is_nothing_to_wait_for(engine: Halves, store: SlowStore) -> None:
    compute(engine, request(300))
    store.let_go()
    engine.step_until(lambda _: engine.worker.open_saves == 0)
    assert not engine.scheduler.finished("r")


def test_two_requests_of_one_step_are_told_each_once(engine: Halves, store: SlowStore) -> None:
    first, second = request(300), request(200, "other", first=5)
    compute(engine, first)
    compute(engine, second, ([4, 5],))
    assert engine.scheduler.finished("r")
    assert engine.scheduler.finished("other")
    store.saves[1].let_go()
    engine.step_until(lambda step: step.sent == {"other"})
    store.saves[0].let_go()
    engine.step_until(lambda step: step.sent == {"r"})


def test_a_later_save_of_a_request_holds_its_blocks_too(engine: Halves, store: SlowStore) -> None:
    asked = request(300)
    compute(engine, asked)
    asked.append_output_token_ids([9] * 30)
    engine.step((asked, 300, 30, PAGES))
    assert engine.scheduler.finished("r")
    store.saves[0].let_go()
    assert [engine.step().sent for _ in range(3)] == [set()] * 3
    store.saves[1].let_go()
    engine.step_until(lambda step: step.sent == {"r"})


def test_a_save_that_fails_gives_its_blocks_back(engine: Halves, store: SlowStore) -> None:
    compute(engine, request(300))
    assert engine.scheduler.finished("r")
    store.saves[0].abandon()
    engine.step_until(lambda step: step.sent == {"r"})
    assert stored(engine, request(300)) == [False] * 4


def test_a_medium_that_hangs_keeps_no_blocks_for_ever(
    engine: Halves, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute(engine, request(300))
    assert engine.scheduler.finished("r")
    assert engine.step().sent == set()
    monkeypatch.setattr(worker_saves, "PROMISE_WAIT_S", 0.0)
    compute(engine, request(300, "other", first=5), ([4, 5, 6],))
    assert engine.scheduler.finished("other")
    assert engine.step().sent == {"other"}, "the first has time left"
    assert stored(engine, request(300, first=5)) == [False] * 4


# -- abort and reuse of an id: C-42


def test_an_abort_between_plan_and_step_keeps_the_blocks(engine: Halves, store: SlowStore) -> None:
    asked = request(300)
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, PAGES, external_tokens=0)
    plan = engine.plan((asked, 0, 300, PAGES))
    assert engine.scheduler.finished("r")
    assert engine.execute(plan).sent == set()
    store.let_go()
    engine.step_until(lambda step: step.sent == {"r"})


def test_a_reused_id_has_completions_of_its_own() -> None:
    holds, old, new = BlockHolds(), Attempt("r7", 1), Attempt("r7", 2)
    holds.planned([SavePlan("r7", (), use=1, job="x"), SavePlan("r7", (), use=1, job="y")])
    holds.over([(old, "x/0")])
    assert holds.finish(old)
    holds.planned([SavePlan("r7", (), use=2, job="z")])
    holds.over([(old, "y/0")])
    assert holds.finish(new)
    holds.over([(new, "z/0"), (Attempt("r9"), "a/0")])
    assert holds.take_promised() == (old, new)
    holds.check_integrity()


def test_blocks_that_do_not_come_back_are_not_hoped_for_for_ever() -> None:
    now = [0.0]
    holds, attempt = BlockHolds(clock=lambda: now[0]), Attempt("r", 1)
    holds.planned([SavePlan("r", (), use=1, job="1")])
    assert holds.finish(attempt)
    assert holds.waiting
    now[0] = PATIENCE_S
    assert not holds.waiting


def test_a_save_lasts_until_every_worker_has_read() -> None:
    holds, attempt = BlockHolds(), Attempt("r", 1)
    holds.workers = 2
    holds.planned([SavePlan("r", (), use=1, job="1")])
    holds.over([(attempt, "1/1")])
    assert holds.finish(attempt)
    holds.over([(attempt, "1/0")])
    assert holds.take_promised() == (attempt,)


# -- preemption: C-38


def preempt(engine: Halves, *ids: str) -> Any:
    """The plan of the step after these requests were preempted."""
    return engine.plan(preempted=set(ids))


def overwrite(engine: Halves, pages: list[int]) -> None:
    for tensor in engine.memory.values():
        tensor[pages] = torch.ones_like(tensor[pages])


def test_a_preempted_request_is_saved_to_the_end_before_its_blocks_are_written(
    engine: Halves, store: SlowStore
) -> None:
    compute(engine, request(300))
    kept = engine.blocks(0, [1, 2])
    store.let_go()
    engine.worker.before_step(preempt(engine, "r"))
    overwrite(engine, [1, 2, 3])
    engine.scheduler.finished("r")
    assert stored(engine, request(300)) == [True] * 4
    assert all((kept[name] == part).all() for name, part in load(engine, request(300, "b")).items())


def test_a_save_that_takes_too_long_is_given_up_before_its_blocks_are_written(
    engine: Halves, store: SlowStore
) -> None:
    compute(engine, request(300))
    engine.worker.before_step(preempt(engine, "r"))
    assert store.saves[0].ticket.done
    overwrite(engine, [1, 2, 3])
    store.let_go()
    engine.scheduler.finished("r")
    assert stored(engine, request(300)) == [False] * 4


def test_other_requests_go_on_when_one_is_preempted(engine: Halves, store: SlowStore) -> None:
    compute(engine, request(300))
    compute(engine, request(200, "other", first=5), ([4, 5],))
    engine.execute(preempt(engine, "r"))
    assert [save.ticket.done for save in store.saves] == [True, False]
    for request_id in ("r", "other"):
        engine.scheduler.finished(request_id)
    store.let_go()
    engine.step_until(lambda step: "other" in step.sent)
    assert stored(engine, request(200, first=5)) == [True] * 3


def load(engine: Halves, asked: Any) -> dict[str, np.ndarray]:
    """What another request loads into blocks 7 and 8."""
    assert engine.scheduler.matched_tokens(asked, 0) == (256, False)
    engine.scheduler.allocated(asked, ([7, 8, 9],), external_tokens=256)
    engine.step((asked, 256, asked.num_tokens - 256, ([7, 8, 9],)))
    engine.scheduler.finished(asked.request_id)
    return engine.blocks(0, [7, 8])


def test_blocks_of_a_window_are_read_to_the_end_before_the_next_step(engines: Any, store: SlowStore) -> None:
    """They fall out of the window, and vLLM gives them to others, while the request lives."""
    engine = engines(families.GPT_OSS)
    compute(engine, request(300), ([1, 2, 3], [4, 5, 6]))
    assert engine.worker.open_saves == 1
    engine.worker.before_step(engine.plan())
    assert all(save.ticket.done for save in store.saves[:1])
    engine.scheduler.finished("r")
    store.let_go()


# -- the end


def test_a_worker_that_ends_leaves_no_save_that_reads(engines: Any, store: SlowStore) -> None:
    engine = engines()
    compute(engine, request(300))
    engine.worker.close()
    assert store.saves[0].ticket.done
    assert engine.worker.open_saves == 0
