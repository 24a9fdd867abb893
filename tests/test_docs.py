"""Documents that are made from code are current."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from repository import ROOT


def test_the_list_of_the_public_surface_is_current() -> None:
    command = [sys.executable, "docs/generate_api.py", "--check"]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("module", "pattern"),
    [
        ("config.py", r"(?m)^    ([a-z_]+): .*=.*$"),
        ("metrics.py", r'(?:Counter|Histogram)\(\s*"(ucm_[a-z_]+)"'),
    ],
)
def test_operations_name_every_setting_and_counter(module: str, pattern: str) -> None:
    source = (ROOT / "packages/ucm-core/src/ucm_core/ops" / module).read_text(encoding="utf-8")
    names = re.findall(pattern, source)
    document = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert names
    assert [name for name in names if f"`{name}" not in document] == []
