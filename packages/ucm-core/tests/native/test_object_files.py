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
NAME = b"000/" + b"0" * 32 + b".hx"
TEMPORARY = b".w.1.tmp"


@pytest.fixture
def payload():
    return np.full(2 * PAGE, 7, dtype=np.uint8)


def write(
    directory, payload, *, name=NAME, temporary=TEMPORARY, shape=SHAPE, row=bytes(32), keys=KEYS
) -> int:
    addresses = np.array([payload.ctypes.data])
    path = os.fsencode(directory)
    return int(_native.write_objects(path, [name], keys, row, shape, addresses, True, [temporary], False)[0])


def read(directory, payload, *, name=NAME, shape=SHAPE, row=bytes(32), keys=KEYS) -> int:
    addresses = np.array([payload.ctypes.data])
    return int(_native.read_objects(os.fsencode(directory), [name], keys, row, shape, addresses, True)[0])


def test_an_object_goes_round(tmp_path, payload):
    assert write(tmp_path, payload) == 0
    into = np.zeros_like(payload)
    assert read(tmp_path, into) == 0
    assert into[:PAGE].all()
    assert not into[PAGE:].any()


BAD_NAMES = [b"", b"plain", b"../x", b"a/..", b"a/.", b"/x", b"a/", b"a/b/c", b"../../x", b"a/b\0c", b"./x"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_leaves_its_folder_is_refused(name, tmp_path, payload):
    inside = tmp_path / "inside"
    inside.mkdir()
    calls = [
        lambda: write(inside, payload, name=name),
        lambda: read(inside, payload, name=name),
        lambda: _native.stat_objects(os.fsencode(inside), [name], 1),
        lambda: _native.touch_objects(os.fsencode(inside), [name]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="<folder>/<file>"):
            call()
    assert list(tmp_path.rglob("*")) == [inside]


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
        ({"keys": np.zeros((2, 32), dtype=np.uint8)}, "1 names, 2 keys and 1 payloads"),
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
    assert _native.stat_objects(os.fsencode(tmp_path / "no"), [NAME], 2 * PAGE).tolist() == [0]
    assert _native.touch_objects(os.fsencode(tmp_path / "no"), [NAME]).tolist() == [0]


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


def test_only_whole_regular_files_are_present(tmp_path, payload):
    write(tmp_path, payload)
    directory = os.fsencode(tmp_path)
    (tmp_path / "000" / "link").symlink_to(NAME.decode().removeprefix("000/"))
    (tmp_path / "000" / "folder").mkdir()
    present = [NAME, b"000/link", b"000/folder", b"000/none", b"001/none"]
    assert _native.stat_objects(directory, present, 2 * PAGE).tolist() == [1, 0, 0, 0, 0]
    assert _native.stat_objects(directory, [NAME], 2 * PAGE + 1).tolist() == [0]


def test_the_probe_leaves_nothing_and_spares_what_is_there(tmp_path):
    assert _native.probe_direct(os.fsencode(tmp_path)) is True
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "taken").write_text("mine")
    assert _native.probe_direct(os.fsencode(tmp_path), b"taken") is False
    assert (tmp_path / "taken").read_text() == "mine"
    assert _native.probe_direct(os.fsencode(tmp_path / "no")) is False
