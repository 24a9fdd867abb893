"""The scheduler half's books (C-68): a request is counted at its end, with what came and failed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("vllm")

import families
from engine_doubles import Engine, request
from halves import kind
from prometheus_client import REGISTRY
from vllm.v1.request import Request

from ucm_vllm.metadata import FailedLoad
from ucm_vllm.request_records import RequestRecord
from ucm_vllm.spec_from_engine import engine_spec

Counts = tuple[int, ...]
NOTHING = (0, 0, 0, 0, 0, 0)
PAGES = ([7, 8, 9, 10, 11, 12, 13, 14],)
STATE_PAGES = ([0, 11], [0, 12], [0, 13], [14, 15])


def counted() -> Counts:
    """(requests, local, queried, hit, failed, computed); prompt is checked to be their balance."""
    names = ("requests", "local_tokens", "queried_tokens", "hit_tokens", "failed_tokens", "computed_tokens")
    values = [int(REGISTRY.get_sample_value(f"ucm_{name}_total") or 0) for name in (*names, "prompt_tokens")]
    _, local, queried, hit, failed, computed, prompt = values
    assert local + hit - failed + computed == local + queried == prompt
    return tuple(values[:6])


@pytest.fixture
def grown() -> Callable[[], Counts]:
    before = counted()
    return lambda: tuple(now - then for now, then in zip(counted(), before, strict=True))


def engine_with(
    model: families.TinyModel, tokens: int, tables: tuple[list[int], ...], **more: object
) -> Engine:
    """An engine whose store holds a prompt of ``tokens``."""
    engine = Engine(engine_spec(model.table, model.groups, spec_kind=kind, engine_align_tokens=128))
    first = request(tokens, "writer")
    engine.half.matched_tokens(first, 0)
    engine.run((first, 0, tokens, tables), **more)
    engine.half.finished("writer")  # never admitted, so never counted
    return engine


@pytest.fixture
def dense() -> Engine:
    return engine_with(families.DENSE, 800, PAGES)


@pytest.fixture
def hybrid() -> Engine:
    offers = {"writer": [(group, 7 + group, 256) for group in range(3)]}
    return engine_with(families.GRANITE, 300, ([0, 1], [0, 2], [0, 3], [4, 5, 6]), offers=offers)


def load(engine: Engine, asked: Request, *, local: int, tables: tuple[list[int], ...] = PAGES) -> int:
    """Ask five times, as vLLM does while it has no room, then take it up."""
    external = {engine.half.matched_tokens(asked, local)[0] for _ in range(5)}.pop()
    engine.half.allocated(asked, tables, external_tokens=external)
    return external


def fail(engine: Engine, *, pages: set[int]) -> None:
    nothing = np.zeros((0, 32), dtype=np.uint8)
    engine.tell(failed=(FailedLoad("r", "full", nothing),), broken_pages=frozenset(pages), failures=1)


def test_a_request_counts_once_when_it_is_over(dense: Engine, grown: Callable[[], Counts]) -> None:
    assert load(dense, request(1000), local=512) == 256
    assert grown() == NOTHING
    dense.half.finished("r")
    dense.half.finished("r")
    assert grown() == (1, 512, 488, 256, 0, 232)


def test_a_failed_load_counts_from_its_first_broken_page(dense: Engine, grown: Callable[[], Counts]) -> None:
    load(dense, request(1000), local=512)  # the pages of 128 tokens at 512 and at 640
    fail(dense, pages={12})
    dense.half.finished("r")
    assert grown() == (1, 512, 488, 256, 128, 360)


def test_a_load_of_which_nothing_came_counts_as_failed(dense: Engine, grown: Callable[[], Counts]) -> None:
    load(dense, request(1000), local=512)
    fail(dense, pages={11, 12})
    fail(dense, pages={11, 12})
    dense.half.finished("r")
    assert grown() == (1, 512, 488, 256, 256, 488)


def test_a_request_that_was_never_taken_up_is_not_counted(dense: Engine, grown: Callable[[], Counts]) -> None:
    dense.half.matched_tokens(request(1000), 512)
    dense.half.finished("r")
    assert grown() == NOTHING


def test_a_request_that_finds_nothing_is_counted(dense: Engine, grown: Callable[[], Counts]) -> None:
    assert load(dense, request(1000, first=5), local=0) == 0
    dense.half.finished("r")
    assert grown() == (1, 0, 1000, 0, 0, 1000)


def test_a_preempted_request_counts_again(dense: Engine, grown: Callable[[], Counts]) -> None:
    asked = request(1000)
    load(dense, asked, local=512)
    load(dense, asked, local=0)
    assert grown() == (1, 512, 488, 256, 0, 232)
    dense.half.finished("r")
    assert grown() == (2, 512, 1488, 256 + 768, 0, 464)


def test_an_asynchronous_load_that_fails_is_asked_again_and_counted_once(
    hybrid: Engine, grown: Callable[[], Counts]
) -> None:
    asked = request(300)
    assert load(hybrid, asked, local=0, tables=STATE_PAGES) == 256
    fail(hybrid, pages=set())
    assert load(hybrid, asked, local=0, tables=STATE_PAGES) == 256
    hybrid.half.allocated(asked, STATE_PAGES, external_tokens=0)  # vLLM's second call: it came
    hybrid.half.finished("r")
    assert grown() == (1, 0, 300, 512, 256, 44)


def test_an_id_that_is_used_again_is_another_request(dense: Engine, grown: Callable[[], Counts]) -> None:
    load(dense, request(1000), local=512)
    load(dense, request(900), local=0)
    assert grown() == (1, 512, 488, 256, 0, 232)


def test_more_than_was_asked_for_is_counted_as_a_fault_and_raises_nothing(
    dense: Engine, grown: Callable[[], Counts]
) -> None:
    asked = request(1000)
    dense.half.matched_tokens(asked, 512)
    dense.half.allocated(asked, PAGES, external_tokens=4096)
    dense.half.finished("r")
    assert grown() == NOTHING


def test_who_was_taken_up_after_a_failed_load_does_not_stand_back_later() -> None:
    """VLLM keeps the blocks before a failed one and does not ask for the rest of them."""
    record = RequestRecord(request(300), None)
    record.begin_load(asynchronous=True)
    record.load_failed(frozenset({9}), page_tokens=128)
    record.admit(0, [7, 8, 9])
    assert not record.stand_back()
