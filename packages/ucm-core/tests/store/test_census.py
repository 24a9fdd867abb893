"""A census lists every object once, by family, and nothing else."""

from __future__ import annotations

import os
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_core.ops import metrics
from ucm_core.store.census import Census

NAMESPACES = ("ab" * 16, "cd" * 16)


def put(root, number, *, segment="hx", row="row", namespace=0, size=10, used_s=1_700_000_000):
    name = f"{number:032x}"
    path = root / NAMESPACES[namespace] / row / name[:3] / f"{name}.{segment}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (0, used_s))
    return path


def listed(root, slice_s=10.0):
    census = Census(root)
    while census.advance(slice_s):
        pass
    return census


def found(root, slice_s=10.0):
    """What a census says, as a dict."""
    census = listed(root, slice_s)
    families = census.families()
    return {
        (*census.place_of(n), int.from_bytes(bytes(name), "big")): (used // 10**9, size)
        for n, (name, used, size) in enumerate(
            zip(families.names, families.used_ns.tolist(), families.sizes.tolist(), strict=True)
        )
    }


OBJECTS = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3 << 116, 3 << 116 | 1, (1 << 128) - 1]),
        st.sampled_from("ab"),
        st.sampled_from(["full", "state"]),
        st.integers(0, 1),
        st.integers(0, 30),
        st.integers(1, 2_000_000_000),
    ),
    max_size=14,
    unique_by=lambda one: one[:4],
)


@settings(max_examples=30, deadline=None)
@given(objects=OBJECTS, slice_s=st.sampled_from([0.0, 10.0]))
def test_families_are_what_a_plain_list_says(tmp_path_factory, objects, slice_s):
    root = tmp_path_factory.mktemp("root")
    expected = {}
    for number, segment, row, namespace, size, used_s in objects:
        put(root, number, segment=segment, row=row, namespace=namespace, size=size, used_s=used_s)
        before = expected.get((NAMESPACES[namespace], row, number), (0, 0))
        expected[NAMESPACES[namespace], row, number] = max(before[0], used_s), before[1] + size
    now = time.time_ns() // 10**9
    assert found(root, slice_s) == {key: (min(used, now), size) for key, (used, size) in expected.items()}
    assert listed(root).total_bytes == sum(size for _, size in expected.values())


def test_spans_hold_their_rows_families(tmp_path):
    for number, row in ((1, "full"), (2, "full"), (3, "state")):
        put(tmp_path, number, row=row)
    (tmp_path / NAMESPACES[0] / "empty").mkdir()
    census = listed(tmp_path)
    spans = {row: census.span_of((NAMESPACES[0], row)) for row in ("full", "state", "empty", "none")}
    assert {row: span.stop - span.start for row, span in spans.items()} == {
        "full": 2, "state": 1, "empty": 0, "none": 0,
    }  # fmt: skip
    assert census.place_of(spans["state"].start) == (NAMESPACES[0], "state")


@pytest.mark.parametrize("age_s", [-(10**9), 10**11, 1 << 62])
def test_a_time_that_cannot_be_counts_as_the_nearest_that_can(tmp_path, age_s):
    path = put(tmp_path, 1)
    try:
        os.utime(path, (0, age_s))
    except OverflowError:
        pytest.skip("the file system has no such time")
    census = listed(tmp_path)
    assert census.families().used_ns.tolist() == [0 if age_s < 0 else census.began_ns]


def test_only_objects_in_their_folder_are_listed(tmp_path):
    path = put(tmp_path, 1)
    elsewhere = path.parents[1] / "fff"
    elsewhere.mkdir()
    for stranger in (
        path.with_name(f".{'a' * 32}.1-1.tmp"),
        path.with_name("README"),
        path.with_name(f"{2:032x}"),
        elsewhere / path.name,
        tmp_path / "not-a-namespace" / "row" / "000" / path.name,
        path.parents[1] / "0000" / path.name,
    ):
        stranger.parent.mkdir(parents=True, exist_ok=True)
        stranger.write_bytes(bytes(5))
    path.with_name(f"{3:032x}.hx").symlink_to(path)
    path.with_name(f"{4:032x}.hx").mkdir()
    os.mkfifo(path.with_name(f"{5:032x}.hx"))
    (path.parents[1] / "abc").symlink_to(path.parent)
    (tmp_path / ("ef" * 16)).symlink_to(tmp_path / NAMESPACES[0])
    assert found(tmp_path) == {(NAMESPACES[0], "row", 1): (1_700_000_000, 10)}
    assert listed(tmp_path).complete


def test_what_cannot_be_listed_is_passed_over_and_said(tmp_path, monkeypatch):
    put(tmp_path, 1)
    hidden = put(tmp_path, 3 << 116).parent
    scan = os.scandir

    def refuse(path):
        if os.fspath(path) == str(hidden):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    failures = metrics.ERRORS.labels(where="collector")
    before = failures._value.get()
    census = listed(tmp_path)
    assert len(census.families().sizes) == 1
    assert not census.complete
    assert failures._value.get() > before


def test_a_root_that_is_gone_has_nothing(tmp_path):
    assert found(tmp_path / "gone") == {}


def test_a_slice_of_no_time_lists_one_folder(tmp_path):
    for digit in range(5):
        put(tmp_path, digit << 116)
    census = Census(tmp_path)
    steps = 1
    while census.advance(0.0):
        steps += 1
    assert steps == 5 + 1


def test_a_family_takes_few_bytes(tmp_path):
    """32 bytes each in arrays, not an object: a million families are some 32 MiB."""
    for number in range(2000):
        put(tmp_path, number, size=0)
    tracemalloc.start()
    census = listed(tmp_path)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(census.families().sizes) == 2000
    assert kept < 2000 * 64 + 100_000
