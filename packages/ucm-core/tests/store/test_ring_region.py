"""Regions of shared memory: created, joined, left, refused, and never left behind (case C-61)."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rings import DIGEST, keys, new_name, processes, put, region_path, shared_ring, shows

from ucm_core import _native
from ucm_core.errors import NoSpace, StoreError
from ucm_core.store import region
from ucm_core.store.ring import Outcome, RingOptions


def leave_garbage(name: str) -> None:
    """A region whose only participant was killed."""
    with processes(name, 1) as (victim,):
        victim.call("put", "old")
        victim.call("claim", keys("half"))
    assert region_path(name).exists()


def test_two_rings_of_one_name_share_their_blocks(name: str) -> None:
    with shared_ring(name) as one, shared_ring(name) as two:
        put(one, "a")
        assert shows(two, "a")
        assert (one.participant, two.participant) == (0, 1)
        assert two.statistics().participants == 2


def mapped_regions() -> set[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in maps if str(region.DIRECTORY) in line}


def test_a_private_ring_has_no_file(name: str) -> None:
    before = mapped_regions()
    with shared_ring(None):  # type: ignore[arg-type]
        assert mapped_regions() <= before
    with shared_ring(name):
        assert str(region_path(name)) in mapped_regions()


def test_the_last_to_leave_removes_the_region(name: str) -> None:
    one, two = shared_ring(name), shared_ring(name)
    one.close()
    assert region_path(name).exists()
    two.close()
    assert not region_path(name).exists()


def test_a_process_that_ends_without_closing_leaves_nothing(name: str) -> None:
    there = f"rings.region.DIRECTORY = rings.Path({str(region.DIRECTORY)!r})"
    code = f"import rings; {there}; ring = rings.shared_ring({name!r}); rings.put(ring, 'a')"
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": path})
    assert not region_path(name).exists()


def test_only_its_user_may_read_a_region(name: str) -> None:
    with shared_ring(name):
        assert region_path(name).stat().st_mode & 0o777 == 0o600


def test_joining_with_another_number_of_slots_takes_the_number_there(name: str) -> None:
    with shared_ring(name, slots=8) as one, shared_ring(name, slots=1000) as two:
        assert two.slots == 8
        put(two, *range(8))
        assert shows(one, 7)


def test_0_slots_join_a_ring_that_lives_and_make_none(name: str) -> None:
    with pytest.raises(NoSpace, match=r"nobody lives in .*, and 0 slots make no ring"):
        shared_ring(name, slots=0)
    assert not region_path(name).exists()
    with shared_ring(name) as one, shared_ring(name, slots=0) as two:
        put(one, "a")
        assert shows(two, "a")
        assert two.slots == 8


def test_a_private_ring_of_0_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="slots 0 is not in"):
        shared_ring(None, slots=0)


def test_a_region_of_a_killed_process_is_made_anew(name: str) -> None:
    leave_garbage(name)
    with shared_ring(name, slots=16) as ring:
        assert ring.slots == 16
        assert ring.statistics().empty == 16


def test_a_region_of_a_killed_process_goes_when_another_is_opened(name: str) -> None:
    leave_garbage(name)
    with shared_ring(new_name()):
        assert not region_path(name).exists()


def test_a_living_region_is_not_swept(name: str) -> None:
    with processes(name, 1) as (other,):
        other.call("claim", keys("a"))
        assert region_path(name) not in region.sweep()
        assert other.call("statistics").loading == 1


def test_a_half_made_region_is_swept(name: str) -> None:
    region_path(name).write_bytes(b"")
    half = region_path(new_name())
    half.write_bytes(_native.RING_MAGIC)
    assert {region_path(name), half} <= set(region.sweep())


def test_what_is_not_ours_is_not_swept(name: str) -> None:
    region_path(name).write_bytes(b"somebody else's file under a name like ours")
    assert region_path(name) not in region.sweep()
    assert region_path(name).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_region_is_refused_and_kept(name: str) -> None:
    region_path(name).write_bytes(_native.RING_MAGIC)
    os.chown(region_path(name), 12345, 12345)
    with pytest.raises(StoreError, match=r"cannot be opened|belongs to user 12345, not to 0"):
        shared_ring(name)
    assert region_path(name).exists()


def test_a_link_is_refused(name: str) -> None:
    region_path(name).symlink_to("/etc/hostname")
    with pytest.raises(StoreError, match="cannot be opened as shared memory"):
        shared_ring(name)


@pytest.mark.parametrize("bad", ["", "a/b", "../a"])
def test_a_name_that_is_a_path_is_refused(bad: str) -> None:
    with pytest.raises(StoreError, match="plain file name"):
        shared_ring(bad)


def test_another_header_version_is_refused_with_both(name: str) -> None:
    with shared_ring(name):
        with region_path(name).open("r+b") as file:
            file.seek(8)
            file.write((77).to_bytes(4, "little"))
        with pytest.raises(StoreError, match=f"header version 77, not {_native.RING_VERSION}"):
            shared_ring(name)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"payload_bytes": 8192}, "payload bytes 4096, not 8192"),
        ({"geometry_digest": bytes(32)}, f"geometry digest {DIGEST.hex()}, not {bytes(32).hex()}"),
        ({"options": RingOptions(policy="lru")}, "policy clock, not lru"),
        ({"options": RingOptions(ttl_s=9.5)}, r"ttl_s \(0 = none\) 0, not 10"),
        ({"shards": 2}, "shards 1, not 2"),
    ],
)
def test_another_geometry_or_another_rule_is_refused_with_both(
    name: str, changed: dict[str, object], message: str
) -> None:
    with shared_ring(name) as living:
        put(living, "a")
        with pytest.raises(StoreError, match=message):
            shared_ring(name, **changed)
        assert shows(living, "a")
        assert living.statistics().participants == 1


def test_a_truncated_region_is_refused(name: str) -> None:
    with shared_ring(name):
        size = region_path(name).stat().st_size
        os.truncate(region_path(name), size + 4096)
        with pytest.raises(StoreError, match=f"file size {size + 4096}, not {size}"):
            shared_ring(name)


def test_too_little_shared_memory_is_refused_with_both_sizes(name: str) -> None:
    size = _native.ring_bytes(1 << 20, 1 << 30)
    with pytest.raises(NoSpace, match=rf"needs {size} bytes of shared memory, \d+ are free"):
        shared_ring(name, slots=1 << 20, payload_bytes=1 << 30)
    assert not region_path(name).exists()


def test_a_holder_of_the_region_that_does_not_go_on_stops_nobody(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = shared_ring(name)
    with region.enter(name):  # as a process that was stopped would
        monkeypatch.setattr(region, "LOCK_WAIT_S", 0.05)
        with pytest.raises(StoreError, match="does not go on"):
            shared_ring(name)
        monkeypatch.setattr(region, "LOCK_WAIT_S", 1e9)  # as long as a region may take to be made
        monkeypatch.setattr(region, "LEAVE_WAIT_S", 0.05)
        ring.close()
        assert region_path(name).exists()
    region.sweep()
    assert not region_path(name).exists()


@contextmanager
def held_by_one_who_was_stopped(name: str) -> Iterator[None]:
    """The exclusive lock of a ring, as a process that was stopped inside holds it."""
    descriptor = os.open(region_path(name), os.O_RDWR)
    lock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, _native.RING_PARTICIPANTS, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
    try:
        yield
    finally:
        os.close(descriptor)


def test_one_who_was_stopped_in_the_ring_stops_nobody(name: str) -> None:
    with shared_ring(name) as ring:
        put(ring, "a")
        mine = ring.claim(keys("b"))
        with held_by_one_who_was_stopped(name):
            claims = ring.claim(keys("a", "c"))
            assert claims.outcome.tolist() == [Outcome.READY, Outcome.NO_SPACE]
            assert ring.lookup(keys("a")).all()
            ring.release(claims.slots[:1])
            assert ring.abort(mine.slots).all()
            assert not ring.drop(keys("a")).any()
            with pytest.raises(StoreError, match="does not go on"):
                ring.statistics()
        ring.check_integrity()
        assert ring.claim(keys("b", "c")).outcome.tolist() == [Outcome.OWNER] * 2
        assert ring.drop(keys("a")).all()


def test_a_ring_can_be_left_while_it_cannot_be_changed(name: str) -> None:
    with shared_ring(name) as stays:
        leaves = shared_ring(name)
        leaves.claim(keys("a"))
        with held_by_one_who_was_stopped(name):
            leaves.close()
        waits = stays.claim(keys("a"))
        assert stays.wait(waits.slots, waits.version, timeout_s=60).tolist() == [Outcome.FAILED]


def test_there_are_64_participants_and_no_more(name: str) -> None:
    opened = [shared_ring(name) for _ in range(64)]
    assert sorted(ring.participant for ring in opened) == list(range(64))
    with pytest.raises(StoreError, match="all 64 participants of the ring are alive"):
        shared_ring(name)
    opened.pop(17).close()
    with shared_ring(name) as late:
        assert late.participant == 17
    for ring in opened:
        ring.close()


def test_what_was_left_claimed_fails_when_its_ring_is_closed(name: str) -> None:
    with shared_ring(name) as stays:
        leaves = shared_ring(name)
        leaves.claim(keys("a"))
        put(leaves, "b")
        leaves.pin(keys("b"))
        leaves.close()
        assert stays.statistics().pinned == 0
        assert stays.lookup(keys("a", "b")).tolist() == [0, 1]
        assert stays.drop(keys("b")).all()
        stays.check_integrity()
