"""How much shared memory each row's ring gets.

The budget is the user's, or 10 % of the memory that this process may use, at most half of what is available
of it now and half of what ``/dev/shm`` has left: a ring takes its memory when it is opened. Every row gets
`MIN_SLOTS`; the rest is split by bytes per token, so that all rows hold about as many tokens.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ucm_core.errors import ConfigError

MIN_SLOTS = 8
MAX_SLOTS = 1 << 16
"""More would make scans of the ring slow; rows of tiny objects meet it."""
RAM_FRACTION = 0.1
SLOT_OVERHEAD_BYTES = 512
"""State, key, index and reference counters of one slot, rounded up."""

_UNBOUNDED = 1 << 62
_MEMORY_INFO = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_CGROUP_LIMITS = (_GROUPS / "memory.max", _GROUPS / "memory/memory.limit_in_bytes")  # versions 2 and 1
_CGROUP_USES = (_GROUPS / "memory.current", _GROUPS / "memory/memory.usage_in_bytes")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the one place where shared memory is


@dataclass(frozen=True, slots=True)
class RingDemand:
    """What one row asks of its ring."""

    payload_bytes: int
    """Bytes of one object."""
    tokens: int
    """Tokens that one object stands for."""

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot."""
        return self.payload_bytes + SLOT_OVERHEAD_BYTES


def ring_slots(demands: Mapping[str, RingDemand], ring_bytes: int | None) -> dict[str, int]:
    """Slots per row within ``ring_bytes``; 0 = none, None = the default budget, never less than `MIN_SLOTS`.

    Raises `ConfigError` with both numbers when a given budget cannot hold `MIN_SLOTS` of every row.

    >>> demands = {"full": RingDemand(8192, 64), "state": RingDemand(65536, 1024)}
    >>> ring_slots(demands, 1 << 20)
    {'full': 43, 'state': 10}
    """
    if ring_bytes == 0:
        return dict.fromkeys(demands, 0)
    least_bytes = MIN_SLOTS * sum(demand.slot_bytes for demand in demands.values())
    if ring_bytes is not None and ring_bytes < least_bytes:
        raise ConfigError(
            f"ring_bytes = {ring_bytes} is too small: {MIN_SLOTS} objects of each row need {least_bytes};"
            " raise it, or leave it out"
        )
    spare_bytes = max(0, (default_ring_bytes() if ring_bytes is None else ring_bytes) - least_bytes)
    bytes_per_token = {name: demand.slot_bytes / demand.tokens for name, demand in demands.items()}
    share = {
        name: spare_bytes * rate / sum(bytes_per_token.values()) for name, rate in bytes_per_token.items()
    }
    return {
        name: min(MAX_SLOTS, MIN_SLOTS + int(share[name] // demand.slot_bytes))
        for name, demand in demands.items()
    }


def default_ring_bytes() -> int:
    """The budget when the user gives none."""
    return min(int(RAM_FRACTION * memory_bytes()), available_bytes() // 2, _shared_bytes() // 2)


def check_ring_bytes(ring_bytes: int) -> None:
    """Raise `ConfigError` for more than this process may use: the system would end it instead of refusing."""
    if ring_bytes > memory_bytes():
        raise ConfigError(
            f"ring_bytes = {ring_bytes} is more than the {memory_bytes()} bytes of memory that there are;"
            " give less, or leave it out"
        )


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's where that is less."""
    return min(_machine_bytes(), *map(_read_number, _CGROUP_LIMITS))


def available_bytes() -> int:
    """Memory that can be taken now without pushing anybody out, as the kernel estimates it."""
    lines = (line.split() for line in _read(_MEMORY_INFO).splitlines())
    machine = [int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"]
    groups = (
        _read_number(limit) - _read_number(use, absent=0) + _reclaimable(use.with_name("memory.stat"))
        for limit, use in zip(_CGROUP_LIMITS, _CGROUP_USES, strict=True)
    )
    return max(0, min(*machine, _machine_bytes(), *groups))


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _shared_bytes() -> int:
    """What ``/dev/shm`` has left; without one a ring is private memory, and nothing bounds it here."""
    try:
        return shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:
        return _UNBOUNDED


def _reclaimable(path: Path) -> int:
    """Bytes of files that a control group could give up at once: they count as used, but stop nobody."""
    lines = (line.split() for line in _read(path).splitlines())
    return sum(int(words[1]) for words in lines if words[0] in {"inactive_file", "total_inactive_file"})


def _read_number(path: Path, *, absent: int = _UNBOUNDED) -> int:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else absent


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
