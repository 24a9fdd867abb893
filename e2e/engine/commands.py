"""How a runner talks to the harness: one JSON command a line on stdin, one JSON line back per command.

Answers go to a descriptor of their own, because engines print. The end of the input ends the process, as a
script would end.
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]


def answer_commands(runner: object) -> None:
    """Answer commands until the input ends: each is a method of `runner`, from the command to the answer.

    The descriptor for the answers is the program's first argument; the first says that the runner is there.
    """
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with os.fdopen(descriptor, "w", buffering=1) as answers:
        answers.write(json.dumps({"pid": os.getpid()}) + "\n")
        for line in sys.stdin:
            command = json.loads(line)
            answers.write(json.dumps(getattr(runner, command.pop("command"))(command)) + "\n")


def refusal(error: BaseException) -> Json:
    """The answer to a start that failed: every message of the exception chain.

    Its traceback holds the half-built engine alive; only its text may leave the frame that caught it.
    """
    return {"error": "\n".join(_chain(error))}


def margin(logprobs: Sequence[float]) -> float:
    """How far the likeliest token of a step is ahead of the next, of the two largest log-probabilities."""
    first, second = sorted(logprobs, reverse=True)[:2]
    return first - second


def _chain(error: BaseException | None) -> Iterable[str]:
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__
