"""A root that is deleted under a running process is made again; others see that its writers live."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from pathlib import Path

import pytest
from models import DENSE, identity_of, payloads_of
from objects import GEOMETRY, make_keys, open_shelf
from test_cache import TOKENS, WAIT_S, fill, open_cache, resume

from ucm_core.flow.ticket import ResultCode
from ucm_core.ops import metrics
from ucm_core.store.root import CacheRoot

OK, UNAVAILABLE = ResultCode.OK, ResultCode.UNAVAILABLE


@pytest.fixture
def shelf(tmp_path):
    shelf = open_shelf(tmp_path / "cache")
    shelf.write(make_keys(2))
    yield shelf
    shelf.root.close()


def writer_files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".writers").iterdir())


def test_the_next_write_makes_the_directory_again_and_says_so_once(shelf, caplog):
    keys = make_keys(4)
    shutil.rmtree(shelf.root.path)
    gone = metrics.ERRORS.labels(where="root_gone")
    before = gone._value.get()
    assert shelf.read(keys[:2]) == [ResultCode.MISS] * 2
    with caplog.at_level(logging.WARNING, logger="ucm_core.store"):
        assert shelf.write(keys) == [OK] * 4
        assert shelf.write(make_keys(4, seed=1)) == [OK] * 4
    assert [record.message.count("is made again") for record in caplog.records] == [1]
    assert gone._value.get() == before + 1
    assert shelf.read(keys) == [OK] * 4
    assert shelf.root.usage.used_bytes == 8 * GEOMETRY.object_bytes
    assert shelf.temporaries() == []


def test_its_writer_is_seen_to_live_under_the_name_of_its_temporaries(shelf):
    before = writer_files(shelf.root.path)
    shutil.rmtree(shelf.root.path)
    shelf.write(make_keys(1))
    (after,) = writer_files(shelf.root.path)
    assert [after] != before
    assert shelf.root.temporary_name().decode().split(".")[1] == after
    with CacheRoot(shelf.root.path) as other:
        other.sweep()
        assert after in writer_files(shelf.root.path)


def test_a_directory_that_was_moved_away_is_made_again_too(shelf):
    old = shelf.root.path.rename(shelf.root.path.with_name("old"))
    assert shelf.write(make_keys(3)) == [OK] * 3
    assert shelf.read(make_keys(3)) == [OK] * 3
    assert shelf.root.usage.used_bytes == 3 * GEOMETRY.object_bytes
    with CacheRoot(old) as other:  # its writer is not there any more
        assert other.sweep() == 0
        assert len(writer_files(old)) == 1
        assert other.usage.used_bytes == 2 * GEOMETRY.object_bytes


@pytest.mark.parametrize("remove", [shutil.rmtree, lambda path: path.rename(path.with_name("old"))])
def test_somebody_else_may_have_made_it_again(shelf, remove):
    remove(shelf.root.path)
    other = open_shelf(shelf.root.path)
    assert other.write(make_keys(2)) == [OK, OK]
    assert shelf.read(make_keys(2)) == [OK, OK]
    assert shelf.write(make_keys(3)) == [OK] * 3
    assert len(writer_files(shelf.root.path)) == 2
    assert other.root.usage.used_bytes == 3 * GEOMETRY.object_bytes
    other.root.close()


def test_many_threads_make_it_again_once(shelf):
    shutil.rmtree(shelf.root.path)
    codes: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda n=n: codes.append(shelf.write(make_keys(2, seed=n)))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [[OK, OK]] * 8
    assert len(writer_files(shelf.root.path)) == 1


def test_what_cannot_be_made_again_is_a_failed_write(shelf):
    shutil.rmtree(shelf.root.path)
    shelf.root.path.write_text("in the way")
    assert shelf.write(make_keys(2)) == [UNAVAILABLE] * 2
    assert shelf.root.path.read_text() == "in the way"
    shelf.root.path.unlink()
    assert shelf.write(make_keys(2)) == [OK] * 2


def test_a_cache_goes_on_and_says_again_what_it_is(tmp_path):
    root = tmp_path / "cache"
    with open_cache(root) as cache:
        fill(cache)
        manifest = (root / cache.namespace / "manifest.json").read_text()
        shutil.rmtree(root)
        longer = TOKENS + TOKENS
        tickets = cache.save(cache.chain(longer), payloads_of(DENSE, 16))
        assert tickets.wait_durable(WAIT_S)
        assert json.loads((root / cache.namespace / "manifest.json").read_text()) == json.loads(manifest)
    with open_cache(root, identity=identity_of(DENSE)) as later:
        assert resume(later, longer) == 15 * len(TOKENS) // 8
