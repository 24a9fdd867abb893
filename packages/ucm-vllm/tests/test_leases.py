"""The scheduler half's leases: what vLLM was promised is pinned until its load has ended, and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import families
from engine_doubles import Engine, request
from halves import Halves, kind

from ucm_core.coordinator.attempts import Attempt
from ucm_vllm.spec_from_engine import EngineSpec, engine_spec

PAGES = ([1, 2, 3],)


SPEC = engine_spec(families.DENSE.table, families.DENSE.groups, spec_kind=kind, engine_align_tokens=128)


@pytest.fixture
def spec() -> EngineSpec:
    return SPEC


@pytest.fixture
def engine(spec: EngineSpec) -> Iterator[Engine]:
    """A store that holds a prompt of 300 tokens: four blocks of 64 up to 256. Balanced at the end."""
    engine = Engine(spec)
    first = request(300, "writer")
    engine.half.matched_tokens(first, 0)
    engine.half.allocated(first, PAGES, external_tokens=0)
    engine.run((first, 0, 300, PAGES))
    engine.half.finished("writer")
    yield engine
    engine.keys.leases.check_integrity()
    for request_id in ("r", "other"):
        engine.half.finished(request_id)
    assert held(engine) == (0, 0)


def held(engine: Engine) -> tuple[int, int]:
    """Leases, and objects that the store counts as pinned."""
    return engine.keys.leases.statistics().held, engine.keys.pins["full"]


def promised(engine: Engine, request_id: str = "r") -> Any:
    asked = request(300, request_id)
    assert engine.half.matched_tokens(asked, 0) == (256, False)
    return asked


def planned(engine: Engine, tokens: int = 256) -> Any:
    """The load of a request, which has gone down to the workers."""
    asked = promised(engine)
    engine.half.allocated(asked, PAGES, external_tokens=tokens)
    (load,) = engine.step((asked, tokens, 300 - tokens, PAGES)).loads
    return load


def test_a_promise_is_leased_and_asking_again_replaces_it(engine: Engine) -> None:
    asked = promised(engine)
    for _ in range(3):
        engine.half.matched_tokens(asked, 0)
    assert held(engine) == (1, 4)


def test_no_promise_is_no_lease(engine: Engine) -> None:
    assert engine.half.matched_tokens(request(300, first=9), 0) == (0, False)
    assert held(engine) == (0, 0)


@pytest.mark.parametrize("why", ["vLLM holds as much", "the worker is gone", "vLLM would discard it"])
def test_a_promise_that_is_not_repeated_is_let_go(engine: Engine, why: str) -> None:
    asked = promised(engine)
    if why == "the worker is gone":
        engine.tell(namespace=None)
    asked.skip_reading_prefix_cache = why == "vLLM would discard it"
    local_tokens = 256 if why == "vLLM holds as much" else 0
    assert engine.half.matched_tokens(asked, local_tokens) == (0, False)
    assert held(engine) == (0, 0)


def test_the_lease_lasts_until_the_workers_report_the_end(engine: Engine) -> None:
    load = planned(engine)
    engine.tell()
    assert held(engine) == (1, 4)
    engine.tell(ended=(load.attempt,))
    assert held(engine) == (0, 0)


@pytest.mark.parametrize("spec", [replace(SPEC, workers=2)])
def test_of_several_workers_the_last_one_ends_the_lease(engine: Engine) -> None:
    asked = request(300, "r")
    assert engine.half.matched_tokens(asked, 0) == (256, True), "several workers load asynchronously"
    engine.half.allocated(asked, PAGES, external_tokens=256)
    (load,) = engine.step().loads
    engine.tell(ended=(load.attempt,))
    assert held(engine) == (1, 4)
    engine.tell(ended=(load.attempt,))
    assert held(engine) == (0, 0)


def test_what_vllm_has_no_room_for_is_let_go(engine: Engine) -> None:
    planned(engine, tokens=128)
    assert held(engine) == (1, 2)


def test_when_nothing_is_taken_nothing_is_kept(engine: Engine) -> None:
    engine.half.allocated(promised(engine), PAGES, external_tokens=0)
    assert held(engine) == (0, 0)


def test_a_request_that_ends_before_its_load_is_let_go(engine: Engine) -> None:
    promised(engine)
    promised(engine, "other")
    engine.half.finished("r")
    engine.half.finished("r")
    assert held(engine) == (1, 4)


def test_a_load_that_vanished_is_let_go_when_it_is_reported(engine: Engine) -> None:
    asked = promised(engine)
    engine.keys.present["full"].clear()
    engine.half.allocated(asked, PAGES, external_tokens=256)
    (load,) = engine.step().loads
    assert not load.possible
    engine.tell(ended=(load.attempt,))
    assert held(engine) == (0, 0)


def test_a_late_report_leaves_the_lease_of_who_uses_the_id_now(engine: Engine) -> None:
    load = planned(engine)
    engine.half.finished("r")
    promised(engine)
    engine.tell(ended=(load.attempt, Attempt("r"), Attempt("never seen", 9)))
    assert held(engine) == (1, 4)


def test_an_id_that_is_used_anew_without_an_end_has_one_lease(engine: Engine) -> None:
    promised(engine)
    promised(engine)
    assert held(engine) == (1, 4)


def test_changed_weights_let_everything_go(engine: Engine) -> None:
    promised(engine)
    before = engine.keys
    engine.half.reset()
    assert before.pins["full"] == 0
    assert held(engine) == (0, 0)


def test_closing_lets_everything_go(engine: Engine) -> None:
    promised(engine)
    before = engine.keys
    engine.half.close()
    assert before.pins["full"] == 0
    engine.cache.current = before


def pins_of(halves: Halves) -> int:
    cache = halves.scheduler_cache.current
    assert cache is not None
    cache.check_integrity()
    return sum(row.pins for row in cache.statistics().rows.values())


@pytest.mark.parametrize("model", [families.DENSE, families.GRANITE], ids=["synchronous", "asynchronous"])
def test_with_real_stores_the_end_of_a_load_is_the_end_of_its_lease(
    tmp_path: Path, model: families.TinyModel
) -> None:
    halves = Halves(model, tmp_path)
    asynchronous = halves.spec.loads_asynchronously
    tables = ([0, 11], [0, 12], [0, 13], [4, 5, 6]) if asynchronous else PAGES
    offers = {"writer": [(group, 11 + group, 256) for group in range(3)]} if asynchronous else {}
    halves.write_prompt(request(300, "writer"), tables, offers=offers)
    asked = request(300)
    assert halves.scheduler.matched_tokens(asked, 0) == (256, asynchronous)
    assert pins_of(halves) == 4 + asynchronous  # and one state
    halves.scheduler.allocated(asked, tables, external_tokens=256)
    if asynchronous:
        halves.receive("r")
    else:
        halves.step((asked, 256, 44, tables))
    assert pins_of(halves) == 0
    halves.close()
