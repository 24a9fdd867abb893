"""Which files the repository has, by the room they are in."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def committable() -> tuple[Path, ...]:
    """Every file that git tracks or would take, relative to the root, in name order."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    return tuple(sorted(path for path in map(Path, filter(None, names)) if (ROOT / path).is_file()))


def is_test(path: Path) -> bool:
    """Whether a file is test code: tests folders, end-to-end stories, shipped conformance suites."""
    return bool({"tests", "testing", "e2e"} & set(path.parts))


def is_native(path: Path) -> bool:
    """Whether a file is C++."""
    return path.suffix in {".hpp", ".cc"}


def python_files() -> list[Path]:
    """All Python files."""
    return [path for path in committable() if path.suffix == ".py"]


def source_files() -> list[Path]:
    """The Python files that packages ship, without the conformance suites for tests."""
    return [path for path in python_files() if "src" in path.parts and not is_test(path)]


def checking_files() -> list[Path]:
    """The Python files that are test code."""
    return [path for path in python_files() if is_test(path)]
