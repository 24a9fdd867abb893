"""The Python side of shim.c: build it, tell it where to strike, ask it what it counted."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "native"
FOR_EVER = (1 << 63) - 1
_TEXT_BYTES = 1 << 16


class Action(IntEnum):
    """What happens at a step; shim.c has the same list."""

    KILL = 1
    FAIL = 2
    """A library call answers with the errno `Strike.value`."""
    SHORT = 3
    """A transfer moves about half."""
    DELAY = 4
    """`Strike.value` milliseconds."""
    TORN = 5
    """A transfer moves about half, then the process is killed."""


@dataclass(frozen=True, slots=True)
class Strike:
    """Where to strike, and how."""

    step: str
    """A name, or the beginning of names and ``*``."""
    nth: int = 1
    action: Action = Action.KILL
    value: int = 0
    last: int | None = None
    """Strike from the `nth` to this time; None = only then."""

    @property
    def deadly(self) -> bool:
        """Whether the process ends there."""
        return self.action in {Action.KILL, Action.TORN}

    def is_over(self, counts: dict[str, int]) -> bool:
        """Whether it has happened and will not happen again."""
        return self.last is None and self.nth <= counts.get(self.step, 0)


def build(folder: Path) -> Path:
    """Compile the library into ``folder``."""
    library = folder / "shim.so"
    compiler = os.environ.get("CC", "cc")
    source = Path(__file__).with_name("shim.c")
    command = [compiler, "-std=gnu11", "-O1", "-Wall", "-shared", "-fPIC", source, "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    return library


def named_steps() -> frozenset[str]:
    """Every step that the native sources name."""
    marks = re.compile(r"UCM_STEP\((.*?)\);", re.DOTALL)
    calls = [call for path in NATIVE.glob("*.hpp") for call in marks.findall(path.read_text())]
    return frozenset(name for call in calls for name in re.findall(r'"([a-z_.]+)"', call))


class Shim:
    """The library that this process was started with."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def watch(self, *paths: os.PathLike[str]) -> None:
        """Count from now on; library calls only where they concern what begins with one of ``paths``."""
        for path in paths:
            self._library.ucm_shim_watch(os.fsencode(path))

    def strike(self, *strikes: Strike) -> None:
        """Add rules; the last that fits counts."""
        for strike in strikes:
            first, last = strike.nth, strike.nth if strike.last is None else strike.last
            self._library.ucm_shim_rule(
                strike.step.encode(), ctypes.c_long(first), ctypes.c_long(last), strike.action, strike.value
            )

    def clear(self) -> None:
        """Forget all rules and counts."""
        self._library.ucm_shim_clear()

    def counts(self) -> dict[str, int]:
        """How often each step was passed."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._library.ucm_shim_counts(text, ctypes.c_size_t(_TEXT_BYTES))
        lines = (line.split() for line in text.value.decode().splitlines())
        return {step: int(count) for step, count in lines}
