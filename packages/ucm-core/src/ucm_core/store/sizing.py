"""How much shared memory each row's ring gets.

The budget is the user's, or 10 % of the memory that this process may use, at most half of what ``/dev/shm``
has left. Every row gets `MIN_SLOTS`; the rest is split by bytes per token, so that all rows hold about as
many tokens.
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

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
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
    """Slots per row within ``ring_bytes``; None = the default budget, and never less than `MIN_SLOTS`.

    Raises `ConfigError` with both numbers when a given budget cannot hold `MIN_SLOTS` of every row.

    >>> demands = {"full": RingDemand(8192, 64), "state": RingDemand(65536, 1024)}
    >>> ring_slots(demands, 1 << 20)
    {'full': 35, 'state': 11}
    """
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
    return min(int(RAM_FRACTION * memory_bytes()), shutil.disk_usage(_SHARED_MEMORY).free // 2)


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's where that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine
