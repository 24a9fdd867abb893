"""What another version, byte order or geometry left: a miss, one log line, never misread, never removed."""

from __future__ import annotations

import logging
import struct

import pytest
from objects import GEOMETRY, make_keys, open_shelf

from ucm_core import _native
from ucm_core.flow.ticket import ResultCode

OK, MISS, CORRUPT = ResultCode.OK, ResultCode.MISS, ResultCode.CORRUPT


@pytest.fixture
def shelf(tmp_path, uring):
    shelf = open_shelf(tmp_path, uring=uring)
    shelf.write(make_keys(3))
    yield shelf
    shelf.root.close()


def sealed(data: bytearray, order: str = "<") -> bytes:
    """With the page's checksum made right, in a byte order."""
    data[4092:4096] = struct.pack(f"{order}I", _native.crc32c(bytes(data[:4092])))
    return bytes(data)


def changed(data: bytes, position: int, value: bytes) -> bytearray:
    return bytearray(data[:position] + value + data[position + len(value) :])


def big_endian(data: bytes) -> bytes:
    """The same object as a machine of the other byte order stores it: all numbers turned round."""
    version, shards, stride = struct.unpack("<IIQ", data[8:24])
    turned = changed(data, 8, struct.pack(">IIQ", version, shards, stride))
    sums = struct.unpack(f"<{shards}I", data[120 : 120 + 4 * shards])
    return sealed(changed(bytes(turned), 120, struct.pack(f">{shards}I", *sums)), ">")


FOREIGN = {
    "next version": lambda data: sealed(changed(data, 8, struct.pack("<I", 2))),
    "next magic": lambda data: sealed(changed(data, 0, b"UCMOBJ02")),
    "next version, larger": lambda data: sealed(changed(data, 8, struct.pack("<I", 2))) + bytes(4096),
    "next version, smaller": lambda data: sealed(changed(data, 8, struct.pack("<I", 2)))[:8192],
    "other byte order": big_endian,
    "other shards": lambda data: sealed(changed(data, 12, struct.pack("<I", 2))),
    "other stride": lambda data: sealed(changed(data, 16, struct.pack("<Q", 4096))),
    "huge stride": lambda data: sealed(changed(data, 16, b"\xff" * 8)),
    "other geometry": lambda data: sealed(changed(data, 24, bytes(32))),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_object_is_a_miss_that_stays_and_is_said_once(kind, shelf, caplog):
    keys = make_keys(3)
    file = shelf.file(keys[1])
    file.write_bytes(content := FOREIGN[kind](file.read_bytes()))
    with caplog.at_level(logging.WARNING, logger="ucm_core.store"):
        for _ in range(2):
            assert shelf.read(keys) == [OK, MISS, OK]
    assert [record.message.count("another format version") for record in caplog.records] == [1]
    assert file.read_bytes() == content
    assert shelf.tier.exist(keys).tolist() == [True, False, True]
    assert shelf.tier.statistics().corrupt == 0


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_save_replaces_a_foreign_object(kind, shelf):
    keys = make_keys(3)
    file = shelf.file(keys[1])
    before = file.read_bytes()
    file.write_bytes(FOREIGN[kind](before))
    assert shelf.read(keys) == [OK, MISS, OK]
    assert shelf.write(keys) == [OK] * 3
    assert file.read_bytes() == before
    assert shelf.tier.exist(keys).all()
    assert shelf.read(keys) == [OK] * 3


@pytest.mark.parametrize("kind", ["next version", "other byte order"])
def test_a_bit_that_flipped_in_a_foreign_header_is_damage(kind, shelf):
    """Only of an intact page is it believed that it is of another version."""
    key = make_keys(3)[1]
    data = FOREIGN[kind](shelf.file(key).read_bytes())
    shelf.file(key).write_bytes(changed(data, 300, bytes([data[300] ^ 1])))
    assert shelf.read_one(key)[0] == CORRUPT
    assert not shelf.file(key).exists()


def test_a_tier_of_another_geometry_reads_nothing_and_removes_nothing(tmp_path):
    """The same row and key, once with four shards and once with three."""
    from ucm_core.store.geometry import Geometry

    theirs, key = open_shelf(tmp_path, geometry=Geometry(4, 8192)), make_keys(1)
    theirs.write(key)
    ours = open_shelf(tmp_path, geometry=GEOMETRY)
    assert ours.read(key) == [MISS]
    assert theirs.read(key) == [OK]
    assert ours.write(key) == [OK]
    assert theirs.read(key) == [MISS]
    assert ours.read(key) == [OK]
    for shelf in (ours, theirs):
        shelf.root.close()
