"""Settings: typed, closed, with errors that name the key, the numbers and the remedy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ucm_core.errors import ConfigError
from ucm_core.ops.config import CacheConfig


def test_defaults_need_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    config = CacheConfig.load()
    assert config.root == Path("/somewhere/cache/ucm")
    assert (config.grain_tokens, config.block_tokens, config.sync) == (64, None, False)


def test_the_default_root_is_under_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert CacheConfig.load(None).root == Path("/home/somebody/.cache/ucm")


@pytest.mark.parametrize(
    ("text", "size"),
    [("10GB", 10 * 10**9), ("10GiB", 10 << 30), ("4096", 4096), (4096, 4096), ("1.5 MiB", 3 << 19)],
)
def test_sizes_are_numbers_or_words(text: object, size: int) -> None:
    assert CacheConfig.load({"ring_bytes": text, "disk_bytes": text}).ring_bytes == size


@pytest.mark.parametrize("name", ["ucm.yaml", "ucm.json"])
def test_a_file_is_yaml_or_json(tmp_path: Path, name: str) -> None:
    values = {"root": str(tmp_path / "cache"), "disk_bytes": "2GB", "sync": True}
    (tmp_path / name).write_text(json.dumps(values))
    config = CacheConfig.load(tmp_path / name)
    assert (config.root, config.disk_bytes, config.sync) == (tmp_path / "cache", 2 * 10**9, True)
    assert CacheConfig.load(str(tmp_path / name)) == config
    assert CacheConfig.load(config) is config


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "ucm.yaml").write_text("# nothing set\n")
    assert CacheConfig.load(tmp_path / "ucm.yaml") == CacheConfig()


@pytest.mark.parametrize(
    ("key", "close"),
    [("disk_byte", "disk_bytes"), ("ringbytes", "ring_bytes"), ("grain-tokens", "grain_tokens")],
)
def test_an_unknown_key_is_refused_with_the_closest(key: str, close: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{key}'; did you mean '{close}'"):
        CacheConfig.load({key: 1})


class TestRetention:
    """Knobs of rows: nested, as closed as the rest."""

    def test_by_default_no_row_is_named(self) -> None:
        assert CacheConfig().retention == {}

    def test_knobs_of_a_row(self) -> None:
        config = CacheConfig.load({"retention": {"*": {"interval_tokens": 4096, "budget_bytes": "2GB"}}})
        knobs = config.retention["*"]
        assert (knobs.interval_tokens, knobs.budget_bytes) == (4096, 2 * 10**9)
        assert (knobs.request_end, knobs.second_sight, knobs.half_life_s) == (True, True, 3600.0)

    def test_an_unknown_knob_is_refused_with_the_closest(self) -> None:
        unknown = r"unknown setting 'retention\.s\.interval'; did you mean 'interval_tokens'"
        with pytest.raises(ConfigError, match=unknown):
            CacheConfig.load({"retention": {"s": {"interval": 5}}})

    @pytest.mark.parametrize(
        ("knob", "value"), [("interval_tokens", -1), ("interval_tokens", 2**31), ("budget_bytes", 0),
                            ("budget_bytes", "much"), ("half_life_s", 0), ("request_end", "perhaps")]
    )  # fmt: skip
    def test_a_bad_value_names_row_and_knob(self, knob: str, value: object) -> None:
        with pytest.raises(ConfigError, match=rf"setting 'retention\.s\.{knob}'"):
            CacheConfig.load({"retention": {"s": {knob: value}}})

    @pytest.mark.parametrize("value", [{"s": 5}, {"s": None}, [], 7])
    def test_what_is_no_mapping_is_refused(self, value: object) -> None:
        with pytest.raises(ConfigError, match="setting 'retention"):
            CacheConfig.load({"retention": value})


def test_an_unknown_key_without_a_neighbour_lists_all() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'zzz'; the settings are root, ring_bytes"):
        CacheConfig(zzz=1)


BAD_VALUES: dict[str, list[object]] = {
    "disk_bytes": ["many", -1],
    "ring_bytes": ["-5GB"],
    "grain_tokens": [0, 1.5, 2**20 + 1],
    "io_threads": [0, 65],
    "write_threads": [0, 65],
    "save_wait_s": [-1, float("nan")],
    "load_wait_s": [float("inf")],
    "sync": ["perhaps"],
    "weight_digest": ["quick"],
    "root": ["", ".", "a\0b", 7, None, "\ud800", "~nobody-of-this-name/x"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in BAD_VALUES for value in BAD_VALUES[key]])
def test_a_bad_value_names_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"setting '{key}' = "):
        CacheConfig.load({key: value})


@pytest.mark.parametrize("size", ["lots", -1, "-5GB"])
def test_a_size_that_is_none_is_told_how_sizes_are_given(size: object) -> None:
    with pytest.raises(ConfigError, match="give a number of bytes, or text such as '10GB' or '10GiB'"):
        CacheConfig.load({"disk_bytes": size})


def test_blocks_are_whole_grains() -> None:
    assert CacheConfig(grain_tokens=16, block_tokens=48).block_tokens == 48
    with pytest.raises(ConfigError, match=r"block_tokens = 100 .* grain_tokens = 64; use 128"):
        CacheConfig(block_tokens=100)


def test_every_bad_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)io_threads.*unknown setting 'bad'"):
        CacheConfig.load({"io_threads": 0, "bad": 1})


def test_a_value_that_unfolds_to_a_giant_is_refused_in_few_words() -> None:
    giant: list[object] = ["x"]
    for _ in range(9):  # what aliases in a YAML file make
        giant = [giant] * 9
    with pytest.raises(ConfigError, match="setting 'root'") as caught:
        CacheConfig.load({"root": giant})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "holds a list"),
        *(
            (text, "neither YAML nor JSON")
            for text in ("a: [", "a: 2001-99-99", "a: " + "9" * 5000, "[" * 5000)
        ),
    ],
)
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ucm.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        CacheConfig.load(tmp_path / "ucm.yaml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        CacheConfig.load(tmp_path / "nowhere.yaml")


def test_nothing_is_made_by_reading_settings(tmp_path: Path) -> None:
    CacheConfig.load({"root": str(tmp_path / "cache")})
    assert not (tmp_path / "cache").exists()


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        CacheConfig().sync = True


def test_the_disk_bound_by_default_is_half_of_what_could_be_had(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    config = CacheConfig(root=tmp_path / "not" / "yet")
    bound = config.disk_limit_bytes()
    assert 0 < bound <= min(100 * 10**9, free.f_bavail * free.f_frsize)
    assert CacheConfig(root=tmp_path, disk_bytes=4096).disk_limit_bytes(10**12) == 4096


def test_threads_are_few() -> None:
    assert 1 <= CacheConfig().thread_count() <= 4
    assert CacheConfig(io_threads=9).thread_count() == 9


def test_no_more_threads_write_than_there_are() -> None:
    assert CacheConfig(io_threads=4, write_threads=4).write_threads == 4
    with pytest.raises(ConfigError, match="write_threads = 5 is more than io_threads = 4; use at most 4"):
        CacheConfig(io_threads=4, write_threads=5)


def test_write_threads_are_held_to_the_default_threads_as_well() -> None:
    most = CacheConfig().thread_count()
    with pytest.raises(ConfigError, match=f"write_threads = {most + 1} is more than io_threads = {most}"):
        CacheConfig(write_threads=most + 1)


def test_a_tier_may_be_left_out_and_not_both() -> None:
    assert (CacheConfig(ring_bytes=0).ring_bytes, CacheConfig(disk_bytes="0").disk_bytes) == (0, 0)
    assert CacheConfig(disk_bytes=0).disk_limit_bytes(1 << 30) == 0
    with pytest.raises(ConfigError, match="ring_bytes = 0 and disk_bytes = 0 would keep nothing"):
        CacheConfig(ring_bytes=0, disk_bytes=0)
