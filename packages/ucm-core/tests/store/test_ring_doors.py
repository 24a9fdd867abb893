"""A ring region whose header holds anything (C-70): joined only as what it is, refused before any mapping."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rings import key, new_name, put, region_path, shared_ring, shows

from ucm_core.errors import StoreError
from ucm_core.store.ring import Ring

SLOTS_AT, BYTES_AT, CHECKED_BYTES = 12, 16, 56  # of the header: magic, version, slots, payload bytes, digest


@pytest.fixture(scope="module")
def living() -> Iterator[tuple[str, Ring]]:
    name = new_name()
    with shared_ring(name) as ring:
        put(ring, "a")
        yield name, ring


def write(name: str, content: bytes, *, at: int = 0) -> None:
    descriptor = os.open(region_path(name), os.O_RDWR)
    try:
        os.pwrite(descriptor, content, at)
    finally:
        os.close(descriptor)


def header(name: str) -> bytes:
    descriptor = os.open(region_path(name), os.O_RDONLY)
    try:
        return os.pread(descriptor, CHECKED_BYTES, 0)
    finally:
        os.close(descriptor)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=1, max_size=CHECKED_BYTES), st.data())
def test_any_other_header_is_refused(living: tuple[str, Ring], content: bytes, data: st.DataObject) -> None:
    name, ring = living
    right = header(name)
    write(name, content, at=data.draw(st.integers(0, CHECKED_BYTES - len(content))))
    wrong = header(name) != right
    try:
        if wrong:
            with pytest.raises(StoreError, match="in use"):
                shared_ring(name)
    finally:
        write(name, right)
    assert shows(ring, "a")


@pytest.mark.parametrize("slots", [0, 7, 9, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
@pytest.mark.parametrize("payload_bytes", [4096, 0, 1 << 40, (1 << 64) - 4096])
def test_numbers_that_are_not_the_files_are_refused(
    living: tuple[str, Ring], slots: int, payload_bytes: int
) -> None:
    name, _ = living
    right = header(name)
    write(name, slots.to_bytes(4, "little") + payload_bytes.to_bytes(8, "little"), at=SLOTS_AT)
    try:
        with pytest.raises(StoreError, match="in use"):
            shared_ring(name)
    finally:
        write(name, right)


@pytest.mark.parametrize("content", [b"\0", b"\xff" * 8192, b"UCMRING1" + b"\xff" * 100, b"UCMRING1"])
def test_what_nobody_lives_in_is_made_anew_whatever_it_holds(content: bytes) -> None:
    name = new_name()
    region_path(name).write_bytes(content)
    with shared_ring(name) as ring:
        assert not ring.lookup(key("a")[None]).any()
        put(ring, "a")
        assert shows(ring, "a")
