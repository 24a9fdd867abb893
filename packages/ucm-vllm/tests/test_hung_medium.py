"""A medium that does not answer: loads that hang in a read fail in bounded time, and write nothing later."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from engine_doubles import request
from halves import WAIT_S, Halves

from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.store.files import FileTier
from ucm_vllm import worker_loads
from ucm_vllm.metadata import LoadPlan, RowTransfer
from ucm_vllm.worker_loads import RunningLoad, WorkerLoads
from ucm_vllm.worker_news import News

PAGES = ([1, 2, 3],)
TABLES = ([7, 8, 9],)
SOON_S = 0.05


class HungReads:
    """A double of a medium that answers no read before it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs = False
        self.reached, self.go = threading.Event(), threading.Event()
        real = FileTier.read

        def read(files: FileTier, *arguments: Any, **more: Any) -> Any:
            if self.hangs:
                self.reached.set()
                assert self.go.wait(WAIT_S)
            return real(files, *arguments, **more)

        monkeypatch.setattr(FileTier, "read", read)

    def hang_before(self, whose: Any, name: str) -> None:
        """Let a call of `whose` begin when a read hangs."""
        real = getattr(whose, name)

        def call(*arguments: Any) -> Any:
            assert self.reached.wait(WAIT_S)
            return real(*arguments)

        setattr(whose, name, call)


@pytest.fixture
def medium(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungReads]:
    medium = HungReads(monkeypatch)
    monkeypatch.setattr(worker_loads, "WHOLE_WAIT_S", SOON_S)
    yield medium
    medium.go.set()


def reader(engines: Any, medium: HungReads, **more: Any) -> Halves:
    """An engine without a ring, whose medium hangs from now on; it finds a prompt of 300 tokens there."""
    writer = engines()
    writer.write_prompt(request(300), PAGES)
    reader = engines(fill="zero", ring_bytes=0, **more)
    reader.worker._pipeline._wait_s = SOON_S
    medium.hangs = True
    return reader


def blank(engine: Halves) -> bool:
    return not any(np.asarray(part).any() for part in engine.blocks(0, [7, 8]).values())


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_step_that_waits_for_a_hung_read_fails_and_its_memory_is_free(
    engines: Any, medium: HungReads, layerwise: bool
) -> None:
    engine, asked = reader(engines, medium, layerwise=layerwise), request(300)
    medium.hang_before(engine.worker._loads, "wait_whole")
    medium.hang_before(engine.worker._pipeline, "before_layer")
    assert engine.scheduler.matched_tokens(asked, 0) == (256, False)
    engine.scheduler.allocated(asked, TABLES, external_tokens=256)
    step = engine.step((asked, 256, 44, TABLES))
    assert step.broken >= {7, 8}
    medium.go.set()
    engine.worker_cache.current.stores["full"].close()
    assert blank(engine), "what came later is not written"


def test_what_comes_once_the_step_has_gone_on_has_failed_and_is_not_written(
    engines: Any, medium: HungReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = reader(engines, medium, layerwise=False), request(300)
    loads = engine.worker._loads
    real = loads.wait_whole

    def wait_whole() -> None:
        real()
        medium.go.set()
        for load in loads._step:
            load.wait(time.monotonic() + WAIT_S)

    monkeypatch.setattr(loads, "wait_whole", wait_whole)
    assert engine.scheduler.matched_tokens(asked, 0) == (256, False)
    engine.scheduler.allocated(asked, TABLES, external_tokens=256)
    assert engine.step((asked, 256, 44, TABLES)).broken >= {7, 8}
    assert blank(engine)


def test_what_is_being_copied_when_its_step_ends_is_waited_for_and_has_failed() -> None:
    ticket = Ticket(2, durable=False)
    rows = (RowTransfer("full", np.zeros((2, 32), dtype=np.uint8), ()),)
    loads = WorkerLoads(None, news := News(), layerwise=True)
    loads._step.append(RunningLoad(LoadPlan("r", rows, asynchronous=False), (ticket,), None))
    judge = threading.Thread(target=loads.judge, args=(None,))
    with ticket.copying():
        judge.start()
        while not ticket.cancelled:
            judge.join(0.001)
            assert judge.is_alive(), "nothing was given up"
        judge.join(SOON_S)
        assert judge.is_alive(), "it is still written to the engine"
        ticket.settle([0, 1], ResultCode.OK)
    judge.join(WAIT_S)
    assert [failed.keys.shape for failed in news.failed] == [(2, 32)], "it was not there when it was used"


def test_no_request_waits_for_ever_for_an_asynchronous_load(
    engines: Any, medium: HungReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_loads, "ASYNCHRONOUS_WAIT_S", SOON_S)
    engine, asked = reader(engines, medium, load_asynchronously=True), request(300)
    assert engine.scheduler.matched_tokens(asked, 0) == (256, True)
    engine.scheduler.allocated(asked, TABLES, external_tokens=256)
    deadline = time.monotonic() + WAIT_S
    while not (step := engine.step()).received:
        assert time.monotonic() < deadline
    assert (step.received, step.failed) == ({"r"}, {"r"})
    medium.go.set()
    engine.worker_cache.current.stores["full"].close()
    assert blank(engine)


def test_a_worker_ends_while_an_asynchronous_load_hangs(engines: Any, medium: HungReads) -> None:
    engine, asked = reader(engines, medium, load_asynchronously=True), request(300)
    assert engine.scheduler.matched_tokens(asked, 0) == (256, True)
    engine.scheduler.allocated(asked, TABLES, external_tokens=256)
    assert engine.step().received == set()
    assert medium.reached.wait(WAIT_S)
    engine.worker._loads.close()
    medium.go.set()
    engine.worker_cache.current.stores["full"].close()
    assert blank(engine)
