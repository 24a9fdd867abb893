"""All packages as a newcomer gets them: built as wheels, installed where there is no engine."""

from __future__ import annotations

import doctest
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["ucm-core", "ucm-position-key", "ucm-vllm", "ucm-sglang"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "torch"])
def test_there_is_no_engine_here(engine: str) -> None:
    assert importlib.util.find_spec(engine) is None


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_is_installed_from_a_wheel(package: str) -> None:
    distribution = importlib.metadata.distribution(package)
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    assert not origin.get("dir_info", {}).get("editable", False)
    assert "Wheel-Version" in (distribution.read_text("WHEEL") or "")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_comes_from_site_packages_and_is_typed(package: str) -> None:
    module = importlib.import_module(package.replace("-", "_"))
    folder = Path(str(module.__file__)).parent
    assert not {ROOT / "packages", ROOT / "bridges"} & {*folder.parents}
    assert (folder / "py.typed").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_no_tests(package: str) -> None:
    files = importlib.metadata.files(package) or []
    assert [str(file) for file in files if "tests" in file.parts] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_the_licence(package: str) -> None:
    files = importlib.metadata.files(package) or []
    (licence,) = (file for file in files if file.name == "LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()


def test_sglang_would_find_its_plugin() -> None:
    (found,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="ucm")
    assert found.load().__module__ == "ucm_sglang.weight_updates"


def test_the_example_of_the_readme_runs() -> None:
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
