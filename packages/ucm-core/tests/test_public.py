"""The public surface: complete, importable, its pure parts without a store or an engine."""

from __future__ import annotations

import doctest
import subprocess
import sys

import ucm_core

PURE = ("resolve_hit", "boundaries", "coverage", "PrefixChain", "ModelIdentity", "SpecTable")


def test_every_public_name_exists_and_is_documented() -> None:
    for name in ucm_core.__all__:
        assert getattr(ucm_core, name).__doc__, name


def test_names_are_sorted_and_unique() -> None:
    assert ucm_core.__all__ == sorted(set(ucm_core.__all__))


def test_the_pure_parts_are_public() -> None:
    assert set(PURE) <= set(ucm_core.__all__)


def test_the_example_runs() -> None:
    results = doctest.testmod(ucm_core)
    assert results.attempted > 8
    assert results.failed == 0


def test_no_engine_is_imported() -> None:
    program = (
        "import sys, ucm_core; print([name for name in ('torch', 'vllm', 'sglang') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout == "[]\n"
