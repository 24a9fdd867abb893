"""As `bench_engines`, with latents; a command of its own, as `torch_native` takes seconds for a prompt."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bench_engines import Turns, figures_of
from benchmarks.frame import Figure


def figures() -> Iterator[Figure]:
    """Yield the figures of the family with latents."""
    yield from figures_of(Turns("mla", rounds=3, computed_every=2))
