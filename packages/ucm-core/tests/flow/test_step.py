"""What a step's loads wait for: each shard before its layer computes, and none twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from ucm_core.flow.layers import LayerShards
from ucm_core.flow.step import RunningLoad, StepLoad
from ucm_core.flow.ticket import ResultCode, Ticket

OBJECTS, SHARDS = 2, 3
LAYERS = [LayerShards(each, (("full", each),), (), finishes=(), rewrites=()) for each in range(SHARDS)]
PROMISED = {"full": SHARDS}


@pytest.fixture
def ticket() -> Ticket:
    return Ticket(OBJECTS, SHARDS, durable=False)


@pytest.fixture
def load(ticket: Ticket) -> RunningLoad:
    handle: Any = SimpleNamespace(
        ticket=ticket, together=1, small=False, cancel=lambda: ticket.settle_rest(ResultCode.CANCELLED)
    )
    return RunningLoad(StepLoad("r", {"full": handle}))


def left_s() -> float:
    return 0.0


def failed(load: RunningLoad) -> dict[str, list[bool]]:
    return {row: mask.tolist() for row, mask in load.finish(PROMISED, left_s).items()}


def test_shards_that_landed_together_are_asked_about_once(load: RunningLoad, ticket: Ticket) -> None:
    ticket.settle([0, 1], ResultCode.OK)
    with mock.patch.object(Ticket, "wait", autospec=True, side_effect=Ticket.wait) as wait:
        for layer in LAYERS:
            load.wait(layer, left_s)
    assert wait.call_count == 1
    assert failed(load) == {}


def test_what_failed_beside_an_awaited_shard_has_failed(load: RunningLoad, ticket: Ticket) -> None:
    ticket.settle([0, 1], [[0, 0, 0], [0, 0, ResultCode.MISS]])
    for layer in LAYERS:
        load.wait(layer, left_s)
    assert failed(load) == {"full": [False, True]}


def test_a_shard_that_has_not_landed_is_waited_for(load: RunningLoad, ticket: Ticket) -> None:
    ticket.settle([0, 1], ResultCode.OK, shards=slice(0, 1))
    ticket.settle([0], ResultCode.OK, shards=slice(1, 2))
    load.wait(LAYERS[0], left_s)
    assert [load.landed(layer) for layer in LAYERS] == [True, False, False]
    load.wait(LAYERS[1], left_s)
    ticket.settle([1], ResultCode.OK, shards=slice(1, 2))  # too late
    load.wait(LAYERS[2], left_s)
    assert failed(load) == {"full": [True, True]}


def test_a_layer_that_nobody_waited_for_fails_the_load_though_its_bytes_landed(
    load: RunningLoad, ticket: Ticket
) -> None:
    ticket.settle([0, 1], ResultCode.OK)
    for layer in (LAYERS[0], LAYERS[2]):
        load.wait(layer, left_s)
    assert failed(load) == {"full": [True, True]}
