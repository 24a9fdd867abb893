"""The package is light: whoever imports it has no engine yet."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import ucm_sglang

NEED_AN_ENGINE = {"connector", "linker", "transfers"}
MODULES = {path.stem for path in Path(ucm_sglang.__file__).parent.glob("[!_]*.py")} - NEED_AN_ENGINE


@pytest.mark.parametrize("module", ["ucm_sglang", *(f"ucm_sglang.{name}" for name in sorted(MODULES))])
def test_importing_it_imports_no_engine(module: str) -> None:
    source = f"import sys, {module}; print(sorted({{'torch', 'sglang'}} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_engine_of_these_tests_computes_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("sglang")
    assert torch.version.cuda is None
    wanted = {
        line.partition("==")[0]: line.strip().partition("==")[2]
        for line in (Path(__file__).parent / "engine.txt").read_text().splitlines()
        if "==" in line
    }
    assert {name: version(name) for name in wanted} == wanted


def test_it_tells_its_version() -> None:
    assert ucm_sglang.__version__ == "0.1.0"
