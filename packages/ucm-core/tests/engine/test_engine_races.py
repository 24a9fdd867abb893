"""Times and races in the reference engine: slow loads, full queues, preemption, aborts at any step."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from openings import Crowd, engine
from test_reference_engine import PROMPT, SHAPES, run

from ucm_core.flow import pipeline
from ucm_core.spec.keys import Keys
from ucm_core.spec.segments import Parallelism
from ucm_core.testing.engine.engine import EngineShape, ReferenceEngine
from ucm_core.testing.engine.medium import SerialMedium, SlowStore
from ucm_core.testing.engine.scheduler import Feed

OTHER = [7, *PROMPT]


@contextmanager
def gate(engine_: ReferenceEngine, *prompts: list[int]) -> Iterator[threading.Event]:
    """A double of storage that brings nothing of the requests ``prompts`` until it is set."""
    opened = threading.Event()
    chains = [engine_.cache.chain(prompt) for prompt in prompts]
    stores = engine_.ranks[0].stores
    held = {
        key.tobytes() for chain in chains for row in stores for key in engine_.cache.keys(row, chain.digests)
    }

    def seconds(keys: Keys) -> float:
        return float(any(key.tobytes() in held for key in keys))

    with SerialMedium(sleep=lambda _: assert_set(opened)) as medium:
        for rank in engine_.ranks:
            rank.stores = {row: SlowStore(store, medium, seconds) for row, store in rank.stores.items()}
        try:
            yield opened
        finally:
            opened.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_slow_request_holds_no_other_layer(tmp_path: Path) -> None:
    """The slow one's loads come when the other has computed its last layer; waiting would be for ever."""
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "on").touch()
    order: list[tuple[object, int]] = []
    with engine(tmp_path / "cache", shape=EngineShape(trace_dir=tmp_path / "trace")) as engine_:
        run(engine_, PROMPT)
        run(engine_, OTHER)
        with gate(engine_, PROMPT) as opened:

            def told(layer: int, request: object) -> None:
                order.append((request, layer))
                if layer == 7:
                    opened.set()

            slow, quick = engine_.submit("slow", PROMPT), engine_.submit("quick", OTHER)
            engine_.step()
            engine_.ranks[0].loop.time.told = told
            engine_.step()
            assert order == [(request.key, layer) for request in (quick, slow) for layer in range(8)]
            assert engine_.scheduler.counts.rewound == 0
            engine_.run()
    (trace,) = (tmp_path / "trace").glob("ucm-*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    ends = {
        name: max(event["ts"] + event["dur"] for event in loads_of(events, name))
        for name in ("slow", "quick")
    }
    assert ends["quick"] < ends["slow"]


def loads_of(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event.get("dur") and name in json.dumps(event)]


def test_a_full_queue_delays_and_drops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "QUEUE_LOADS", 1)
    crowd = Crowd(documents=4)
    shape = EngineShape(feed=Feed(batch=8))
    with engine(tmp_path, shape=shape) as engine_:
        requests = crowd.submit(engine_, 24)
        engine_.run()
        before = engine_.scheduler.counts.resumed_tokens
        for request in requests:
            engine_.submit("again", request.tokens[: request.prompt_tokens])
        counts = engine_.run()
        assert counts.rewound == 0
        assert counts.resumed_tokens - before == sum((each.prompt_tokens - 1) // 16 * 16 for each in requests)


def test_a_full_ring_delays_saves_and_drops_none(tmp_path: Path) -> None:
    """Eight slots a row, batches of several times as many blocks: everything is found afterwards."""
    crowd, shape = Crowd(documents=20, tokens=96), EngineShape(feed=Feed(batch=8, chunk_tokens=96))
    with engine(tmp_path, shape=shape, ring_bytes=8 * 6 * 8192) as engine_:
        requests = crowd.submit(engine_, 24)
        engine_.run()
    with engine(tmp_path, shape=shape) as restarted:
        for request in requests:
            restarted.submit("again", request.tokens[: request.prompt_tokens])
        counts = restarted.run()
        assert counts.resumed_tokens == sum((each.prompt_tokens - 1) // 16 * 16 for each in requests)


def trouble(engine_: ReferenceEngine, crowd: Crowd, count: int) -> None:
    """Run requests, and preempt or abort some of them at random steps."""
    luck = Random(5)
    requests = crowd.submit(engine_, count, output_tokens=8)
    while not engine_.scheduler.idle:
        engine_.step()
        if luck.random() < 0.4:
            engine_.abort(luck.choice(requests))
        if engine_.scheduler.running and luck.random() < 0.4:
            engine_.preempt(luck.choice(engine_.scheduler.running))


@pytest.mark.parametrize("name", ["speculative", "pages run out", "everything"])
def test_preemption_and_aborts_at_any_step_lose_nothing(tmp_path: Path, name: str) -> None:
    """All pages come back, and whatever was stored meanwhile is right: the second engine reads it."""
    crowd = Crowd(documents=6)
    shape = SHAPES.get(name, EngineShape(feed=Feed(batch=6, drafts=3), pages=20 if "out" in name else 200))
    for _ in range(2):
        with engine(tmp_path, shape=shape) as engine_:
            trouble(engine_, crowd, 40)
            engine_.settle()
            assert engine_.scheduler.tables.held_count == 0
            counts = engine_.scheduler.counts
            assert counts.finished + counts.aborted == 40
            assert min(counts.finished, counts.aborted, counts.preempted) > 5
    assert counts.resumed_tokens > 0


def test_an_abort_while_it_loads_writes_to_nobodys_pages(tmp_path: Path) -> None:
    """Its pages are given to others only when its load has ended."""
    shape = EngineShape(Parallelism(), Feed(batch=2), pages=10)
    with engine(tmp_path, shape=shape) as engine_:
        run(engine_, PROMPT)
        with gate(engine_, PROMPT) as opened:
            aborted = engine_.submit("aborted", PROMPT)
            engine_.step()
            engine_.abort(aborted)
            engine_.submit("next", OTHER)
            for _ in range(3):
                engine_.step()
            opened.set()
            engine_.run()
        assert engine_.scheduler.counts.finished == 2
        assert run(engine_, OTHER) == 64
