"""Events of device streams: on doubles, and their calls held against the torch that is installed."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest

from ucm_vllm.device_events import StreamEvent, event_recorder

CPU, DEVICE = types.SimpleNamespace(type="cpu"), types.SimpleNamespace(type="cuda", index=1)


class StreamDouble:
    """A stream: what is enqueued runs when the test says so."""

    def __init__(self) -> None:
        self.enqueued = 0
        self.run = 0


class EventDouble:
    """torch's event: reached once its stream has run what was enqueued before it."""

    def record(self, stream: StreamDouble) -> None:
        self.stream, self.after = stream, stream.enqueued

    def query(self) -> bool:
        self.stream.run += 1  # each look, the device has done one thing more
        return self.stream.run >= self.after

    def synchronize(self) -> None:
        self.stream.run = self.after


class DeviceDouble:
    """torch's module of a kind of device."""

    Event = EventDouble

    def __init__(self) -> None:
        self.stream = StreamDouble()

    def current_stream(self, device: object) -> StreamDouble:
        assert device is DEVICE
        return self.stream


@pytest.fixture
def device() -> DeviceDouble:
    return DeviceDouble()


def recorded(device: DeviceDouble, enqueued: int) -> StreamEvent:
    device.stream.enqueued = enqueued
    event = event_recorder(DEVICE, module=device)()
    assert isinstance(event, StreamEvent)
    return event


def test_a_cpu_has_no_events() -> None:
    assert event_recorder(CPU)() is None


def test_waiting_ends_when_the_stream_has_run_what_was_enqueued_before(device: DeviceDouble) -> None:
    event = recorded(device, 5)
    device.stream.enqueued = 1000  # what comes later does not matter
    assert event.wait(60)
    assert device.stream.run == 5


def test_waiting_without_a_bound_is_left_to_torch(device: DeviceDouble) -> None:
    assert recorded(device, 7).wait()
    assert device.stream.run == 7


def test_a_stream_that_does_not_come_so_far_in_time(device: DeviceDouble) -> None:
    event = recorded(device, 10**9)
    assert not event.wait(0)
    assert not event.wait(0.001)


def test_each_record_is_an_event_of_its_own(device: DeviceDouble) -> None:
    early, late = recorded(device, 1), recorded(device, 10**9)
    assert early.wait(0)
    assert not late.wait(0)


@pytest.fixture
def torch() -> Any:
    """The torch that the engine brings, if there is one here."""
    return pytest.importorskip("torch")


@pytest.mark.parametrize(("name", "arguments"), [("record", 1), ("query", 0), ("synchronize", 0)])
def test_torchs_events_take_these_calls(torch: Any, name: str, arguments: int) -> None:
    own, *given = range(1 + arguments)
    inspect.signature(getattr(torch.cuda.Event, name)).bind(own, *given)


def test_torch_is_asked_for_the_current_stream_by_device(torch: Any) -> None:
    inspect.signature(torch.cuda.current_stream).bind(torch.device("cuda", 1))


def test_torch_has_a_module_for_a_device(torch: Any) -> None:
    assert torch.get_device_module(torch.device("cuda", 0)) is torch.cuda


def test_torchs_cpu_has_no_events(torch: Any) -> None:
    assert event_recorder(torch.zeros(1).device)() is None
