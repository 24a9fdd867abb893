"""The cache directory: refused, unavailable, or in use."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from objects import Payloads, make_keys, make_tier, open_files, open_shelf

from ucm_core.errors import StoreError
from ucm_core.flow.ticket import ResultCode
from ucm_core.store.root import CacheRoot

BASE = bytes(range(32))


@dataclass
class Identity:
    """Stands for a model's identity: a name and a manifest."""

    namespace: str = "ab" * 16
    fields: dict[str, Any] = field(default_factory=lambda: {"weights": "cd", "layers": [1, 2]})

    def manifest(self) -> dict[str, Any]:
        return self.fields


def test_a_new_root_is_made_with_its_parents(tmp_path):
    with CacheRoot(tmp_path / "a" / "b") as root:
        assert root.available
        assert root.path == tmp_path / "a" / "b"
    assert not root.available


def test_a_file_is_refused_untouched(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StoreError, match="is a file"):
        CacheRoot(path).open()
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_no_path_at_all_is_refused(path):
    with pytest.raises(StoreError, match="no path"):
        CacheRoot(path)


@pytest.mark.parametrize("make", ["under_a_file", "too_long", "pseudo"])
def test_a_root_that_cannot_be_made_is_a_miss_and_one_log_line(make, tmp_path, caplog):
    (tmp_path / "file").touch()
    path = {
        "under_a_file": tmp_path / "file" / "x",
        "too_long": tmp_path / ("n" * 300),
        "pseudo": Path("/proc/ucm"),
    }
    with caplog.at_level(logging.WARNING, logger="ucm_core.store"):
        root = CacheRoot(path[make]).open()
        assert not root.available
        tier = make_tier(root)
        keys, payloads = make_keys(2), Payloads(2)
        assert tier.write(keys, payloads.addresses).tolist() == [ResultCode.UNAVAILABLE] * 2
        assert (tier.read(keys, payloads.addresses) == ResultCode.MISS).all()
        assert not tier.exist(keys).any()
        assert not tier.drop(keys).any()
        assert len(tier.keys()) == 0
        root.namespace(Identity())
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_two_holds_on_one_unusable_root_say_so_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="ucm_core.store"):
        roots = [CacheRoot(tmp_path / "file" / "x").open() for _ in range(2)]
    assert not any(root.available for root in roots)
    assert len(caplog.records) == 1


def test_a_lost_root_stays_lost(tmp_path):
    with CacheRoot(tmp_path) as root:
        root.lose(OSError(errno.ENOSPC, "full"))
        assert not root.available


def test_an_unavailable_root_has_no_usage_and_no_names(tmp_path):
    (tmp_path / "file").touch()
    root = CacheRoot(tmp_path / "file" / "x").open()
    with pytest.raises(StoreError, match="not available"):
        _ = root.usage
    with pytest.raises(StoreError, match="not open"):
        root.temporary_name()
    assert root.statistics().used_bytes == 0
    root.close()


def test_every_temporary_name_is_another(tmp_path):
    with CacheRoot(tmp_path) as root:
        names = [*root.temporary_names(3), root.temporary_name(), *root.temporary_names(2)]
        assert len(set(names)) == 6
        assert root.temporary_names(0) == []


def test_opening_twice_and_closing_twice_change_nothing(tmp_path):
    root = CacheRoot(tmp_path).open()
    assert root.open() is root
    assert len(list((tmp_path / ".writers").iterdir())) == 1
    root.close()
    root.close()
    assert list((tmp_path / ".writers").iterdir()) == []


def test_a_relative_root_keeps_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = CacheRoot("cache")
    monkeypatch.chdir("/")
    with root:
        assert root.path == tmp_path / "cache"


def test_the_mode_of_access_is_logged_once(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="ucm_core.store"), CacheRoot(tmp_path):
        assert [record.message for record in caplog.records if "file access" in record.message] == [
            f"cache root {tmp_path}: file access is O_DIRECT"
        ]
    assert list(tmp_path.glob("*.tmp")) == list(tmp_path.glob(".*.tmp")) == []


# -- namespaces


def test_a_namespace_says_readably_what_it_is(tmp_path):
    with CacheRoot(tmp_path) as root:
        namespace = root.namespace(Identity())
        assert namespace.path == tmp_path / ("ab" * 16)
        manifest = json.loads((namespace.path / "manifest.json").read_text())
    assert manifest == {"fan_out_digits": 3, "identity": {"weights": "cd", "layers": [1, 2]}}


