"""Writers that are killed or stopped for real, and what the others do about it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from children import LARGE, start
from objects import GEOMETRY, make_keys, open_shelf

from ucm_core.flow.ticket import ResultCode
from ucm_core.store.root import CacheRoot

OK = ResultCode.OK


def stop_in_a_write(child, root: Path) -> Path:
    """Stop the child while it has a temporary, and return that. The child says nothing, so we look."""
    while child.poll() is None:
        if not list(root.rglob("*.tmp")):
            continue
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        found = list(root.rglob("*.tmp"))
        if found:
            return found[0]
        os.kill(child.pid, signal.SIGCONT)
    raise AssertionError("the child ended before it could be stopped")


def kill(child) -> None:
    child.kill()
    child.wait()
    child.stdout.close()


@pytest.fixture
def writer(tmp_path):
    child = start("write_forever", tmp_path)
    yield child
    kill(child)


def test_a_killed_writer_leaves_only_a_temporary_and_it_is_swept(writer, tmp_path):  # case C-58
    temporary = stop_in_a_write(writer, tmp_path)
    kill(writer)
    assert temporary.exists()
    files = [path for path in tmp_path.rglob("*.hx") if path.stat().st_size != LARGE.object_bytes]
    assert files == []
    with CacheRoot(tmp_path) as root:
        assert not temporary.exists()
        assert root.sweep() == 0
        assert [path.name for path in (tmp_path / ".writers").iterdir()] != []
        whole = len(list(tmp_path.rglob("*.hx")))
        assert root.usage.used_bytes == whole * LARGE.object_bytes


def test_what_a_killed_writer_had_reserved_is_free_again(writer, tmp_path):
    stop_in_a_write(writer, tmp_path)
    with CacheRoot(tmp_path) as root:
        whole = len(list(tmp_path.rglob("*.hx"))) * LARGE.object_bytes
        assert root.usage.recount() == whole + LARGE.object_bytes
        kill(writer)
        assert root.sweep() == 1
        assert root.usage.used_bytes == whole


def test_a_living_writers_old_temporary_is_kept_and_published_later(writer, tmp_path):  # case C-58
    temporary = stop_in_a_write(writer, tmp_path)
    os.utime(temporary, (1, 1))
    with CacheRoot(tmp_path) as root:
        assert root.sweep() == 0
        assert temporary.exists()
        before = set(tmp_path.rglob("*.hx"))
        os.kill(writer.pid, signal.SIGCONT)
        while not set(tmp_path.rglob("*.hx")) - before:
            assert writer.poll() is None


def test_foreign_files_and_links_are_not_swept(writer, tmp_path):  # case C-58
    temporary = stop_in_a_write(writer, tmp_path)
    kill(writer)
    foreign = temporary.with_name("foreign.tmp")
    foreign.touch()
    link = temporary.with_name(f".{'f' * 32}.1-1.tmp")
    link.symlink_to(foreign)
    named_alike = temporary.with_name(temporary.name.replace("-", "-9"))
    named_alike.symlink_to(foreign)
    unknown = temporary.with_name(f".{'e' * 32}.1-1.tmp")
    unknown.touch()
    with CacheRoot(tmp_path):
        assert not temporary.exists()
        assert foreign.exists()
        assert link.is_symlink()
        assert named_alike.is_symlink()
        assert unknown.exists(), "a writer without a lock file is not proved dead"


def test_a_link_to_another_directory_is_not_followed(writer, tmp_path, tmp_path_factory):
    temporary = stop_in_a_write(writer, tmp_path)
    kill(writer)
    outside = tmp_path_factory.mktemp("outside")
    (outside / temporary.name).touch()
    (temporary.parents[1] / "abc").symlink_to(outside)
    with CacheRoot(tmp_path):
        assert (outside / temporary.name).exists()


def test_two_roots_of_one_process_do_not_take_each_other_for_dead(tmp_path):
    one, other = open_shelf(tmp_path), open_shelf(tmp_path)
    assert one.root.sweep() == other.root.sweep() == 0
    assert len(list((tmp_path / ".writers").iterdir())) == 2
    one.root.close()
    assert other.write(make_keys(1)) == [OK]
    other.root.close()


def test_a_rival_that_stalls_and_fails_does_not_touch_what_was_published(tmp_path):  # case C-55
    rival = start("write_and_fail", tmp_path)
    stop_in_a_write(rival, tmp_path)
    shelf = open_shelf(tmp_path, geometry=LARGE)
    key = make_keys(1)
    assert shelf.write(key) == [OK]
    before = shelf.file(key[0]).stat()
    os.kill(rival.pid, signal.SIGCONT)
    assert rival.communicate()[0] == f"{int(ResultCode.UNAVAILABLE)}\n"
    after = shelf.file(key[0]).stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        LARGE.object_bytes,
        before.st_mtime_ns,
    )
    assert shelf.temporaries() == []
    assert shelf.read(key) == [OK]
    shelf.root.close()


def test_a_forked_child_does_not_end_its_parents_hold(tmp_path):
    shelf = open_shelf(tmp_path)
    pid = os.fork()
    if pid == 0:
        shelf.root.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with CacheRoot(tmp_path):
        assert len(list((tmp_path / ".writers").iterdir())) == 2
    assert shelf.write(make_keys(2)) == [OK, OK]
    assert shelf.root.usage.used_bytes == 2 * GEOMETRY.object_bytes
    shelf.root.close()
