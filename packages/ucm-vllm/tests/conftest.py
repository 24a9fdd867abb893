"""Engines for tests of both halves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
from halves import Halves


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    """Make engines on one root; they are closed at the end."""
    made: list[Halves] = []

    def make(model: families.TinyModel = families.DENSE, **more: Any) -> Halves:
        made.append(Halves(model, tmp_path / "root", **more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
