"""Documents from outside (C-70): configurations, adapters, kept digests; too large is refused unread."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucm_core.errors import ConfigError, IdentityError
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.checkpoint import MAX_CONFIG_BYTES, WeightDigester, adapter_digest, read_config

LARGE_BYTES = 64 << 20  # less than a gigabyte, more than the largest document that is read
JSON_TREE = st.recursive(
    st.none() | st.integers(-(10**30), 10**30) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("model.safetensors", "adapter_model.safetensors"):
        (directory / name).write_bytes(b"weights")
    for name in ("config.json", "adapter_config.json"):
        (directory / name).write_text("{}")
    return directory


READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "config.json": (lambda path: read_config(path.parent), IdentityError),
    "adapter_config.json": (lambda path: adapter_digest(path.parent), IdentityError),
    "ucm.yaml": (CacheConfig.load, ConfigError),
}


@pytest.mark.parametrize("name", READERS)
def test_a_gigabyte_is_refused_unread(name: str, model: Path) -> None:
    read, error = READERS[name]
    (model / name).touch()
    os.truncate(model / name, 1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=r"has more than \d+ bytes"):
            read(model / name)
        assert tracemalloc.get_traced_memory()[1] < LARGE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "content",
    [
        b"\0",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
        pickle.dumps(print),
        b"!!python/none",
    ],
    ids=["NUL", "not UTF-8", "deep", "long number", "pickle", "YAML tag"],
)
def test_what_is_no_plain_document_is_a_typed_error(name: str, content: bytes, model: Path) -> None:
    read, error = READERS[name]
    (model / name).write_bytes(content)
    with pytest.raises(error, match=r"cannot (be )?read|neither YAML nor JSON"):
        read(model / name)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_pipe_is_refused_without_waiting(name: str, model: Path) -> None:
    read, error = READERS[name]
    (model / name).unlink()
    os.mkfifo(model / name)
    with pytest.raises(error, match="no regular file"):
        read(model / name)


def test_a_large_configuration_is_read_up_to_the_limit(model: Path) -> None:
    head, tail = b'{"a": "', b'"}'
    (model / "config.json").write_bytes(head + b"x" * (MAX_CONFIG_BYTES - len(head + tail)) + tail)
    assert list(read_config(model)) == ["a"]


def entry_of(digester: WeightDigester) -> Path:
    (entry,) = (path for path in digester.cache_directory.glob("*.json"))
    return entry


@pytest.fixture
def digester(model: Path, tmp_path: Path) -> WeightDigester:
    (model / "adapter_model.safetensors").unlink()
    digester = WeightDigester(tmp_path / "digests")
    digester.digest(model)
    return digester


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.one_of(st.binary(max_size=200), JSON_TREE.map(lambda tree: repr(tree).encode())))
def test_a_kept_digest_is_right_or_made_anew(digester: WeightDigester, model: Path, content: bytes) -> None:
    expected, hashed = digester.digest(model), digester.files_hashed
    entry_of(digester).write_bytes(content)
    assert digester.digest(model) == expected
    assert digester.files_hashed == hashed + 1


@pytest.mark.parametrize("kind", ["gigabyte", "pipe", "endless"])
def test_a_kept_digest_that_never_ends_is_not_read(digester: WeightDigester, model: Path, kind: str) -> None:
    expected, entry = digester.digest(model), entry_of(digester)
    entry.unlink()
    make = {
        "gigabyte": lambda: (entry.touch(), os.truncate(entry, 1 << 30)),
        "pipe": lambda: os.mkfifo(entry),
        "endless": lambda: entry.symlink_to("/dev/zero"),
    }
    make[kind]()
    assert digester.digest(model) == expected
