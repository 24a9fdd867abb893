"""The doubles of the stories, so that a real SGLang can be imported on a machine with no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

DOUBLES = Path(__file__).parents[3] / "e2e" / "engine" / "sglang_doubles"


def install() -> None:
    """Make ``sgl_kernel`` and ``torchvision`` importable: the real ones, or else their doubles."""
    if str(DOUBLES) not in sys.path:
        sys.path.append(str(DOUBLES))
