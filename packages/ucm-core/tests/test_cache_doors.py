"""Whatever lies in a root (C-70): no exception, no large allocation, a miss at worst, healed by a save.

The doors are all files that a cache reads: objects, the usage counter, writers' counters, generations. Nobody
reads a manifest. Each gets contents that would hurt a careless reader.
"""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import DENSE, FULL, GRAIN, RING_BYTES, blocks_of, identity_of, payloads_of

from ucm_core.cache import Cache
from ucm_core.ops.config import CacheConfig

TOKENS = list(range(3 * GRAIN + 1))
BASE = identity_of(DENSE).base_digest.hex()
NAMESPACE = identity_of(DENSE).namespace
LARGE_BYTES = 16 << 20


class Trap:
    """A pickle that would leave a folder behind."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("trapped",)


HOSTILE = {
    "empty": b"",
    "zeros": bytes(8192),
    "ones": b"\xff" * 8192,
    "eight ones": b"\xff" * 8,
    "sign bit": bytes(7) + b"\x80",
    "NUL": b"\0",
    "pickle": pickle.dumps(Trap()),
    "deep JSON": b"[" * 100_000,
    "long number": b'{"identity": ' + b"9" * 10_000 + b"}",
    "not UTF-8": b'{"identity": "\xff\xfe"}',
    "script": b"#!/bin/sh\nmkdir trapped\n",
    "YAML": b"!!python/object/apply:os.mkdir [trapped]\n",
}
contents = st.one_of(st.sampled_from(list(HOSTILE.values())), st.binary(max_size=300))


def open_cache(root: Path) -> Cache:
    config = CacheConfig(root=root, ring_bytes=RING_BYTES, disk_bytes=1 << 40)
    return Cache.open(config, DENSE, identity=identity_of(DENSE))


def fill(root: Path) -> None:
    with open_cache(root) as cache:
        assert cache.save(cache.chain(TOKENS), payloads_of(DENSE, 3)).wait_durable(60.0)


def served(root: Path) -> int:
    """Tokens that the cache serves; every byte of them is the right one."""
    with open_cache(root) as cache:
        chain = cache.chain(TOKENS)
        loaded = cache.load(chain, cache.resolve(chain))
        payload = loaded.payloads["full"]
        assert np.array_equal(payload, blocks_of(FULL, 3)[: len(payload)])
        cache.statistics()
        return loaded.resume_tokens


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("root")
    before = Path.cwd()
    os.chdir(path)  # where a trap would leave its folder
    yield path
    os.chdir(before)
    assert not (path / "trapped").exists()


def objects(root: Path) -> list[Path]:
    return sorted(path for path in (root / NAMESPACE).glob("*/???/*") if path.is_file())


def healed(root: Path) -> bool:
    fill(root)
    return served(root) == 3 * GRAIN


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(contents, st.integers(0, 2), st.booleans())
def test_any_object_is_whole_or_a_miss(root: Path, content: bytes, index: int, padded: bool) -> None:
    """``padded``: to an object's size, so that it is opened and its header read."""
    fill(root)
    victim = objects(root)[index]
    size = victim.stat().st_size
    victim.write_bytes(content.ljust(size, b"\0")[:size] if padded else content)
    assert served(root) < 3 * GRAIN
    assert healed(root)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["usage", "manifest", "writer", "stranger"]), contents)
def test_counters_and_manifests_may_hold_anything(root: Path, door: str, content: bytes) -> None:
    """What was stored is served; a counter that claims too much may only refuse new objects."""
    (root / ".usage").unlink(missing_ok=True)
    fill(root)
    paths = {
        "usage": root / ".usage",
        "manifest": root / NAMESPACE / "manifest.json",
        "writer": root / ".writers" / ("ab" * 16),
        "stranger": objects(root)[0].with_name("stranger"),
    }
    paths[door].write_bytes(content)
    assert served(root) == 3 * GRAIN


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(contents)
def test_a_generation_may_hold_anything_and_then_nothing_old_is_found(root: Path, content: bytes) -> None:
    fill(root)
    counter = root / ".generations" / BASE
    counter.parent.mkdir(exist_ok=True)
    counter.write_bytes(content)
    assert served(root) == (3 * GRAIN if content in {b"", bytes(8)} else 0)
    counter.unlink()


@pytest.mark.parametrize("door", ["object", "usage", "manifest", "generation"])
def test_a_gigabyte_is_not_read(root: Path, door: str) -> None:
    fill(root)
    path = {
        "object": objects(root)[0],
        "usage": root / ".usage",
        "manifest": root / NAMESPACE / "manifest.json",
        "generation": root / ".generations" / BASE,
    }[door]
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, 1 << 30)
    tracemalloc.start()
    try:
        assert served(root) <= 3 * GRAIN
        assert tracemalloc.get_traced_memory()[1] < LARGE_BYTES
    finally:
        tracemalloc.stop()
    path.unlink(missing_ok=True)
    assert healed(root)


def test_a_manifest_is_only_written(root: Path) -> None:
    """It is for people: another one in its place changes nothing, and is not replaced."""
    fill(root)
    manifest = root / NAMESPACE / "manifest.json"
    manifest.write_text(json.dumps({"fan_out_digits": 9, "identity": None}))
    assert served(root) == 3 * GRAIN
    assert json.loads(manifest.read_text())["fan_out_digits"] == 9
