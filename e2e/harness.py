"""Start an engine as a process of its own and talk to it.

`Engine` is the handle: a subprocess that runs one of the runners in `engine/` with its engine's interpreter,
a log of its own, and a deadline on every answer. `Prompt` and `Answer` are what crosses.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ENGINES = Path(__file__).parent / "engine"
RENAMED = ENGINES / "renamed_models"
REPOSITORY = Path(__file__).parents[1]
START_LIMIT_S = 480.0
ANSWER_LIMIT_S = 300.0
EXIT_LIMIT_S = 60.0

Blocks = dict[tuple[str, int], str]
"""(layer, index of the block in its request) -> digest of the block's bytes in the engine."""


class EngineFailed(Exception):
    """The engine's process ended, or was too slow to answer; the message carries the end of its log."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a request."""

    name: str
    number: int
    """The engine's own id of the adapter, at least 1; local to a process."""
    path: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    tokens: tuple[int, ...]
    salt: str | None = None
    adapter: Adapter | None = None
    alphabet: tuple[int, ...] | None = None
    """The tokens of which the answer may consist; None: all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine made of a prompt, greedily."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each chosen token, in order."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens not computed, from the engine's own prefix cache or from the connector."""
    external_tokens: int
    """Prompt tokens that UCM served; vLLM's for the whole call this prompt was part of."""
    first_token_s: float | None
    """Time from arrival to the first token."""
    margins: tuple[float, ...] = ()
    """How far the likeliest token of each step was ahead of the next, as a difference of logits."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the engine computed."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Order:
    """A request of a drive."""

    prompt: Prompt
    arrive: int = 0
    """The engine's step before which it comes."""
    abort: int | None = None
    """Steps after that before which it is aborted; None: never."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an order."""

    tokens: tuple[int, ...]
    """Of the answer; as far as it came where the request was aborted."""
    cached_tokens: int
    """Prompt tokens not computed, from the engine's own prefix cache or from the connector."""
    aborted: bool
    preemptions: int
    blocks: tuple[tuple[int, ...], ...]
    """After each step that decoded: (tokens known, blocks held in each of the engine's groups)."""
    loaded_tokens: int | None
    """Where vLLM began to compute again after a load that failed; None where none did."""
    digests: Blocks
    """Of blocks full of prompt tokens, after the prefill, where the drive was told to look."""
    digested_s: float
    """When, by the engine's clock; 0 if never."""


@dataclass(frozen=True, slots=True)
class Driven:
    """What became of all orders of a drive."""

    outcomes: tuple[Outcome, ...]
    external_tokens: int
    """Prompt tokens that the connector served."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Which engine a process runs."""

    runner: Path
    variables: Mapping[str, str]
    """Of its environment, beyond those of all."""
    added: tuple[Path, ...]
    """Directories from which it imports first: test doubles, models."""


