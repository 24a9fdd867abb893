"""Run every benchmark of this folder: `python -m benchmarks [name ...]`; fails when a figure is too slow.

A benchmark is a module `bench_NAME.py` with a function `figures() -> Iterable[Figure]`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.frame import Figure


def run(names: list[str]) -> Iterator[Figure]:
    """Yield the figures of the named benchmarks, of all when none is named."""
    known = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    unknown = set(names) - set(known)
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in names or known:
        yield from importlib.import_module(f"benchmarks.bench_{name}").figures()


def main(names: list[str]) -> int:
    """Print the table; 0 when every figure keeps its limit."""
    missed = 0
    for figure in run(names):
        print(figure.line(), flush=True)
        missed += not figure.reached
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
