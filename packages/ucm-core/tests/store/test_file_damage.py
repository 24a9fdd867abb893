"""Whatever happens to a file, load gives the right bytes or a miss; the damaged file goes and is healed."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objects import GEOMETRY, Payloads, make_keys, make_tier, open_shelf

from ucm_core.flow.ticket import ResultCode
from ucm_core.ops import metrics

OK, MISS, CORRUPT = ResultCode.OK, ResultCode.MISS, ResultCode.CORRUPT
SIZE = GEOMETRY.object_bytes


@pytest.fixture
def shelf(tmp_path, uring):
    shelf = open_shelf(tmp_path, uring=uring)
    shelf.write(make_keys(3))
    yield shelf
    shelf.root.close()


def dropped() -> float:
    return metrics.OBJECTS_DROPPED.labels(reason="corrupt")._value.get()


def assert_healed(shelf, key) -> None:
    """The damaged object is a miss, dropped and counted; its neighbours are served; a write heals it."""
    before = dropped()
    keys = make_keys(3)
    place = [bytes(each) for each in keys].index(bytes(key))
    expected = [OK] * 3
    expected[place] = CORRUPT
    assert shelf.read(keys) == expected
    assert dropped() == before + 1
    assert not os.path.lexists(shelf.file(key))
    assert shelf.read_one(key)[0] == MISS
    assert shelf.write(keys) == [OK] * 3
    assert shelf.read(keys) == [OK] * 3
    assert shelf.temporaries() == []


def flip(path, position: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        old = file.read(1)[0]
        file.seek(position)
        file.write(bytes([old ^ 1 << bit]))


FIELDS = {
    "magic": 0,
    "version": 8,
    "shards": 12,
    "stride": 16,
    "geometry": 24,
    "key": 56,
    "key end": 87,
    "row": 88,
}
PLACES = {
    "first checksum": 120,
    "unused checksum": 140,
    "zeroes": 3900,
    "page checksum": 4095,
    "payload": 4096,
}


@pytest.mark.parametrize("position", [*FIELDS.values(), *PLACES.values(), 4096 + 8192, SIZE - 1])
def test_one_flipped_bit_is_a_miss(position, shelf):  # case C-57
    flip(shelf.file(make_keys(3)[1]), position)
    assert_healed(shelf, make_keys(3)[1])


@pytest.fixture(scope="module")
def padded_shelf(tmp_path_factory):
    from ucm_core.store.geometry import Geometry

    shelf = open_shelf(tmp_path_factory.mktemp("root"), geometry=Geometry(2, 5000))
    yield shelf
    shelf.root.close()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 4096 + 2 * 8192 - 1), st.integers(0, 7))
def test_any_flipped_bit_is_a_miss_padding_included(padded_shelf, position, bit):
    key = make_keys(1)
    padded_shelf.write(key)
    flip(padded_shelf.file(key[0]), position, bit)
    assert padded_shelf.read(key) == [CORRUPT]
    assert padded_shelf.read(key) == [MISS]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, SIZE - 1, SIZE + 1, 10 * SIZE])
def test_a_wrong_size_is_a_miss(size, shelf):  # case C-56
    key = make_keys(3)[1]
    os.truncate(shelf.file(key), size)
    assert shelf.tier.exist(make_keys(3)).tolist() == [True, False, True]
    assert_healed(shelf, key)


def test_lookup_and_the_next_write_agree_about_a_short_file(shelf):  # case C-55
    key = make_keys(3)[1]
    os.truncate(shelf.file(key), SIZE - 1)
    assert shelf.write(key[None]) == [OK]
    assert shelf.file(key).stat().st_size == SIZE
    assert shelf.read_one(key)[0] == OK


def test_two_files_that_changed_places_are_two_misses(shelf):  # case C-57
    first, second = (shelf.file(key) for key in make_keys(3)[:2])
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    before = dropped()
    assert shelf.read(make_keys(3)) == [CORRUPT, CORRUPT, OK]
    assert dropped() == before + 2
    assert shelf.read(make_keys(3)) == [MISS, MISS, OK]


def test_a_copy_under_another_keys_name_is_a_miss(shelf):  # case C-57
    keys = make_keys(3)
    shelf.file(keys[1]).write_bytes(shelf.file(keys[0]).read_bytes())
    assert_healed(shelf, keys[1])


@pytest.mark.parametrize("change", [{"segment": "h0-2"}, {"row": "other"}])
def test_a_copy_under_another_segment_is_a_miss(change, shelf):
    """The row's seed is the same here; only the segment, or nothing but the folder, differs."""
    key = make_keys(3)[:1]
    other = make_tier(shelf.root, **change)
    target = (
        other.directory / shelf.file(key[0]).parent.name / f"{key[0, :16].tobytes().hex()}.{other.segment}"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(shelf.file(key[0]).read_bytes())
    into = Payloads(1, seed=None)
    expected = CORRUPT if "segment" in change else OK
    assert other.read(key, into.addresses).tolist() == [[expected] * 3]


def test_a_key_that_shares_only_its_name_is_a_miss_and_harms_nothing(shelf):
    key = make_keys(3)[:1]
    twin = key.copy()
    twin[0, 16:] ^= 1
    assert shelf.file(twin[0]) == shelf.file(key[0])
    assert shelf.read(twin) == [MISS]
    assert shelf.read(key) == [OK]


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "dangling link", "socket"])
def test_something_else_in_an_objects_place_is_a_miss(kind, shelf, tmp_path_factory, monkeypatch):
    """C-56: the worker lives, nothing behind a link is touched, the rest of the batch is served."""
    key = make_keys(3)[1]
    outside = tmp_path_factory.mktemp("outside") / "object"
    outside.write_bytes(shelf.file(key).read_bytes())
    shelf.file(key).unlink()
    put_in_place(kind, shelf.file(key), outside, monkeypatch)
    assert not shelf.tier.exist(key[None]).any()
    assert_healed(shelf, key)
    assert outside.stat().st_size == SIZE


