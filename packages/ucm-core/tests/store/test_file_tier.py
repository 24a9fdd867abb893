"""The file tier as its callers see it: what was written is read, or it is a miss."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objects import GEOMETRY, SEED, Payloads, make_keys, make_tier, open_shelf

from ucm_core import _native
from ucm_core.errors import StoreError
from ucm_core.flow.ticket import ResultCode
from ucm_core.store.files import FileTier
from ucm_core.store.geometry import PAGE_BYTES, Geometry

OK, MISS = ResultCode.OK, ResultCode.MISS


@pytest.fixture
def shelf(tmp_path, uring):
    shelf = open_shelf(tmp_path, uring=uring)
    yield shelf
    shelf.root.close()


def test_what_was_written_is_read(shelf):
    keys, payloads, into = make_keys(4), Payloads(4), Payloads(4, seed=None)
    assert shelf.tier.write(keys, payloads.addresses).tolist() == [OK] * 4
    assert shelf.tier.exist(keys).all()
    assert shelf.tier.read(keys, into.addresses).tolist() == [[OK] * 3] * 4
    np.testing.assert_array_equal(into.bytes, payloads.bytes)


@settings(max_examples=25, deadline=None)
@given(shape=st.tuples(st.integers(1, 20), st.integers(1, 20_000)), aligned=st.booleans())
def test_any_geometry_and_alignment_comes_back(shape, aligned, tmp_path_factory):
    geometry = Geometry(*shape)
    shelf = open_shelf(tmp_path_factory.mktemp("root"), geometry=geometry)
    payloads, into = Payloads(2, geometry=geometry), Payloads(2, geometry=geometry, seed=None)
    shift = 0 if aligned else 64
    flat = payloads.bytes.reshape(2, -1)
    flat[1] = 0
    flat[0, shift:] = flat[0, : flat.shape[1] - shift].copy() if shift else flat[0]
    key = make_keys(1)
    assert shelf.tier.write(key, payloads.addresses[:1] + shift).tolist() == [OK]
    assert not shelf.tier.read(key, into.addresses[:1] + shift).any()
    size = geometry.payload_bytes
    both = (each.bytes.reshape(-1)[shift : shift + size] for each in (payloads, into))
    np.testing.assert_array_equal(*both)
    shelf.root.close()


def test_the_file_is_what_the_format_says(shelf):
    """Magic, version, shape, geometry, key, row; checksums of shards and of the page; the shards."""
    key, payloads = make_keys(1), Payloads(1)
    shelf.tier.write(key, payloads.addresses)
    data = shelf.file(key[0]).read_bytes()
    assert len(data) == GEOMETRY.object_bytes == 28_672
    assert data[:24] == b"UCMOBJ01" + struct.pack("<IIQ", 1, 3, 8192)
    assert data[24:56] == GEOMETRY.digest
    assert data[56:88] == key.tobytes()
    sums = struct.unpack("<3I", data[120:132])
    assert list(sums) == [_native.crc32c(shard) for shard in payloads.bytes[0]]
    assert not any(data[132:4092])
    assert struct.unpack("<I", data[4092:4096])[0] == _native.crc32c(data[:4092])
    assert data[4096:] == payloads.bytes.tobytes()


def test_what_was_never_written_is_a_miss(shelf):
    assert shelf.read(make_keys(2)) == [MISS] * 2
    assert not shelf.tier.exist(make_keys(2)).any()
    shelf.write(make_keys(1))
    assert shelf.read(make_keys(3)) == [OK, MISS, MISS]


def test_an_empty_batch_does_nothing(shelf):
    none, nowhere = make_keys(0), np.zeros(0, dtype=np.int64)
    assert shelf.tier.write(none, nowhere).size == shelf.tier.read(none, nowhere).size == 0
    assert shelf.tier.exist(none).size == shelf.tier.drop(none).size == 0
    assert shelf.tier.keys().shape == (0, 32)


def test_what_exists_is_not_written_again(shelf):
    keys = make_keys(2)
    shelf.write(keys[:1])
    before = shelf.file(keys[0]).stat()
    assert shelf.write(keys, seed=5) == [OK, OK]
    assert shelf.file(keys[0]).stat().st_ino == before.st_ino
    assert shelf.tier.statistics().written == 2


def test_a_batch_gives_each_key_its_own_result(shelf):
    """Twice the same, present, new, failing, new: only the failing one fails, and it is tried again."""
    keys = make_keys(5)
    k1, k2, k3, k4, k5 = keys
    shelf.write(k2[None])
    shelf.file(k4).mkdir(parents=True)
    (shelf.file(k4) / "in the way").touch()
    codes = shelf.write(np.array([k1, k1, k2, k3, k4, k5]))
    assert codes == [OK, OK, OK, OK, ResultCode.UNAVAILABLE, OK]
    assert shelf.tier.statistics().written == 4
    assert shelf.temporaries() == []
    (shelf.file(k4) / "in the way").unlink()
    shelf.file(k4).rmdir()
    assert shelf.write(k4[None]) == [OK]
    assert shelf.read(keys) == [OK] * 5


def test_dropped_objects_are_gone_and_a_reader_that_has_one_open_reads_on(shelf):
    keys = make_keys(3)
    shelf.write(keys[:2])
    with shelf.file(keys[0]).open("rb") as file:
        assert shelf.tier.drop(keys).tolist() == [True, True, False]
        assert file.read(8) == b"UCMOBJ01"
    assert not shelf.tier.exist(keys).any()
    assert shelf.root.usage.used_bytes == 0


def test_touch_moves_the_time_of_what_exists(shelf):
    keys = make_keys(2)
    shelf.write(keys[:1])
    os.utime(shelf.file(keys[0]), (1, 1))
    shelf.tier.touch(keys)
    assert shelf.file(keys[0]).stat().st_mtime > 1e9
    assert not shelf.file(keys[1]).exists()


def test_all_keys_are_found_again(shelf):
    keys = make_keys(20)
    shelf.write(keys)
    foreign = shelf.file(keys[0]).parent
    (foreign / "note.txt").touch()
    (foreign / f".{'0' * 32}.1-1.tmp").touch()
    (foreign / f"{'0' * 32}.hx").write_bytes(b"short")
    found = shelf.tier.keys()
    assert sorted(map(bytes, found)) == sorted(map(bytes, keys))


@pytest.mark.parametrize(("slice_names", "sizes"), [(4096, [20]), (8, [8, 8, 4]), (5, [5, 5, 5, 5])])
def test_names_are_listed_in_bounded_slices(slice_names, sizes, shelf, monkeypatch):
    monkeypatch.setattr("ucm_core.store.files.SLICE_NAMES", slice_names)
    keys = make_keys(20)
    shelf.write(keys)
    folder = shelf.file(keys[0]).parent
    for foreign in ("note.txt", f".{'0' * 32}.1-1.tmp", f"{'0' * 32}.h0-2", f"{'0' * 31}.hx"):
        (folder / foreign).touch()
    (folder.parent / "0000").mkdir()
    (folder.parent / "0000" / f"{'0' * 32}.hx").touch()
    slices = list(shelf.tier.names())
    assert [len(names) for names in slices] == sizes
    assert sorted(map(bytes, np.concatenate(slices))) == sorted(map(bytes, keys[:, :16]))


def test_a_tier_without_files_has_no_names(shelf):
    assert list(shelf.tier.names()) == []
    shelf.write(make_keys(1))
    shelf.root.close()
    assert list(shelf.tier.names()) == []


def test_a_folder_that_cannot_be_listed_ends_the_enumeration(shelf, monkeypatch):
    shelf.write(make_keys(20))

    def broken(path):
        raise OSError(5, "EIO")

    monkeypatch.setattr("ucm_core.store.names._regular_files", broken)
    assert list(shelf.tier.names()) == []
    assert shelf.tier.statistics().failed == 1


def test_segments_and_rows_do_not_see_each_other(shelf):
    keys, payloads = make_keys(1), Payloads(1)
    shelf.tier.write(keys, payloads.addresses)
    for other in (make_tier(shelf.root, segment="h0-2"), make_tier(shelf.root, row="window-128")):
        assert not other.exist(keys).any()
        assert len(other.keys()) == 0
        assert other.write(keys, payloads.addresses).tolist() == [OK]
    assert len(shelf.tier.keys()) == 1


@pytest.mark.parametrize("segment", ["", "..", "a/b", "../x", "A"])
def test_a_segment_that_is_no_name_is_refused(segment, shelf):
    with pytest.raises(StoreError, match="segment"):
        FileTier(shelf.tier.directory, GEOMETRY, row_seed=SEED, segment=segment, root=shelf.root)


def test_synced_writes_are_whole_too(shelf):
    keys = make_keys(3)
    assert shelf.write(keys, sync=True) == [OK] * 3
    assert shelf.read(keys) == [OK] * 3


def test_another_process_reads_the_same_files(shelf, tmp_path):
    keys = make_keys(2)
    shelf.write(keys)
    other = open_shelf(tmp_path)
    assert other.read(keys) == [OK, OK]
    other.root.close()
    assert shelf.read(keys) == [OK, OK]


def test_a_cache_that_is_wiped_while_it_is_open_starts_anew(shelf):
    import shutil

    keys = make_keys(2)
    shelf.write(keys)
    shutil.rmtree(shelf.tier.directory.parent)
    assert shelf.read(keys) == [MISS, MISS]
    assert shelf.write(keys) == [OK, OK]
    assert shelf.read(keys) == [OK, OK]


# -- some shards of an object


@settings(max_examples=30)
@given(st.integers(0, 2), st.integers(1, 3), st.integers(0, 3))
def test_a_range_of_shards_is_what_the_whole_object_has_there(begin: int, count: int, damaged: int) -> None:
    shards = (begin, min(begin + count, GEOMETRY.shards))
    with tempfile.TemporaryDirectory() as directory:
        shelf = open_shelf(Path(directory))
        keys = make_keys(3)
        shelf.write(keys)
        if damaged < GEOMETRY.shards:
            with shelf.file(keys[1]).open("r+b") as file:
                file.seek(PAGE_BYTES + damaged * GEOMETRY.stride)
                file.write(bytes(8))
        shelf.file(keys[2]).unlink()
        into = Payloads(3, seed=None)
        codes = shelf.tier.read(keys, into.addresses, shards=shards)
        inside = slice(*shards)
        expected = np.full((3, GEOMETRY.shards), ResultCode.OK)
        expected[2] = ResultCode.MISS
        if shards[0] <= damaged < shards[1]:
            expected[1] = ResultCode.MISS
            expected[1, damaged] = ResultCode.CORRUPT
        assert codes.tolist() == expected[:, inside].tolist()
        right = Payloads(3, seed=0).bytes
        good = ~codes.any(axis=1)
        assert np.array_equal(into.bytes[good, inside], right[good, inside])
        assert not into.bytes[:, : shards[0]].any()
        assert not into.bytes[:, shards[1] :].any()
        shelf.root.close()


@pytest.mark.parametrize("shards", [(0, 0), (2, 1), (-1, 2), (0, 4)])
def test_what_is_no_range_of_shards_is_refused(tmp_path: Path, shards: tuple[int, int]) -> None:
    shelf = open_shelf(tmp_path)
    with pytest.raises(ValueError, match="no range of 3"):
        shelf.tier.read(make_keys(1), Payloads(1).addresses, shards=shards)
    shelf.root.close()
