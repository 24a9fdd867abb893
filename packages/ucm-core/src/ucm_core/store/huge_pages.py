"""Whether the kernel gives huge pages to shared memory: a mount has a word for it, and so has the system."""

from __future__ import annotations

import re
from pathlib import Path

SYSTEM_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
MOUNTS = Path("/proc/self/mountinfo")

_GIVEN = frozenset({"always", "within_size", "advise", "force"})


def refusal(directory: Path | None) -> str | None:
    """Why shared memory under ``directory`` (None = without a file) gets none, in words; None = it may.

    Source: "Hugepages in tmpfs/shmem" of the kernel's transhuge.rst. ``deny`` and ``force`` of the system are
    for all, its other words for memory without a file; a mount has its own.
    """
    system = _system()
    if directory is None or system in {"deny", "force"}:
        return None if system in _GIVEN else f"{SYSTEM_SETTING} says {system}"
    mount = _mount(directory)
    if mount in _GIVEN:
        return None
    return f"{directory} is mounted with huge={mount}; remount it with huge=within_size"


def _system() -> str:
    chosen = re.search(r"\[(\w+)\]", _read(SYSTEM_SETTING))
    return chosen[1] if chosen else "nothing"


def _mount(directory: Path) -> str:
    """The word of the mount at ``directory``, the last one there; ``never`` is the kernel's default."""
    word = "never"
    for line in _read(MOUNTS).splitlines():
        fields = line.split()
        if fields[4] == str(directory):
            option = re.search(r"(?:^|,)huge=(\w+)", fields[-1])
            word = option[1] if option else "never"
    return word


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
