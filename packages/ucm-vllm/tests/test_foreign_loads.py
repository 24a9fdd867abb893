"""Beside another connector: what it loads is saved once that ended well, cold requests by both (C-51)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import families
from engine_doubles import Engine, request, saved
from halves import kind

from ucm_vllm.metadata import Handshake, WorkerReport
from ucm_vllm.spec_from_engine import engine_spec

PAGES = ([1, 2, 3],)


@pytest.fixture
def engine() -> Engine:
    return Engine(
        engine_spec(families.DENSE.table, families.DENSE.groups, spec_kind=kind, engine_align_tokens=128)
    )


def loaded_by_another(engine: Engine, request_id: str = "r") -> Any:
    """A request of which another connector loads 256 tokens; vLLM tells us of 0."""
    asked = request(300, request_id)
    assert engine.half.matched_tokens(asked, 0) == (0, False)
    engine.half.allocated(asked, PAGES, external_tokens=0)
    return asked


def over(engine: Engine, plan: Any, broken: frozenset[int] = frozenset()) -> None:
    """The step of ``plan`` is over on all workers."""
    report = WorkerReport(namespace=plan.namespace, step=plan.number if plan.ask else 0)
    engine.half.take_output(report, broken_pages=broken)


def test_nothing_is_saved_in_the_step_that_loads(engine: Engine) -> None:
    plan = engine.step((loaded_by_another(engine), 256, 44, PAGES))
    assert plan.saves == ()
    assert plan.ask


def test_it_is_saved_when_the_load_ended_well(engine: Engine) -> None:
    asked = loaded_by_another(engine)
    over(engine, engine.step((asked, 256, 44, PAGES)))
    plan = engine.step((asked, 300, 1, PAGES))
    assert saved(plan) == [(0, page, 64) for page in (1, 1, 2, 2)]
    assert not plan.ask


def test_not_before_that_is_known(engine: Engine) -> None:
    """Steps that vLLM plans ahead."""
    asked = loaded_by_another(engine)
    first = engine.step((asked, 256, 44, PAGES))
    assert engine.step((asked, 300, 1, PAGES)).saves == ()
    over(engine, first)
    assert engine.step((asked, 301, 1, PAGES)).saves != ()


def test_a_block_that_failed_is_saved_once_it_was_computed(engine: Engine) -> None:
    asked = loaded_by_another(engine)
    over(engine, engine.step((asked, 256, 44, PAGES)), frozenset({2}))
    plan = engine.step((asked, 128, 172, PAGES))
    assert saved(plan) == [(0, page, 64) for page in (1, 1, 2, 2)]


def test_who_borrows_a_block_that_failed_saves_nothing(engine: Engine) -> None:
    borrower = request(300, "other")
    engine.half.matched_tokens(borrower, 256)
    asked = loaded_by_another(engine)
    plan = engine.step((asked, 256, 44, PAGES), (borrower, 256, 44, ([1, 2, 4],)))
    over(engine, plan, frozenset({2}))
    plan = engine.step((borrower, 300, 1, ([1, 2, 4],)))
    assert plan.saves == ()


def test_a_cold_request_beside_it_waits_one_step(engine: Engine) -> None:
    """It may share blocks with the one that loads."""
    asked, cold = loaded_by_another(engine), request(200, "cold", first=9)
    engine.half.matched_tokens(cold, 0)
    engine.half.allocated(cold, ([4, 5],), external_tokens=0)
    first = engine.step((asked, 256, 44, PAGES), (cold, 0, 200, ([4, 5],)))
    assert first.saves == ()
    over(engine, first)
    plan = engine.step((asked, 300, 1, PAGES), (cold, 200, 1, ([4, 5],)))
    assert sorted(save.request_id for save in plan.saves) == ["cold", "r"]


def test_a_cold_request_alone_is_saved_at_once(engine: Engine) -> None:
    asked = loaded_by_another(engine)
    assert engine.step((asked, 0, 300, PAGES)).saves != ()


def test_what_we_load_ourselves_is_not_another_s(engine: Engine) -> None:
    first = request(300, "writer")
    engine.half.matched_tokens(first, 0)
    engine.run((first, 0, 300, PAGES))
    asked = request(400)
    assert engine.half.matched_tokens(asked, 0) == (256, False)
    engine.half.allocated(asked, ([4, 5, 6, 7],), external_tokens=256)
    plan = engine.step((asked, 256, 144, ([4, 5, 6, 7],)))
    assert saved(plan) == [(0, 6, 64), (0, 6, 64)]


def test_with_several_workers_our_own_loads_are_waited_for_too(engine: Engine) -> None:
    """A load that failed on one worker is garbage on all, and the others cannot know."""
    first = request(300, "writer")
    engine.half.matched_tokens(first, 0)
    engine.run((first, 0, 300, PAGES))
    identity = engine.cache.identity
    engine.half.meet([Handshake(identity), Handshake(identity)])
    asked = request(400)
    assert engine.half.matched_tokens(asked, 0) == (256, False)
    engine.half.allocated(asked, ([4, 5, 6, 7],), external_tokens=256)
    plan = engine.step((asked, 256, 144, ([4, 5, 6, 7],)))
    assert plan.saves == ()
    over(engine, plan)
    assert engine.step((asked, 400, 1, ([4, 5, 6, 7],))).saves != ()
