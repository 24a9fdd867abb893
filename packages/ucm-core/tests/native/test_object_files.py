"""The native calls on files: what they refuse before any file is touched, and what they say."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from ucm_core import _native

PAGE = 4096
SHAPE = (bytes(32), 1, PAGE)
KEYS = np.zeros((1, 32), dtype=np.uint8)
NAME = "000/" + "0" * 32 + ".hx"
TEMPORARY = b".w.1.tmp"


@pytest.fixture
def payload():
    return np.full(2 * PAGE, 7, dtype=np.uint8)


def files(directory, *, segment=b"hx", row=bytes(32), shape=SHAPE) -> _native.ObjectFiles:
    return _native.ObjectFiles(os.fsencode(directory), segment, row, shape)


def write(directory, payload, *, temporary=TEMPORARY, keys=KEYS, **changes) -> int:
    addresses = np.array([payload.ctypes.data])
    return int(files(directory, **changes).write(keys, addresses, [temporary], direct=True)[0])


def read(directory, payload, *, keys=KEYS, **changes) -> int:
    addresses = np.array([payload.ctypes.data])
    return int(files(directory, **changes).read(keys, addresses, direct=True)[0, 0])


def test_an_object_goes_round(tmp_path, payload):
    assert write(tmp_path, payload) == 0
    into = np.zeros_like(payload)
    assert read(tmp_path, into) == 0
    assert into[:PAGE].all()
    assert not into[PAGE:].any()


@pytest.mark.parametrize("segment", [b"", b".", b"..", b"../x", b"a/b", b"a\0b", b"/"])
def test_a_segment_that_leaves_its_folder_is_refused(segment, tmp_path):
    with pytest.raises(ValueError, match="segment is not a plain file name"):
        files(tmp_path, segment=segment)


def test_a_segment_is_bounded(tmp_path, payload):
    assert write(tmp_path, payload, segment=b"s" * 64) == 0
    with pytest.raises(ValueError, match="65 bytes, more than 64"):
        files(tmp_path, segment=b"s" * 65)


def test_the_name_is_the_first_half_of_the_key(tmp_path, payload):
    key = np.arange(0xF0, 0xF0 + 32, dtype=np.int64).astype(np.uint8)[None]
    assert write(tmp_path, payload, keys=key) == 0
    digits = key[0, :16].tobytes().hex()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")] == [f"{digits[:3]}/{digits}.hx"]


@pytest.mark.parametrize("name", [b"", b"..", b"../x", b"a/b", b"a\0"])
def test_a_temporary_that_leaves_its_folder_is_refused(name, tmp_path, payload):
    with pytest.raises(ValueError, match="plain file name"):
        write(tmp_path, payload, temporary=name)
    with pytest.raises(ValueError, match="plain file name"):
        _native.probe_direct(os.fsencode(tmp_path), name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"shape": (bytes(31), 1, PAGE)}, "32 and 31 bytes"),
        ({"row": bytes(33)}, "33 and 32 bytes"),
        ({"shape": (bytes(32), 0, PAGE)}, r"shards 0 is not in \[1, 896\]"),
        ({"shape": (bytes(32), 897, PAGE)}, "shards 897"),
        ({"shape": (bytes(32), 1, 100)}, "stride 100 is not a positive multiple of 4096"),
        ({"shape": (bytes(32), 1, -PAGE)}, "stride -4096"),
        ({"keys": np.zeros((2, 32), dtype=np.uint8)}, "2 keys and 1 payloads"),
    ],
)
@pytest.mark.parametrize("call", [read, write])
def test_a_batch_that_makes_no_sense_is_refused_with_the_numbers(call, wrong, words, tmp_path, payload):
    with pytest.raises(ValueError, match=words):
        call(tmp_path, payload, **wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keys", [np.zeros((1, 31), dtype=np.uint8), np.zeros((1, 32), dtype=np.int8)])
def test_keys_of_another_shape_are_never_converted(keys, tmp_path, payload):
    with pytest.raises(TypeError):
        read(tmp_path, payload, keys=keys)


def test_a_directory_that_is_not_there_is_a_miss_to_readers_and_an_error_to_writers(tmp_path, payload):
    assert read(tmp_path / "no", payload) == 1
    assert write(tmp_path / "no", payload) == -errno.ENOENT
    assert files(tmp_path / "no").stat(KEYS).tolist() == [0]
    assert files(tmp_path / "no").touch(KEYS).tolist() == [0]


def test_a_temporary_of_somebody_else_is_not_overwritten_and_not_removed(tmp_path, payload):
    (tmp_path / "000").mkdir()
    other = tmp_path / "000" / os.fsdecode(TEMPORARY)
    other.write_text("mine")
    assert write(tmp_path, payload) == -errno.EEXIST
    assert other.read_text() == "mine"


def test_a_folder_that_is_a_file_is_a_miss_to_readers_and_an_error_to_writers(tmp_path, payload):
    (tmp_path / "000").write_text("mine")
    assert read(tmp_path, payload) == 1
    assert write(tmp_path, payload) == -errno.ENOTDIR
    assert (tmp_path / "000").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "folder", "short", "long", "none"])
def test_only_whole_regular_files_are_present(kind, tmp_path, payload):
    write(tmp_path, payload)
    assert files(tmp_path).stat(KEYS).tolist() == [1]
    path = tmp_path / NAME
    moved = path.rename(path.with_name("moved"))
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "folder":
        path.mkdir()
    elif kind != "none":
        path.write_bytes(bytes(2 * PAGE + (1 if kind == "long" else -1)))
    assert files(tmp_path).stat(KEYS).tolist() == [0]


def test_a_lookup_needs_no_more_than_the_names(tmp_path, payload):
    write(tmp_path, payload)
    assert files(tmp_path).stat(np.ascontiguousarray(KEYS[:, :16])).tolist() == [1]
    for call in (files(tmp_path).stat, files(tmp_path).touch):
        with pytest.raises(ValueError, match="15 bytes, fewer than 16"):
            call(np.ascontiguousarray(KEYS[:, :15]))


def test_a_lookup_never_leaves_by_a_folder_that_was_a_link_at_first(tmp_path, payload):
    inside = tmp_path / "inside"
    inside.mkdir()
    write(tmp_path, payload)
    (inside / "000").symlink_to(tmp_path / "000")
    assert files(inside).stat(KEYS).tolist() == [0]


def test_a_folder_that_became_a_link_later_is_never_read(tmp_path, payload):
    """A lookup may believe the folder that it knows; what counts is that no load delivers it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    write(tmp_path, payload)
    known = files(tmp_path)
    assert known.stat(KEYS).tolist() == [1]
    (tmp_path / "000").rename(outside / "000")
    (tmp_path / "000").symlink_to(outside / "000")
    assert known.read(KEYS, np.array([payload.ctypes.data]), direct=True).tolist() == [[1]]
    assert known.touch(KEYS).tolist() == [0]
    assert known.stat(KEYS).tolist() == [0]


def test_what_was_not_used_for_long_is_absent_to_lookups_and_reads(tmp_path, payload):
    write(tmp_path, payload)
    os.utime(tmp_path / NAME, ns=(0, 1_000_000_005))
    known, addresses = files(tmp_path), np.array([payload.ctypes.data])
    for not_before_ns, there in [(0, 1), (1_000_000_005, 1), (1_000_000_006, 0)]:
        assert known.stat(KEYS, not_before_ns=not_before_ns).tolist() == [there]
        codes = known.read(KEYS, addresses, direct=True, not_before_ns=not_before_ns)
        assert codes.tolist() == [[1 - there]]
    assert (tmp_path / NAME).exists()
    known.touch(KEYS)
    assert known.stat(KEYS, not_before_ns=1_000_000_006).tolist() == [1]


def test_the_probe_leaves_nothing_and_spares_what_is_there(tmp_path):
    assert _native.probe_direct(os.fsencode(tmp_path)) is True
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "taken").write_text("mine")
    assert _native.probe_direct(os.fsencode(tmp_path), b"taken") is False
    assert (tmp_path / "taken").read_text() == "mine"
    assert _native.probe_direct(os.fsencode(tmp_path / "no")) is False
