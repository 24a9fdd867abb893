"""Supported versions are told apart by what they have, not by their number."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ucm_core.errors import ConfigError
from ucm_vllm.versions import alignment_tokens, probe

BASE = SimpleNamespace(KVConnectorTransferResults=object)
OUTPUT = SimpleNamespace(KVConnectorBlockState=SimpleNamespace(get_block_ids=None))


def test_what_has_everything_is_supported() -> None:
    probe("0.32.0", base=BASE, output=OUTPUT).require()


def test_a_version_that_cannot_tell_failed_requests_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"0\.29\.0.*KVConnectorTransferResults.*0\.30 to 0\.32"):
        probe("0.29.0", base=SimpleNamespace(), output=OUTPUT).require()


def test_a_version_without_block_tables_is_refused() -> None:
    old = SimpleNamespace(KVConnectorBlockState=SimpleNamespace())
    with pytest.raises(ConfigError, match="get_block_ids"):
        probe("0.29.0", base=BASE, output=old).require()


def test_the_alignment_is_read_where_it_stands() -> None:
    assert alignment_tokens(None, SimpleNamespace(cache_hit_alignment_tokens=384)) == 384


def test_the_installed_vllm_is_supported() -> None:
    vllm = pytest.importorskip("vllm")
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.v1.core.sched import output

    probe(vllm.__version__, base=base, output=output).require()
