"""Every file that a commit could take: text, small, tidy, of no particular machine, with no secret in it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from repository import ROOT, committable, is_native

MAX_BYTES = 512 * 1024
GENERATED = {".so", ".o", ".pyc", ".whl", ".egg-info", ".safetensors", ".log", ".orig", ".rej", ".bin"}
ROOMS = {".ci", "benchmarks", "bridges", "docs", "e2e", "packages", "tests"}
TOP_FILES = {".gitignore", "LICENSE", "README.md", "pyproject.toml", "tox.ini"}

# Patterns are spelt in pieces, so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.}])/(?:work|root|Users|mnt|opt|home/(?!some)|tmp/lab)/?" + r"\b",
    "a registry host": r"\b(?:pypi|pythonhosted|npmjs|debian|crates|pytorch)" + r"\.(?:org|io)\b",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE" + r" KEY-----",
    "an access token": r"\b(?:ghp_|github_pat_|AKIA|hf_|sk-)" + r"[A-Za-z0-9]{16,}",
    "something left for later": r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    "a banner": r"^\s*(?:#|//)\s*[-=*#~]{4,}",
    "a conflict marker": r"^(?:<{7}|>{7}) ",
}
# A model is data: no code outside the presets may know one by name.
FAMILIES = (
    r"llama|qwen|mistral|mixtral|gpt.?oss|gemma|deepseek|granite"
    r"|falcon|bamba|nemotron|jamba|zamba|kimi|minimax|glm"
)


def texts(suffixes: set[str] | None = None) -> dict[str, str]:
    return {
        str(path): (ROOT / path).read_text(encoding="utf-8")
        for path in committable()
        if suffixes is None or path.suffix in suffixes
    }


def matches(pattern: str, text: str) -> list[int]:
    """Numbers of the lines that match."""
    return [number for number, line in enumerate(text.splitlines(), 1) if re.search(pattern, line)]


def test_files_live_in_the_rooms_of_the_house() -> None:
    strangers = [str(p) for p in committable() if p.parts[0] not in ROOMS and str(p) not in TOP_FILES]
    assert strangers == []


def test_nothing_generated_and_nothing_large() -> None:
    odd = [str(p) for p in committable() if p.suffix in GENERATED or (ROOT / p).stat().st_size > MAX_BYTES]
    assert odd == []


def test_text_is_utf8_with_plain_line_ends() -> None:
    for name, text in texts().items():
        assert "\r" not in text, name
        assert "\0" not in text, name
        assert not text or text.endswith("\n"), f"{name} does not end with a line end"
        assert not text.endswith("\n\n"), f"{name} ends with blank lines"
        assert not matches(r"[ \t]+$", text), f"{name} has white space at line ends"


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str) -> None:
    found = {name: lines for name, text in texts().items() if (lines := matches(FORBIDDEN[what], text))}
    assert found == {}


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a path of one machine", "root = '/" + "work/cache'"),
        ("a registry host", "see py" + "pi.org"),
        ("a private key", "-----BEGIN RSA PRIVATE" + " KEY-----"),
        ("an access token", "gh" + "p_0123456789abcdef0123"),
        ("something left for later", "# TO" + "DO: later"),
        ("a banner", "# ----" + "------"),
        ("a conflict marker", "<<<<" + "<<< HEAD"),
    ],
)
def test_each_pattern_catches(what: str, line: str) -> None:
    assert matches(FORBIDDEN[what], line) == [1]


def test_model_families_are_named_only_in_presets() -> None:
    found = {
        name: lines
        for name, text in texts().items()
        if "/src/" in name and "/presets/" not in name
        if (lines := matches(rf"(?i)(?<![a-z])(?:{FAMILIES})", text))
    }
    assert found == {}


def test_only_scripts_are_executable() -> None:
    for path in committable():
        executable = bool((ROOT / path).stat().st_mode & 0o111)
        script = (ROOT / path).read_text(encoding="utf-8").startswith("#!")
        assert executable == script, f"{path}: a run bit and #! go together"


def test_lines_fit_on_a_screen() -> None:
    wide = {
        name: lines
        for name, text in texts({".py", ".pyi", ".hpp", ".cc", ".toml", ".ini", ".yaml"}).items()
        if (lines := matches(r"^.{131,}$", text))
    }
    assert wide == {}


def test_the_native_core_needs_no_python() -> None:
    headers = [
        p for p in committable() if is_native(p) and "Python.h" in (ROOT / p).read_text(encoding="utf-8")
    ]
    assert headers == []


def project(path: Path) -> dict[str, object]:
    table = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
    assert isinstance(table, dict)
    return table


def packages() -> list[Path]:
    return [path.parent for path in committable() if path.name == "pyproject.toml" and len(path.parts) == 3]


def test_all_packages_have_one_version_and_adapters_pin_the_core() -> None:
    versions = {project(path)["version"] for path in packages()}
    assert len(versions) == 1
    pin = f"ucm-core=={versions.pop()}"
    for path in packages():
        dependencies = project(path).get("dependencies", [])
        assert isinstance(dependencies, list)
        assert project(path)["name"] == "ucm-core" or pin in dependencies, path


def test_all_packages_tell_their_version() -> None:
    for path in packages():
        module = ROOT / path / "src" / str(project(path)["name"]).replace("-", "_") / "__init__.py"
        assert f'__version__ = "{project(path)["version"]}"\n' in module.read_text(encoding="utf-8")


@pytest.mark.parametrize("field", ["license", "requires-python", "description"])
def test_all_packages_say_the_same(field: str) -> None:
    values = {str(project(path)[field]) for path in packages()}
    assert all(values)
    assert len(values) == (1 if field != "description" else len(packages()))


def test_tox_stays_small() -> None:
    assert len((ROOT / "tox.ini").read_text().splitlines()) < 150


def test_links_between_documents_lead_somewhere() -> None:
    for name, text in texts({".md"}).items():
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert "://" in target or (ROOT / name).parent.joinpath(target).exists(), f"{name}: {target}"


def test_test_modules_of_one_suite_have_different_names() -> None:
    suites = [
        [p.name for p in committable() if p.is_relative_to(path) and p.name.startswith("test_")]
        for path in packages()
    ]
    assert [name for names in suites for name in set(names) if names.count(name) > 1] == []
