"""Events on a device's stream, for copies that may begin only once a layer's kernels have run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from ucm_core.flow.handles import ComputeEvent

POLL_S = 50e-6
"""How often an event is asked while somebody waits a bounded time: torch can only wait without a bound."""


class DeviceModule(Protocol):
    """What is used of ``torch.cuda``, ``torch.npu`` and their like."""

    Event: Callable[[], Any]
    """An event with ``record(stream)``, ``query()`` and ``synchronize()``."""

    def current_stream(self, device: Any) -> Any:
        """The stream on which the engine enqueues now."""
        ...


class StreamEvent:
    """A `ComputeEvent` that was recorded on a stream."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the stream has reached it; False when it has not within ``timeout_s``."""
        if timeout_s is None:
            self._event.synchronize()
            return True
        deadline_s = time.monotonic() + timeout_s
        while not self._event.query():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(POLL_S)
        return True


def event_recorder(device: Any, *, module: DeviceModule | None = None) -> Callable[[], ComputeEvent | None]:
    """Return a function that records an event on the current stream of a ``torch.device``.

    On a CPU it returns None: what was called has run. ``module`` is torch's for this kind of device.
    """
    if device.type == "cpu":
        return lambda: None
    found = _module_of(device) if module is None else module

    def record() -> ComputeEvent:
        event = found.Event()
        event.record(found.current_stream(device))
        return StreamEvent(event)

    return record


def _module_of(device: Any) -> DeviceModule:
    import torch  # noqa: PLC0415 (only an engine on a device needs it, and has it)

    module: DeviceModule = torch.get_device_module(device)
    return module