VLLM = EngineKind(
    ENGINES / "vllm_runner.py",
    {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
    (RENAMED,),
)
SGLANG = EngineKind(
    ENGINES / "sglang_runner.py",
    {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_EXTERNAL_MODEL_PACKAGE": "ucm_renamed_models"},
    (ENGINES / "sglang_doubles", RENAMED),
)


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """How the processes of a story are started."""

    python: Path
    """The interpreter of the engine's environment."""
    directory: Path
    """Where log files go, and where the engine runs."""
    prelude: str = ""
    """Shell commands, run before the engine in a mount namespace of its own; empty: no namespace."""
    multiprocess: bool = False
    """Scheduler and workers in processes of their own, vLLM's default; else one process."""
    kind: EngineKind = VLLM


def engine_environment(setup: EngineSetup) -> dict[str, str]:
    """The variables under which an engine runs on a CPU, without a network and without traces elsewhere."""
    names = ("PATH", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    home = str(setup.directory)
    ours = {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache", "HF_HUB_OFFLINE": "1"}
    ours["PYTHONPATH"] = os.pathsep.join(map(str, (*setup.kind.added, REPOSITORY)))
    if not setup.multiprocess:
        ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return kept | ours | dict(setup.kind.variables)


class Engine:
    """One engine process. As a context manager it is closed at the end, killed when the body raises."""

    def __init__(self, setup: EngineSetup, name: str) -> None:
        self.log = setup.directory / f"{name}.log"
        read_end, write_end = os.pipe()
        command = [str(setup.python), str(setup.kind.runner), str(write_end)]
        if setup.prelude:
            command = ["unshare", "-m", "sh", "-ec", f'{setup.prelude}\nexec "$@"', "sh", *command]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[write_end],
                env=engine_environment(setup), cwd=setup.directory, start_new_session=True,
            )  # fmt: skip
        os.close(write_end)
        self._answers = os.fdopen(read_end, "rb", buffering=0)
        self._received = b""
        self.pid: int | None = None

    def start(self, arguments: Mapping[str, Any]) -> Self:
        """Build the engine with `arguments` of its kind; raises EngineFailed when it refuses."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.kill)
            self.begin_start(arguments)
            self.end_start()
            undo.pop_all()
        return self

    def begin_start(self, arguments: Mapping[str, Any]) -> None:
        """Tell the process to build the engine and return at once; `end_start` waits for it."""
        self._wait_ready()
        self._send("start", arguments=dict(arguments))

    def end_start(self) -> None:
        """Wait for the engine of `begin_start`; raises EngineFailed when it refuses."""
        if (error := self._end_refusal()) is not None:
            raise self._failure("start", f"refused: {error}")

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """Try to build the engine; the text of its refusal, None when it started."""
        self.begin_start(arguments)
        return self._end_refusal()

    def _end_refusal(self) -> str | None:
        error = self._receive("start", START_LIMIT_S)["error"]
        return None if error is None else str(error)

    def generate(self, prompts: Sequence[Prompt], *, max_tokens: int = 8) -> list[Answer]:
        """Serve `prompts` one after the other."""
        self.begin_generate(prompts, max_tokens=max_tokens)
        return self.end_generate()

    def together(self, prompts: Sequence[Prompt], *, max_tokens: int = 8) -> list[Answer]:
        """Serve `prompts` in one batch."""
        prompts_sent = [asdict(prompt) for prompt in prompts]
        return _answers(self._ask("together", prompts=prompts_sent, max_tokens=max_tokens))

    def generate_apart(self, prompts: Sequence[Prompt], *, max_tokens: int = 8) -> list[Answer]:
        """Serve `prompts` one after the other, each with the engine's own prefix cache emptied before."""
        answers = []
        for prompt in prompts:
            self.forget()
            answers += self.generate([prompt], max_tokens=max_tokens)
        return answers

    def begin_generate(self, prompts: Sequence[Prompt], *, max_tokens: int = 8) -> None:
        """Send `prompts` and return at once; `end_generate` waits for the answers."""
        self._send("generate", prompts=[asdict(prompt) for prompt in prompts], max_tokens=max_tokens)

    def end_generate(self) -> list[Answer]:
        """The answers to `begin_generate`."""
        return _answers(self._receive("generate", ANSWER_LIMIT_S))

    def forget(self, *, connector: bool = False) -> None:
        """Empty the engine's own prefix cache; with `connector` the weights count as changed."""
        if not self._ask("forget", connector=connector)["done"]:
            raise EngineFailed("the engine did not empty its prefix cache")

    def update_weights(self, checkpoint: Path) -> None:
        """Replace the running engine's weights by those of a checkpoint of the same shape."""
        if not (answer := self._ask("update_weights", checkpoint=str(checkpoint)))["done"]:
            raise EngineFailed(f"the engine did not take the weights: {answer['message']}")

    def abort(self, prompt: Prompt, *, after_s: float, max_tokens: int = 8) -> tuple[int, ...]:
        """Serve `prompt` and abort it so long after it was sent; the tokens of its answer until then."""
        reply = self._ask("abort", prompt=asdict(prompt), max_tokens=max_tokens, after_s=after_s)
        return tuple(reply["tokens"])

    def observe(self, prompt: Prompt, *, max_tokens: int = 8) -> tuple[Answer, Blocks]:
        """Serve `prompt`, and look at every engine block full of its tokens once its prefill is done."""
        reply = self._ask("observe", prompt=asdict(prompt), max_tokens=max_tokens)
        return _answer(reply["answer"]), _blocks(reply["blocks"])

    def drive(self, orders: Sequence[Order], *, max_tokens: int = 8, look: bool = False) -> Driven:
        """Step the engine until all `orders` are done; with `look` their blocks are digested."""
        sent = [asdict(order) for order in orders]
        reply = self._ask("drive", orders=sent, max_tokens=max_tokens, look=look)
        return Driven(tuple(map(_outcome, reply["outcomes"])), reply["external_tokens"])

    def books(self) -> dict[str, int]:
        """What is held while nothing is served, by what it is; all zero when the books balance."""
        return {name: int(count) for name, count in self._ask("books").items()}

    def settle(self) -> None:
        """Let what was served be saved: in the ring and, of what has a place there, in files."""
        self.forget()
        if any(held := self.books().values()):
            raise EngineFailed(f"the engine still holds {held}")

    def counter(self, name: str, **labels: str) -> float:
        """The sum of the `name` samples whose labels include `labels`."""
        samples: list[tuple[str, dict[str, str], float]] = self._ask("counters")["counters"]
        return sum(value for found, its, value in samples if found == name and labels.items() <= its.items())

    def watch(self, seconds: float) -> None:
        """Wait for the engine's end for so long; raises EngineFailed if it comes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            raise self._failure("watch", f"ended with {self._process.returncode}")

    def log_text(self) -> str:
        """All that the engine printed so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the engine's whole process group."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End the engine with kill -9, everything it started; wait for its end."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        self._process.wait(EXIT_LIMIT_S)
        self._release()

    def close(self) -> None:
        """End the input, so that the engine ends as a script ends; raises EngineFailed when it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self._failure("close", f"did not end within {EXIT_LIMIT_S} s") from None
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)  # whatever it started and did not end
        self._release()
        if code != 0:
            raise self._failure("close", f"ended with {code}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.returncode is not None:
            return
        if kind is None:
            self.close()
        else:
            self.kill()

    def _release(self) -> None:
        self._answers.close()
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _wait_ready(self) -> None:
        if self.pid is None:
            self.pid = self._receive("import", START_LIMIT_S)["pid"]

    def _ask(self, command: str, **fields: Any) -> dict[str, Any]:
        self._send(command, **fields)
        return self._receive(command, ANSWER_LIMIT_S)

    def _send(self, command: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure(command, "has ended") from None

    def _receive(self, command: str, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._received:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            chunk = self._answers.read(1 << 20) if readable else b""
            if not chunk:
                raise self._failure(command, self._end_silent(limit_s, ended=bool(readable)))
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end_silent(self, limit_s: float, *, ended: bool) -> str:
        if ended:
            # It closed its answers: let it print why before it is killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_LIMIT_S)
        self.kill()
        return f"ended with {self._process.returncode}" if ended else f"gave no answer within {limit_s} s"

    def _failure(self, command: str, reason: str) -> EngineFailed:
        return EngineFailed(f"{command}: the engine {reason}\n{self.log_text()[-4000:]}")


def _answer(one: dict[str, Any]) -> Answer:
    rows = {name: tuple(one[name]) for name in ("tokens", "logprobs", "margins")}
    return Answer(**{**one, **rows})


def _blocks(found: list[tuple[str, int, str]]) -> Blocks:
    return {(layer, index): digest for layer, index, digest in found}


def _outcome(one: dict[str, Any]) -> Outcome:
    seen = {"tokens": tuple(one["tokens"]), "blocks": tuple(map(tuple, one["blocks"]))}
    return Outcome(**{**one, **seen, "digests": _blocks(one["digests"])})


def _answers(reply: dict[str, Any]) -> list[Answer]:
    return [_answer(one) for one in reply["answers"]]
