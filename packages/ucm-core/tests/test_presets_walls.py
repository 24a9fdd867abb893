"""Knowledge of model families lives in ``spec/presets`` only; ``spec`` imports nothing above it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ucm_core.spec.presets import families

SOURCE = Path(__file__).parents[1] / "src" / "ucm_core"
PACKAGES = Path(__file__).parents[2]
PRESETS = SOURCE / "spec" / "presets"
FAMILY_WORDS = {re.match(r"[a-z]+", name).group() for name in families()} | set(families()) | {"granite"}
FAMILY = re.compile("|".join(sorted(FAMILY_WORDS)).replace("_", "[-_ ]?"), re.IGNORECASE)


def sources():
    files = [path for path in PACKAGES.glob("*/src/**/*.py") if not path.is_relative_to(PRESETS)]
    files += list(PACKAGES.glob("*/native/*.?pp"))
    assert len(files) > 10
    return files


def test_no_model_family_is_named_outside_the_presets():
    found = {str(path): FAMILY.findall(path.read_text()) for path in sources()}
    assert {path: words for path, words in found.items() if words} == {}


def test_the_search_for_family_names_would_find_one():
    assert {word.lower() for word in FAMILY.findall("Llama, gpt-oss and DeepSeek-V3")} >= {"llama", "gpt"}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            yield node.module


@pytest.mark.parametrize("path", sorted(SOURCE.glob("spec/**/*.py")), ids=lambda path: path.name)
def test_spec_imports_nothing_of_ours_but_errors(path):
    ours = {name for name in imported(path) if name.startswith("ucm_core")}
    assert all(name == "ucm_core.errors" or name.startswith("ucm_core.spec") for name in ours)


MODULES = sorted(path for path in PRESETS.glob("*.py") if not path.name.startswith("_"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_preset_builds_on_no_other_preset(path):
    ours = {name for name in imported(path) if name.startswith("ucm_core.spec.presets")}
    assert ours <= {"ucm_core.spec.presets._facts", "ucm_core.spec.presets._layers"}


def test_nothing_names_a_single_preset():
    named = {f"ucm_core.spec.presets.{path.stem}" for path in MODULES}
    assert len(named) > 10
    users = [path for path in sources() if path.suffix == ".py"]
    assert {str(path) for path in users if named & set(imported(path))} == set()


def test_spec_needs_neither_an_engine_nor_torch():
    script = (
        "import sys, importlib\n"
        "for name in ('torch', 'vllm', 'sglang', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "for name in ('keys', 'units', 'layout', 'model'):\n"
        "    importlib.import_module('ucm_core.spec.' + name)\n"
        "importlib.import_module('ucm_core.spec.presets').families()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
