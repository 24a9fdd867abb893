"""A process that hears the KV events of engines, as routers do."""

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from e2e.harness import EXIT_LIMIT_S, EngineSetup, engine_environment

SCRIPT = Path(__file__).parent / "engine" / "events_subscriber.py"

Event = dict[str, Any]
"""Fields of one of vLLM's events by name, `type` among them."""


class Subscriber:
    """Runs `engine/events_subscriber.py` while it is open as a context manager."""

    def __init__(self, setup: EngineSetup) -> None:
        self._process = subprocess.Popen(
            [setup.python, SCRIPT], stdout=subprocess.PIPE, env=engine_environment(setup), text=True
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.port = int(self._output.readline())
        """Where it listens on loopback."""
        self._events: list[Event] = []
        self._heard = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, enough: Callable[[list[Event]], bool], timeout_s: float) -> list[Event]:
        """All that it has heard, in order, once that is `enough`, or the time is over."""
        with self._heard:
            self._heard.wait_for(lambda: enough(self._events), timeout_s)
            return list(self._events)

    def _read(self) -> None:
        for line in self._output:
            with self._heard:
                self._events.append(json.loads(line))
                self._heard.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(EXIT_LIMIT_S)
        self._reader.join()
        self._output.close()
