"""Supported versions are told apart by what they have, not by their number."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from ucm_core.errors import ConfigError
from ucm_sglang.versions import EngineVersion, probe, require_linker, version_of

HASHES = SimpleNamespace(storage_namespace_seed=None)


def storage(*policies: str, registers: bool = True, result: tuple[str, ...] = ()) -> SimpleNamespace:
    """A double of ``mem_cache.hicache_storage`` with the names that are probed."""
    return SimpleNamespace(
        PoolHitPolicy=SimpleNamespace(**dict.fromkeys(policies)),
        HiCacheStorage=SimpleNamespace(**({"on_host_pools_registered": None} if registers else {})),
        PoolTransferResult=SimpleNamespace(__dataclass_fields__=dict.fromkeys(result)),
    )


def test_what_has_everything_can_everything() -> None:
    found = version_of(
        "0.5.23",
        storage=storage("BLOCK_GROUPS", result=("restorable_prefix_pages",)),
        hashes=HASHES,
        linker=True,
    )
    assert found == EngineVersion("0.5.23", registers_pools=True, restorable_sets=True, linker=True)


def test_the_version_before_is_supported_and_lacks_what_came_later() -> None:
    found = version_of(
        "0.5.22", storage=storage("BLOCK_GROUPS", registers=False), hashes=HASHES, linker=False
    )
    assert found == EngineVersion("0.5.22", registers_pools=False, restorable_sets=False, linker=False)


def test_a_version_without_block_groups_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"0\.5\.21 is older than 0\.5\.22.*supports SGLang 0\.5\.22 and"):
        version_of("0.5.21", storage=storage("ALL_PAGES"), hashes=HASHES, linker=False)


def test_a_version_whose_keys_know_no_salt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.5\.19 names pages without salt.*0\.5\.22"):
        version_of("0.5.19", storage=storage("BLOCK_GROUPS"), hashes=SimpleNamespace(), linker=False)


def test_the_installed_sglang_is_supported_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("sglang")
    caplog.set_level(logging.INFO, "ucm_sglang")
    found = probe()
    assert found == EngineVersion("0.5.23", registers_pools=True, restorable_sets=True, linker=True)
    assert [record.getMessage() for record in caplog.records] == [f"UCM: {found}"]


def test_a_version_that_loads_no_linkers_of_others_is_refused_for_one() -> None:
    old = version_of("0.5.22", storage=storage("BLOCK_GROUPS"), hashes=HASHES, linker=False)
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.22 loads no linkers.*use 0\.5\.23, or UCM as"):
        require_linker(old)
    require_linker(version_of("0.5.23", storage=storage("BLOCK_GROUPS"), hashes=HASHES, linker=True))
