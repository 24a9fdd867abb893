"""Documents that are made from code are current."""

from __future__ import annotations

import subprocess
import sys

from repository import ROOT


def test_the_list_of_the_public_surface_is_current() -> None:
    command = [sys.executable, "docs/generate_api.py", "--check"]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
