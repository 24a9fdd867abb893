"""The commands of the README, taken apart by SGLang's own parser: what they name and set is right."""

import argparse
import importlib
import json
import re
import shlex
from pathlib import Path

import import_doubles
import pytest

pytest.importorskip("sglang")
import_doubles.install()

from sglang.srt.mem_cache.unified_cache.linker_config import UnifiedCacheLinkerConfig  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from ucm_core import CacheConfig  # noqa: E402
from ucm_sglang.connector import UCMHiCache  # noqa: E402
from ucm_sglang.linker import UCMLinker  # noqa: E402
from ucm_sglang.settings import read_linker_settings, read_settings  # noqa: E402

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^python -m sglang.launch_server (.*?)(?=^python|^```)", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def commands():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    texts = (text.replace("\\\n", " ") for text in COMMAND.findall(README))  # as a shell joins lines
    return [parser.parse_args(shlex.split(text)) for text in texts]


def class_at(module, name):
    return getattr(importlib.import_module(module), name)


def test_there_is_one_for_either_place(commands):
    places = [(one.enable_hierarchical_cache, one.enable_unified_cache_external_linker) for one in commands]
    assert places == [(True, False), (False, True)]


def test_the_storage_backend_is_ours_and_its_settings_are_read(commands):
    extra = json.loads(commands[0].hicache_storage_backend_extra_config)
    assert commands[0].hicache_storage_backend == "dynamic"
    assert class_at(extra["module_path"], extra["class_name"]) is UCMHiCache
    assert read_settings(extra, page_tokens=commands[0].page_size).cache == CacheConfig()


def test_the_linker_is_ours_and_its_settings_are_read(commands):
    told = UnifiedCacheLinkerConfig.from_dict(commands[1].unified_cache_external_linker_config)
    assert commands[1].unified_cache_external_linker_backend == "dynamic"
    assert class_at(told.linker_module_path, told.linker) is UCMLinker
    settings = read_linker_settings(told.linker_extra_config, page_tokens=commands[1].page_size)
    assert settings.cache == CacheConfig()
