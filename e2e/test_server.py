"""What `vllm serve` shows of UCM: `/metrics`, KV events at a subscriber, a trace of the layers."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e import objects
from e2e.models import MAX_TOKENS, MODELS, connector, llm_arguments
from e2e.runs import Runs
from e2e.server import Server
from e2e.subscriber import Event, Subscriber

FAMILY, PROMPT = "dense", 1
LAYERS = 4
OBJECTS = 8
"""Whole blocks of 64 of a prompt of 505 tokens and its answer of 16, whose last is never computed."""
SERVED_TOKENS = 384
"""Of the prompt, in vLLM's blocks of 128, what lies before its last token."""
LOADED = "ucm_objects_loaded_total"
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A server that was asked the same twice, its own prefix cache emptied between, and ended."""

    root: Path
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], tuple[int, ...]]
    metrics: dict[str, float]
    events: list[Event]
    traces: list[Path]


@pytest.fixture(scope="module")
def shown(runs: Runs) -> Shown:
    root, traces = runs.empty_root("server"), runs.directory / "traces"
    prompt = runs.prompts(FAMILY).first[PROMPT].tokens
    traces.mkdir()
    (traces / "on").touch()
    with Subscriber(runs.setup) as subscriber:
        arguments = arguments_of(runs, root, trace_dir=str(traces), port=subscriber.port)
        with Server(runs.setup, arguments) as server:
            first = server.complete(prompt, max_tokens=MAX_TOKENS)
            until(server, lambda: len(objects.objects(root)) == OBJECTS)
            until(server, server.forget)
            second = server.complete(prompt, max_tokens=MAX_TOKENS)
            until(server, lambda: LOADED in server.metrics())  # a worker's counters come without a request
            server.complete(prompt[:40], max_tokens=1)  # events of saves that have ended come after a step
            events = subscriber.wait_for(lambda heard: len(stored(heard)) >= OBJECTS, LIMIT_S)
            metrics = server.metrics()
    return Shown(root, prompt, (first, second), metrics, events, [*traces.glob("*.json")])


def arguments_of(runs: Runs, root: Path, *, trace_dir: str, port: int) -> dict[str, Any]:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}"}
    transfer = connector(root, trace_dir=trace_dir)
    more = {"kv_transfer_config": transfer, "kv_events_config": events}
    return llm_arguments(MODELS[FAMILY], runs.checkpoint(FAMILY), **more)


def until(server: Server, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        server.metrics()  # a round trip is the pause between two looks


def stored(events: list[Event]) -> list[Event]:
    """What UCM said: vLLM's own events are of another medium."""
    return [event for event in events if event["type"] == "BlockStored" and event["medium"] == "STORAGE"]


def test_the_second_answer_is_the_first(shown: Shown) -> None:
    assert shown.answers[0] == shown.answers[1]
    assert len(shown.answers[0]) == MAX_TOKENS


def test_metrics_add_up_over_the_processes(shown: Shown) -> None:
    counted = {
        name: shown.metrics[f"ucm_{name}_tokens_total"]
        for name in ("prompt", "local", "queried", "hit", "failed", "computed")
    }
    asked = 2 * 505 + 40
    assert counted == {
        "prompt": asked, "local": 0, "queried": asked,
        "hit": SERVED_TOKENS, "failed": 0, "computed": asked - SERVED_TOKENS,
    }  # fmt: skip


def test_ucm_and_vllm_count_the_same_hit(shown: Shown) -> None:
    assert shown.metrics["ucm_hit_tokens_total"] == shown.metrics["vllm:external_prefix_cache_hits_total"]


def test_workers_count_layer_by_layer(shown: Shown) -> None:
    assert shown.metrics[LOADED] == SERVED_TOKENS / 64
    assert shown.metrics["ucm_layer_wait_seconds_count"] == LAYERS
    assert shown.metrics["ucm_layers_unseen_total"] == shown.metrics.get("ucm_errors_total", 0) == 0


def test_a_subscriber_knows_what_lies_on_disk(shown: Shown) -> None:
    told = [name for event in stored(shown.events) for name in event["block_hashes"]]
    assert sorted(told) == sorted(path.name.split(".")[0] for path in objects.objects(shown.root))


def test_events_tell_the_tokens_of_the_prompt_in_order(shown: Shown) -> None:
    known = (shown.prompt + shown.answers[0])[: OBJECTS * 64]
    chain = {event["parent_block_hash"]: event for event in stored(shown.events)}
    tokens: list[int] = []
    parent = None
    while parent in chain:
        tokens += chain[parent]["token_ids"]
        (parent,) = chain[parent]["block_hashes"]
    assert tuple(tokens) == known


def test_the_trace_has_a_track_per_layer_and_kind(shown: Shown) -> None:
    (path,) = shown.traces
    trace = json.loads(path.read_text())
    tracks = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    kinds = ("load", "wait", "compute", "save")
    assert tracks == {f"layer {layer} {kind}" for layer in range(LAYERS) for kind in kinds}


def test_the_trace_has_the_load_of_every_layer_and_whose_it_is(shown: Shown) -> None:
    trace = json.loads(shown.traces[0].read_text())
    intervals = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    loads = [event["name"] for event in intervals if event["cat"] == "load"]
    assert len(loads) == LAYERS
    assert len(set(loads)) == 1
    assert loads[0].startswith("load cmpl-")
    assert trace["otherData"] == {"intervals": len(intervals), "forgotten": 0}


def test_nothing_is_left_open(shown: Shown) -> None:
    assert objects.temporaries(shown.root) == []
    assert list((shown.root / ".writers").iterdir()) == []
