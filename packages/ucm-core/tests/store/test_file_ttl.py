"""Files that were not used for long: absent to lookups and loads, renewed by use, replaced by a save."""

from __future__ import annotations

import os
import time

import pytest
from objects import make_keys, open_shelf

from ucm_core.flow.ticket import ResultCode
from ucm_core.store.tiers import StoreLimits

OK, MISS = ResultCode.OK, ResultCode.MISS
TTL_S = 1000.0


@pytest.fixture
def shelf(tmp_path, uring):
    shelf = open_shelf(tmp_path, uring=uring, ttl_s=TTL_S)
    shelf.write(make_keys(3))
    yield shelf
    shelf.root.close()


def age(shelf, key, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(shelf.file(key), (then, then))


def test_what_was_not_used_for_long_is_absent_and_stays(shelf):
    keys = make_keys(3)
    age(shelf, keys[0], TTL_S - 60)
    age(shelf, keys[1], TTL_S + 60)
    assert shelf.tier.exist(keys).tolist() == [True, False, True]
    assert shelf.read(keys) == [OK, MISS, OK]
    assert shelf.file(keys[1]).exists()
    assert shelf.tier.statistics().corrupt == 0


def test_use_renews_it(shelf):
    keys = make_keys(3)
    age(shelf, keys[1], TTL_S - 60)
    shelf.tier.touch(keys)
    assert shelf.file(keys[1]).stat().st_mtime > time.time() - 60


def test_a_save_replaces_it(shelf):
    keys = make_keys(3)
    age(shelf, keys[1], TTL_S + 60)
    inode = shelf.file(keys[1]).stat().st_ino
    assert shelf.tier.stored(keys).tolist() == [True, False, True]
    assert shelf.write(keys) == [OK] * 3
    assert shelf.file(keys[1]).stat().st_ino != inode
    assert shelf.read(keys) == [OK] * 3


def test_without_a_limit_age_is_no_matter(tmp_path):
    shelf = open_shelf(tmp_path)
    shelf.write(make_keys(1))
    os.utime(shelf.file(make_keys(1)[0]), (1, 1))
    assert shelf.tier.exist(make_keys(1)).all()
    assert shelf.read(make_keys(1)) == [OK]
    shelf.root.close()


@pytest.mark.parametrize(("ttl_s", "interval_s"), [(None, 60), (1e6, 60), (120, 60), (50, 25), (0.5, 0)])
def test_uses_are_noted_often_enough_for_what_is_used_to_stay(ttl_s, interval_s):
    assert StoreLimits(ttl_s=ttl_s).touch_interval_s == interval_s