def test_the_first_manifest_stays(tmp_path):
    with CacheRoot(tmp_path) as root:
        root.namespace(Identity())
        namespace = root.namespace(Identity(fields={"other": 1}))
        assert "weights" in (namespace.path / "manifest.json").read_text()
        assert [entry.name for entry in namespace.path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("name", ["", "..", "../" * 10 + "a", "AB" * 16, "ab" * 16 + "\n", "ab" * 17])
def test_a_name_that_is_none_of_a_namespace_is_refused(name, tmp_path):
    with CacheRoot(tmp_path / "root") as root, pytest.raises(StoreError, match="32 hex"):
        root.namespace(Identity(namespace=name))
    assert [entry.name for entry in tmp_path.iterdir()] == ["root"]


def test_a_link_out_of_the_root_is_refused_before_anything_is_written(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    with CacheRoot(tmp_path / "root") as root:
        (root.path / ("ab" * 16)).symlink_to(outside)
        with pytest.raises(StoreError, match="outside of the cache root"):
            root.namespace(Identity())
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("row", ["full", "../../../x", "a/b", "..", ""])
def test_rows_lie_directly_in_their_namespace(row, tmp_path):
    with CacheRoot(tmp_path) as root:
        namespace = root.namespace(Identity())
        assert namespace.row_directory(row).resolve().parent == namespace.path


# -- generations


def test_a_generation_starts_at_zero_and_outlives_its_root(tmp_path):
    with CacheRoot(tmp_path) as root:
        assert root.generation(BASE) == 0
        assert root.raise_generation(BASE) == 1
        assert root.raise_generation(BASE) == 2
        assert root.generation(b"other") == 0
    with CacheRoot(tmp_path) as root:
        assert root.generation(BASE) == 2


def test_processes_that_raise_together_lose_no_step(tmp_path):
    code = (
        "import sys; from ucm_core.store.root import CacheRoot\n"
        "root = CacheRoot(sys.argv[1]).open()\n"
        "for _ in range(20): root.raise_generation(bytes(range(32)))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, tmp_path]) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    with CacheRoot(tmp_path) as root:
        assert root.generation(BASE) == 60


@pytest.mark.parametrize("content", [b"\x01", b"\x01" * 7, b"\x01" * 9, b"\xff" * 8])
def test_a_damaged_generation_goes_on_where_nobody_was(content, tmp_path):
    with CacheRoot(tmp_path) as root:
        root.raise_generation(BASE)
        (tmp_path / ".generations" / BASE.hex()).write_bytes(content)
        value = root.generation(BASE)
        assert value > 1000
        assert root.generation(BASE) == value
        assert root.raise_generation(BASE) == value + 1


def test_a_generation_that_cannot_be_read_hides_everything(tmp_path):
    with open_shelf(tmp_path).root as root:
        root.raise_generation(BASE)
        path = tmp_path / ".generations" / BASE.hex()
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").touch()
        root.generation(BASE)
        assert not root.available


@pytest.mark.parametrize("target", ["nowhere", "counter", "/dev/zero"])
@pytest.mark.parametrize("level", [".generations", ".generations/counter"])
def test_a_generation_behind_a_link_hides_everything(level, target, tmp_path):
    with CacheRoot(tmp_path) as root:
        path = tmp_path / level.replace("counter", BASE.hex())
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(target.replace("counter", BASE.hex()))
        assert root.generation(BASE) == 0
        assert not root.available


def test_a_file_in_the_place_of_the_generations_hides_everything(tmp_path):
    with CacheRoot(tmp_path) as root:
        (tmp_path / ".generations").touch()
        assert root.generation(BASE) == 0
        assert not root.available


def test_a_root_that_became_a_file_can_be_closed(tmp_path):
    root = CacheRoot(tmp_path / "cache").open()
    before = open_files()
    shutil.rmtree(root.path)
    root.path.touch()
    root.close()
    assert open_files() == before - 1


def test_statistics_of_a_root_that_is_gone(tmp_path):
    with CacheRoot(tmp_path / "cache") as root:
        shutil.rmtree(root.path)
        assert root.statistics().used_bytes == 0


def test_a_generation_that_cannot_be_kept_is_an_error(tmp_path):
    with CacheRoot(tmp_path) as root:
        (tmp_path / ".generations").write_text("in the way")
        with pytest.raises(StoreError, match="cannot be raised"):
            root.raise_generation(BASE)
        assert not root.available