def test_nine_bad_ones_fail_and_the_good_one_of_their_batch_is_served(shelf, tmp_path_factory, monkeypatch):
    """C-56, the whole batch."""
    keys = make_keys(10, seed=1)
    shelf.write(keys)
    outside = tmp_path_factory.mktemp("outside") / "object"
    outside.write_bytes(shelf.file(keys[0]).read_bytes())
    for key, size in zip(keys, [0, 1, SIZE - 1, SIZE + 1], strict=False):
        os.truncate(shelf.file(key), size)
    for key, kind in zip(keys[4:], ["directory", "link", "dangling link", "pipe", "socket"], strict=False):
        shelf.file(key).unlink()
        put_in_place(kind, shelf.file(key), outside, monkeypatch)
    assert shelf.read(keys) == [CORRUPT] * 9 + [OK]
    assert shelf.read(keys) == [MISS] * 9 + [OK]
    assert shelf.write(keys) == [OK] * 10
    assert shelf.read(keys) == [OK] * 10


def put_in_place(kind, path, outside, monkeypatch) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        import socket

        monkeypatch.chdir(path.parent)
        socket.socket(socket.AF_UNIX).bind(path.name)


def test_a_full_directory_in_an_objects_place_is_left_alone(shelf):
    key = make_keys(3)[1]
    shelf.file(key).unlink()
    shelf.file(key).mkdir()
    (shelf.file(key) / "mine").touch()
    assert shelf.read_one(key)[0] == CORRUPT
    assert shelf.write(key[None]) == [ResultCode.UNAVAILABLE]
    assert (shelf.file(key) / "mine").exists()
    assert shelf.temporaries() == []


class Trap:
    """Its pickle would make a file when it is loaded."""

    def __reduce__(self):
        return (os.mkdir, ("trapped",))


def test_a_pickle_in_an_objects_place_is_never_run(shelf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    key = make_keys(3)[1]
    shelf.file(key).write_bytes(pickle.dumps(Trap()).ljust(SIZE, b"\0"))
    assert_healed(shelf, key)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_flipped_bit_is_told_of_its_shard_and_the_others_are_a_miss(shard, shelf):
    keys, into = make_keys(3), Payloads(3, seed=None)
    flip(shelf.file(keys[1]), 4096 + shard * 8192 + 77)
    expected = [[OK] * 3, [CORRUPT if each == shard else MISS for each in range(3)], [OK] * 3]
    assert shelf.tier.read(keys, into.addresses).tolist() == expected


@pytest.mark.parametrize("shard", [0, 1, 2])
@pytest.mark.parametrize("bytes_left", [0, 1, 8191])
def test_a_file_cut_in_a_shard_tells_what_it_has_and_what_it_lacks(bytes_left, shard, shelf):
    key, into = make_keys(3)[1:2], Payloads(1, seed=None)
    os.truncate(shelf.file(key[0]), 4096 + shard * 8192 + bytes_left)
    expected = [[MISS] * shard + [CORRUPT] * (3 - shard)]
    assert shelf.tier.read(key, into.addresses).tolist() == expected


@pytest.mark.parametrize("size", [0, 1, 4095, SIZE + 1])
def test_a_file_without_a_whole_header_or_too_long_is_damage_in_every_shard(size, shelf):
    key, into = make_keys(3)[1:2], Payloads(1, seed=None)
    os.truncate(shelf.file(key[0]), size)
    assert shelf.tier.read(key, into.addresses).tolist() == [[CORRUPT] * 3]


def test_payload_of_a_neighbour_is_untouched_by_a_failed_read(shelf):
    keys, into = make_keys(3), Payloads(3, seed=None)
    flip(shelf.file(keys[1]), 5000)
    codes = shelf.tier.read(keys, into.addresses)
    assert codes.max(axis=1).tolist() == [OK, CORRUPT, OK]
    expected = Payloads(3).bytes
    np.testing.assert_array_equal(into.bytes[[0, 2]], expected[[0, 2]])


def test_a_link_in_a_folders_place_is_a_miss_and_what_is_behind_it_stays(shelf, tmp_path_factory):
    keys = make_keys(2)
    assert set(shelf.write(keys)) == {ResultCode.OK}
    outside = tmp_path_factory.mktemp("outside")
    for folder in list(shelf.tier.directory.iterdir()):
        moved = folder.rename(outside / folder.name)
        folder.symlink_to(moved)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in outside.glob("*/*")}
    assert set(shelf.read(keys)) == {ResultCode.MISS}  # a lookup believes a folder that it knows until then
    assert not shelf.tier.exist(keys).any()
    assert set(shelf.write(keys)) == {ResultCode.UNAVAILABLE}
    shelf.tier.touch(keys)
    assert not shelf.tier.drop(keys).any()
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in outside.glob("*/*")} == before
