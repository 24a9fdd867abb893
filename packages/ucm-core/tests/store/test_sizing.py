"""Ring sizes: a budget is a bound, every row gets its minimum, the rest goes by bytes per token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import ConfigError
from ucm_core.store import sizing
from ucm_core.store.sizing import (
    LEAST_SLOTS,
    LOOK_AHEAD_DEPTH,
    MAX_SLOTS,
    MIN_SLOTS,
    RingDemand,
    check_ring_bytes,
    default_ring_bytes,
    memory_bytes,
    ring_slots,
)

demands = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.builds(RingDemand, st.integers(1, 1000).map(lambda pages: 4096 * pages), st.integers(1, 4096)),
    min_size=1,
)


def slot_bytes(rows: dict[str, RingDemand]) -> int:
    return sum(row.slot_bytes for row in rows.values())


def taken_bytes(rows: dict[str, RingDemand], slots: dict[str, int]) -> int:
    return sum(slots[name] * row.slot_bytes for name, row in rows.items())


@given(demands, st.integers(1, 1 << 34))
def test_a_budget_that_is_given_holds_for_all_rows_or_is_refused(
    rows: dict[str, RingDemand], budget: int
) -> None:
    least = LEAST_SLOTS * slot_bytes(rows)
    if budget < least:
        with pytest.raises(ConfigError, match=rf"ring_bytes = {budget} is too small.*need {least}"):
            ring_slots(rows, budget)
        return
    slots = ring_slots(rows, budget)
    assert all(LEAST_SLOTS <= count <= MAX_SLOTS for count in slots.values())
    assert taken_bytes(rows, slots) <= budget


@given(demands, st.integers(0, 1 << 24))
def test_a_default_budget_holds_and_nobody_gets_a_ring_too_small(
    rows: dict[str, RingDemand], budget: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "default_ring_bytes", lambda: budget)
        slots = ring_slots(rows, None)
    assert slots.keys() == rows.keys()
    assert all(count == 0 or LEAST_SLOTS <= count <= MAX_SLOTS for count in slots.values())
    assert taken_bytes(rows, slots) <= budget
    without = [row.slot_bytes for name, row in rows.items() if not slots[name]]
    with_ring = {name: row for name, row in rows.items() if slots[name]}
    assert not without or LEAST_SLOTS * (slot_bytes(with_ring) + min(without)) > budget


@given(demands, st.integers(1, 1 << 34))
def test_everyone_has_the_minimum_when_the_budget_allows_it(rows: dict[str, RingDemand], spare: int) -> None:
    slots = ring_slots(rows, MIN_SLOTS * slot_bytes(rows) + spare)
    assert all(count >= MIN_SLOTS for count in slots.values())


def test_a_budget_of_nothing_is_no_ring_and_no_error() -> None:
    assert ring_slots({"a": RingDemand(4096, 64), "b": RingDemand(4096, 64)}, 0) == {"a": 0, "b": 0}


def test_the_least_is_twice_what_is_read_ahead() -> None:
    rows = {"a": RingDemand(4096, 64)}
    least = 2 * LOOK_AHEAD_DEPTH * slot_bytes(rows)
    assert ring_slots(rows, least) == {"a": 2 * LOOK_AHEAD_DEPTH}
    with pytest.raises(ConfigError, match=f"{2 * LOOK_AHEAD_DEPTH} objects of each row need {least}"):
        ring_slots(rows, least - 1)


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


def test_without_a_budget_large_objects_go_without_a_ring_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"large": RingDemand(1 << 30, 64), "small": RingDemand(1 << 20, 64)}
    monkeypatch.setattr(sizing, "default_ring_bytes", lambda: 1 << 30)
    slots = ring_slots(rows, None)
    assert slots["large"] == 0
    assert slots["small"] == (1 << 30) // rows["small"].slot_bytes


GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system of 100 GiB, with room everywhere; tests write its files."""
    monkeypatch.setattr(sizing, "_machine_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(sizing.region, "free_bytes", lambda _: 1 << 60)
    monkeypatch.setattr(sizing.region, "promised_bytes", lambda: 0)
    monkeypatch.setattr(sizing, "_MEMORY_INFO", tmp_path / "meminfo")
    for name in ("_CGROUP_LIMITS", "_CGROUP_USES"):
        paths = tuple(tmp_path / path.relative_to(sizing._GROUPS) for path in getattr(sizing, name))
        monkeypatch.setattr(sizing, name, paths)
    (tmp_path / "memory").mkdir()
    return tmp_path


def test_the_default_is_a_tenth_of_memory(system: Path) -> None:
    assert default_ring_bytes() == 10 * GIB


def test_the_default_is_at_most_half_of_the_shared_memory(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing.region, "free_bytes", lambda _: 60)
    assert default_ring_bytes() == 30


def test_what_other_rings_may_still_take_is_not_available(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (system / "meminfo").write_text("MemTotal: 104857600 kB\nMemAvailable: 8388608 kB\n")
    monkeypatch.setattr(sizing.region, "promised_bytes", lambda: 5 * GIB)
    assert default_ring_bytes() == 3 * GIB // 2


def test_without_shared_memory_there_is_a_default(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sizing.region, "DIRECTORY", system / "nowhere")
    assert 0 < default_ring_bytes() <= int(0.1 * memory_bytes())


def test_a_machine_that_is_nearly_full_is_left_alone(system: Path) -> None:
    (system / "meminfo").write_text("MemTotal: 104857600 kB\nMemAvailable: 4194304 kB\n")
    assert default_ring_bytes() == 2 * GIB


@pytest.mark.parametrize(
    ("limit", "use", "stat"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_control_group_limits_memory(system: Path, limit: str, use: str, stat: str) -> None:
    (system / limit).write_text(f"{20 * GIB}\n")
    assert (memory_bytes(), default_ring_bytes()) == (20 * GIB, 2 * GIB)
    (system / use).write_text(f"{19 * GIB}\n")
    assert default_ring_bytes() == GIB // 2
    (system / use).with_name("memory.stat").write_text(f"anon 1\n{stat} {GIB}\n")
    assert default_ring_bytes() == GIB


def test_a_control_group_without_a_limit_limits_nothing(system: Path) -> None:
    (system / "memory.max").write_text("max\n")
    (system / "memory.current").write_text(f"{99 * GIB}\n")
    assert default_ring_bytes() == 10 * GIB


def test_more_than_the_memory_is_refused_with_both_numbers(system: Path) -> None:
    check_ring_bytes(100 * GIB)
    with pytest.raises(ConfigError, match=rf"ring_bytes = {101 * GIB} is more than the {100 * GIB} bytes"):
        check_ring_bytes(101 * GIB)
