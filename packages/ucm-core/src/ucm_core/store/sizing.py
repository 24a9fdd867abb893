"""How much shared memory each row's ring gets.

The budget is the user's, or 10 % of the memory that this process may use, at most half of what is available
of it now and half of what ``/dev/shm`` has left. It is a bound: every row gets a few slots out of it, and
the rest is split by bytes per token, so that all rows hold about as many tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ucm_core.errors import ConfigError
from ucm_core.store import region

LOOK_AHEAD_DEPTH = 2
"""Units that are loaded before the one that is waited for is there."""
LEAST_SLOTS = 2 * LOOK_AHEAD_DEPTH
"""A ring of fewer evicts what was read ahead before it is used: such a row is better off without one."""
MIN_SLOTS = 8
"""What every row gets where the budget allows it."""
MAX_SLOTS = 1 << 16
"""More would make scans of the ring slow; rows of tiny objects meet it."""
RAM_FRACTION = 0.1
SLOT_OVERHEAD_BYTES = 640
"""State, key, index, reference counters and readiness of one slot, rounded up."""

_MEMORY_INFO = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_CGROUP_LIMITS = (_GROUPS / "memory.max", _GROUPS / "memory/memory.limit_in_bytes")  # versions 2 and 1
_CGROUP_USES = (_GROUPS / "memory.current", _GROUPS / "memory/memory.usage_in_bytes")


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
    """Slots per row within ``ring_bytes``; None = the default budget.

    Every row gets `MIN_SLOTS`, or `LEAST_SLOTS` where the budget is short of that. Where a default budget is
    short even of these, the rows of the largest objects get 0: they go without a ring, as all do for
    ``ring_bytes = 0``. Raises `ConfigError` with both numbers when a budget that the user gave is too short.

    >>> demands = {"full": RingDemand(8192, 64), "state": RingDemand(65536, 1024)}
    >>> ring_slots(demands, 1 << 20)
    {'full': 42, 'state': 10}
    """
    if ring_bytes == 0:
        return dict.fromkeys(demands, 0)
    least_bytes = LEAST_SLOTS * _slot_bytes(demands)
    if ring_bytes is not None and ring_bytes < least_bytes:
        raise ConfigError(
            f"ring_bytes = {ring_bytes} is too small: {LEAST_SLOTS} objects of each row need {least_bytes};"
            " raise it, or leave it out"
        )
    budget = default_ring_bytes() if ring_bytes is None else ring_bytes
    return dict.fromkeys(demands, 0) | _split(_affordable(demands, budget), budget)


def _slot_bytes(demands: Mapping[str, RingDemand]) -> int:
    """One slot of every row."""
    return sum(demand.slot_bytes for demand in demands.values())


def _affordable(demands: Mapping[str, RingDemand], budget: int) -> dict[str, RingDemand]:
    """As many rows as can have `LEAST_SLOTS` each, smaller objects first."""
    rows = dict(sorted(demands.items(), key=lambda item: item[1].slot_bytes))
    while LEAST_SLOTS * _slot_bytes(rows) > budget:
        rows.popitem()
    return rows


def _split(rows: Mapping[str, RingDemand], budget: int) -> dict[str, int]:
    """The same slots for all, and what is left by bytes per token."""
    floor = MIN_SLOTS if MIN_SLOTS * _slot_bytes(rows) <= budget else LEAST_SLOTS
    spare_bytes = budget - floor * _slot_bytes(rows)
    bytes_per_token = {name: demand.slot_bytes / demand.tokens for name, demand in rows.items()}
    share = {
        name: spare_bytes * rate / sum(bytes_per_token.values()) for name, rate in bytes_per_token.items()
    }
    return {
        name: min(MAX_SLOTS, floor + int(share[name] // demand.slot_bytes)) for name, demand in rows.items()
    }


def default_ring_bytes() -> int:
    """The budget when the user gives none."""
    free = max(0, available_bytes() - region.promised_bytes())
    return min(int(RAM_FRACTION * memory_bytes()), free // 2, _shared_bytes() // 2)


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
        return region.free_bytes(region.DIRECTORY)
    except OSError:
        return region.UNBOUNDED


def _reclaimable(path: Path) -> int:
    """Bytes of files that a control group could give up at once: they count as used, but stop nobody."""
    lines = (line.split() for line in _read(path).splitlines())
    return sum(int(words[1]) for words in lines if words[0] in {"inactive_file", "total_inactive_file"})


def _read_number(path: Path, *, absent: int = region.UNBOUNDED) -> int:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else absent


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
