"""Ring sizes: every row gets its minimum, the rest goes by bytes per token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import ConfigError
from ucm_core.store import sizing
from ucm_core.store.sizing import (
    MAX_SLOTS,
    MIN_SLOTS,
    RingDemand,
    default_ring_bytes,
    memory_bytes,
    ring_slots,
)

demands = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.builds(RingDemand, st.integers(1, 1000).map(lambda pages: 4096 * pages), st.integers(1, 4096)),
    min_size=1,
)


@given(demands, st.integers(0, 1 << 34))
def test_the_budget_holds_and_everyone_has_the_minimum(rows: dict[str, RingDemand], budget: int) -> None:
    least = MIN_SLOTS * sum(row.slot_bytes for row in rows.values())
    if budget < least:
        with pytest.raises(ConfigError, match=rf"ring_bytes = {budget} is too small.*need {least}"):
            ring_slots(rows, budget)
        return
    slots = ring_slots(rows, budget)
    assert all(MIN_SLOTS <= count <= MAX_SLOTS for count in slots.values())
    assert sum(slots[name] * row.slot_bytes for name, row in rows.items()) <= budget


def test_all_rows_hold_about_as_many_tokens() -> None:
    rows = {
        "full": RingDemand(1 << 20, 64),
        "small": RingDemand(1 << 14, 64),
        "state": RingDemand(1 << 22, 1024),
    }
    slots = ring_slots(rows, 1 << 34)
    tokens = [slots[name] * row.tokens for name, row in rows.items()]
    assert max(tokens) <= 1.1 * min(tokens)


def test_rows_of_tiny_objects_stop_at_the_most_slots() -> None:
    assert ring_slots({"tiny": RingDemand(4096, 64)}, 1 << 40) == {"tiny": MAX_SLOTS}


def test_without_a_budget_small_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "default_ring_bytes", lambda: 0)
    assert ring_slots({"large": RingDemand(1 << 30, 64)}, None) == {"large": MIN_SLOTS}


def test_the_default_is_a_tenth_of_memory_and_half_of_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing.shutil, "disk_usage", lambda _: sizing.shutil._ntuple_diskusage(100, 40, 60))
    assert default_ring_bytes() == 30
    monkeypatch.setattr(
        sizing.shutil, "disk_usage", lambda _: sizing.shutil._ntuple_diskusage(2**60, 0, 2**60)
    )
    assert default_ring_bytes() == int(0.1 * memory_bytes())


@pytest.mark.parametrize(("text", "limited"), [("4096\n", True), ("max\n", False)])
def test_a_control_group_limits_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, limited: bool
) -> None:
    (tmp_path / "memory.max").write_text(text)
    monkeypatch.setattr(sizing, "_CGROUP_LIMIT", tmp_path / "memory.max")
    assert (memory_bytes() == 4096) is limited
    monkeypatch.setattr(sizing, "_CGROUP_LIMIT", tmp_path / "none")
    assert memory_bytes() > 4096
