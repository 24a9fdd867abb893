"""What the kernel's files say about huge pages of shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucm_core.store import huge_pages

SHM = Path("/dev/shm")
WORDS = ("always", "within_size", "advise", "never", "deny", "force")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huge_pages, "SYSTEM_SETTING", tmp_path / "shmem_enabled")
    monkeypatch.setattr(huge_pages, "MOUNTS", tmp_path / "mountinfo")
    return tmp_path


def choose(system: Path, word: str) -> None:
    line = " ".join(f"[{one}]" if one == word else one for one in WORDS)
    (system / "shmem_enabled").write_text(line + "\n")


def mount(system: Path, *options: str) -> None:
    lines = [f"{place} 24 0:23 / /dev/shm rw - tmpfs tmpfs {given}\n" for place, given in enumerate(options)]
    (system / "mountinfo").write_text("29 1 8:1 / / rw - ext4 /dev/vda rw\n" + "".join(lines))


@pytest.mark.parametrize("word", WORDS)
def test_memory_without_a_file_follows_the_system(system: Path, word: str) -> None:
    choose(system, word)
    refused = huge_pages.refusal(None)
    if word in {"never", "deny"}:
        assert refused == f"{system / 'shmem_enabled'} says {word}"
    else:
        assert refused is None


@pytest.mark.parametrize("word", ["always", "within_size", "advise"])
def test_a_mount_follows_its_own_option(system: Path, word: str) -> None:
    choose(system, "never")
    mount(system, f"rw,size=100k,huge={word}")
    assert huge_pages.refusal(SHM) is None


@pytest.mark.parametrize("options", [("rw,size=100k",), ("rw,huge=never",), ("rw,huge=always", "rw,size=1k")])
def test_a_mount_without_the_option_gives_none(system: Path, options: tuple[str, ...]) -> None:
    choose(system, "always")
    mount(system, *options)
    assert "/dev/shm is mounted with huge=never; remount it" in str(huge_pages.refusal(SHM))


def test_the_system_may_deny_or_force_them_everywhere(system: Path) -> None:
    mount(system, "rw,huge=always")
    choose(system, "deny")
    assert "says deny" in str(huge_pages.refusal(SHM))
    mount(system, "rw")
    choose(system, "force")
    assert huge_pages.refusal(SHM) is None


def test_a_kernel_without_them_says_nothing(system: Path) -> None:
    assert "says nothing" in str(huge_pages.refusal(None))
    assert "huge=never" in str(huge_pages.refusal(SHM))
