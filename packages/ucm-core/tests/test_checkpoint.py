"""Checkpoint directories: merged configurations, and weight digests that two processes share."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from ucm_core.errors import IdentityError
from ucm_core.spec import checkpoint
from ucm_core.spec.checkpoint import WeightDigester, adapter_digest, read_config

PROCESSES = multiprocessing.get_context("spawn")


def write_config(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_keys_that_change_no_value_are_dropped_here_and_in_sub_models(tmp_path):
    noise = {
        "_name_or_path": "/x",
        "transformers_version": "5",
        "torch_dtype": "a",
        "dtype": "b",
        "use_cache": True,
    }
    noise |= {"eos_token_id": [1, 2], "pad_token_id": None}
    quantisation = {"quant_method": "x", "dtype": "int8"}
    config = {
        "model_type": "t",
        "text_config": noise | {"size": 3},
        "quantization_config": quantisation,
    } | noise
    assert read_config(write_config(tmp_path, config)) == {
        "model_type": "t",
        "text_config": {"size": 3},
        "quantization_config": quantisation,
    }


def test_overrides_merge_into_mappings_and_replace_everything_else(tmp_path):
    write_config(tmp_path, {"rope": {"theta": 1, "type": "yarn"}, "layers": [1, 2], "size": 4})
    overrides = {"rope": {"theta": 2.0}, "layers": [3], "extra": {"a": 1}, "torch_dtype": "float32"}
    assert read_config(tmp_path, overrides) == {
        "rope": {"theta": 2, "type": "yarn"},
        "layers": [3],
        "size": 4,
        "extra": {"a": 1},
    }


def test_a_file_with_infinity_can_be_read(tmp_path):
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_config(tmp_path) == {"time_step_limit": [0, float("inf")]}


@pytest.mark.parametrize("overrides", [{"rope": len}, {"rope": {"theta": object()}}, len, [1]])
def test_an_override_that_is_no_data_makes_the_identity_unknown(tmp_path, overrides):
    with pytest.raises(IdentityError, match="unknown"):
        read_config(write_config(tmp_path, {}), overrides)


@pytest.mark.parametrize("text", [None, "{", "[1]", "[" * 5000, '{"a":' * 500 + "1" + "}" * 500])
def test_a_configuration_that_cannot_be_read_is_unknown(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(IdentityError, match="unknown"):
        read_config(tmp_path)


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "a.safetensors").write_bytes(b"first" * 1000)
    (directory / "b.safetensors").write_bytes(b"second" * 1000)
    (directory / "other.bin").write_bytes(b"ignored")
    return directory


@pytest.fixture
def digester(tmp_path):
    return WeightDigester(tmp_path / "cache" / "weights")


def test_the_digest_stands_for_names_and_bytes_in_name_order(model, digester, tmp_path):
    first = digester.digest(model)
    assert len(bytes.fromhex(first)) == 32
    moved = model.rename(tmp_path / "moved")
    assert digester.digest(moved) == first
    (moved / "b.safetensors").rename(moved / "c.safetensors")
    assert digester.digest(moved) != first


def test_a_file_is_read_once_and_then_known(model, digester, tmp_path):
    first = digester.digest(model)
    assert digester.files_hashed == 2
    again = WeightDigester(tmp_path / "cache" / "weights")
    assert again.digest(model) == first
    assert again.files_hashed == 0


def test_a_changed_byte_of_the_same_size_and_time_changes_the_digest(model, digester):
    path = model / "a.safetensors"
    before, status = digester.digest(model), path.stat()
    with path.open("r+b") as stream:
        stream.write(b"F")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert digester.digest(model) != before
    assert digester.files_hashed == 3


def test_the_same_byte_in_another_file_is_another_digest(model, digester):
    before = digester.digest(model)
    (model / "a.safetensors").write_bytes(b"first" * 1000 + b"s")
    (model / "b.safetensors").write_bytes((b"second" * 1000)[1:])
    assert digester.digest(model) != before


def test_writes_in_quick_succession_are_never_confused(tmp_path, digester):
    path = tmp_path / "w.safetensors"
    seen = set()
    for number in range(10):
        path.write_bytes(bytes([number]) * 64)
        seen.add(digester.digest(tmp_path))
    assert len(seen) == 10


def test_a_fresh_file_is_read_only_when_a_later_write_would_show(model, digester, monkeypatch):
    def hash_when_settled(path):
        assert time.time_ns() >= path.stat().st_ctime_ns + checkpoint._TICK_NS
        return bytes(32)

    monkeypatch.setattr(checkpoint, "_hash_file", hash_when_settled)
    digester.digest(model)
    assert digester.files_hashed == 2


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"key": [1], "digest": "00"}', b"\xff\xfe", b"[" * 5000])
def test_a_damaged_entry_is_computed_anew(model, digester, damage):
    first = digester.digest(model)
    entries = list(digester.cache_directory.glob("*.json"))
    assert len(entries) == 2
    for entry in entries:
        entry.write_bytes(damage)
    assert digester.digest(model) == first
    assert digester.files_hashed == 4


def test_a_swapped_entry_is_not_believed(model, digester):
    first = digester.digest(model)
    one, two = sorted(digester.cache_directory.glob("*.json"))
    one_text, two_text = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_text)
    two.write_bytes(one_text)
    assert digester.digest(model) == first


def test_no_temporary_is_left(model, digester):
    digester.digest(model)
    assert not list(digester.cache_directory.glob(".*"))


def test_a_cache_directory_that_cannot_be_written_does_not_matter(model, tmp_path, digester):
    (tmp_path / "file").write_text("")
    blocked = WeightDigester(tmp_path / "file" / "cache")
    assert blocked.digest(model) == digester.digest(model)
    assert blocked.digest(model) == digester.digest(model)
    assert blocked.files_hashed == 4


def test_a_link_stands_for_the_file_behind_it(model, digester, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    for path in model.glob("*.safetensors"):
        (links / path.name).symlink_to(path)
    assert digester.digest(links) == digester.digest(model)
    assert digester.files_hashed == 2


def test_weights_that_cannot_be_read_are_unknown(tmp_path, digester):
    with pytest.raises(IdentityError, match=r"no \*\.safetensors"):
        digester.digest(tmp_path)
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(IdentityError, match="cannot be read"):
        digester.digest(tmp_path)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_pipe_in_the_place_of_weights_is_refused_without_waiting(sampled, model, tmp_path):
    os.mkfifo(model / "z.safetensors")
    with pytest.raises(IdentityError, match="no regular file"):
        WeightDigester(tmp_path / "kept", sampled=sampled).digest(model)


def test_a_device_in_the_place_of_weights_is_refused(model, digester):
    (model / "z.safetensors").symlink_to("/dev/zero")
    with pytest.raises(IdentityError, match="no regular file"):
        digester.digest(model)


def test_a_pipe_in_the_place_of_an_adapters_weights_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(IdentityError, match="no regular file"):
        adapter_digest(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_unknown(model, digester, monkeypatch):
    def hash_and_disturb(path):
        path.write_bytes(b"other")
        return hashlib.blake2b(b"stale", digest_size=32).digest()

    monkeypatch.setattr(checkpoint, "_hash_file", hash_and_disturb)
    with pytest.raises(IdentityError, match="changed while it was read"):
        digester.digest(model)
    monkeypatch.undo()
    assert digester.digest(model) == WeightDigester(model / "fresh").digest(model)


def digest_and_tell(cache, model, queue):
    digester = WeightDigester(Path(cache))
    queue.put((digester.digest(Path(model)), digester.files_hashed))


def started(*args):
    queue = PROCESSES.SimpleQueue()
    process = PROCESSES.Process(target=digest_and_tell, args=(*args, queue))
    process.start()
    return process, queue


def finished(process, queue):
    result = queue.get()
    process.join()
    assert process.exitcode == 0
    return result


def test_samples_are_in_a_namespace_of_their_own(model, digester, tmp_path):
    sampler = WeightDigester(digester.cache_directory, sampled=True)
    full, sampled = digester.digest(model), sampler.digest(model)
    assert sampled.startswith("sampled:")
    assert len(bytes.fromhex(sampled.removeprefix("sampled:"))) == 32
    assert sampled.removeprefix("sampled:") != full
    assert [digester.digest(model), sampler.digest(model)] == [full, sampled]
    assert sampler.files_hashed == digester.files_hashed == 2


WINDOW = checkpoint._SAMPLE_BYTES
LONG = 100 * WINDOW  # of which 64 windows are read


def sampled_after(model, digester, offset, *, size=LONG):
    """The digest of zeros with one byte changed at ``offset``, or of ``size`` zeros."""
    with (model / "a.safetensors").open("wb") as stream:
        stream.truncate(size)
        if offset is not None:
            stream.seek(offset)
            stream.write(b"x")
    return WeightDigester(digester.cache_directory, sampled=True).digest(model)


@pytest.mark.parametrize("offset", [0, WINDOW - 1, 99 * WINDOW // 63, LONG - WINDOW, LONG - 1])
def test_what_lies_in_a_window_counts(model, digester, offset):
    assert sampled_after(model, digester, offset) != sampled_after(model, digester, None)


def test_a_sample_reads_a_part_only_but_knows_the_size(model, digester):
    plain = sampled_after(model, digester, None)
    assert sampled_after(model, digester, WINDOW + 1) == plain  # between the first two windows
    assert sampled_after(model, digester, None, size=LONG + 1) != plain


def test_of_a_short_file_samples_see_every_byte(model, digester):
    seen = {sampled_after(model, digester, offset, size=20) for offset in range(20)}
    assert len(seen) == 20


def test_of_two_processes_one_computes_and_both_answer_alike(model, digester):
    with (model / "c.safetensors").open("wb") as stream:
        stream.truncate(64 << 20)
    runs = [started(str(digester.cache_directory), str(model)) for _ in range(2)]
    results = [finished(*run) for run in runs]
    assert {digest for digest, _ in results} == {digester.digest(model)}
    assert sorted(count for _, count in results) == [0, 3]


def test_a_process_waits_for_the_one_that_computes(model, digester):
    with contextlib.ExitStack() as held:
        held.enter_context(digester._lock())
        process, queue = started(str(digester.cache_directory), str(model))
        # The other process is told to be waiting by the kernel's list of locks, not by time.
        wait_until_blocked(digester.cache_directory / "lock", process)
        assert not list(digester.cache_directory.glob("*.json"))
    assert finished(process, queue)[1] == 2


def wait_until_blocked(path, process):
    """Return once /proc/locks shows a waiter ("->") on ``path``."""
    inode = f":{path.stat().st_ino} "
    while process.is_alive():
        lines = Path("/proc/locks").read_text().splitlines()
        if any("->" in line and inode in line for line in lines):
            return
    raise AssertionError("the process ended without waiting")


def test_a_killed_holder_does_not_block_the_next(model, digester):
    process = PROCESSES.Process(target=hold_for_ever, args=(str(digester.cache_directory),))
    process.start()
    while not (digester.cache_directory / "held").exists():
        assert process.is_alive()
    process.kill()
    process.join()
    assert len(digester.digest(model)) == 64


def hold_for_ever(cache):
    with WeightDigester(Path(cache))._lock():
        Path(cache, "held").touch()
        os.read(os.pipe()[0], 1)


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "alpha": 16}')
    return tmp_path


def test_an_adapter_is_its_weights_and_its_configuration_by_value(adapter):
    first = adapter_digest(adapter)
    assert len(bytes.fromhex(first)) == 32
    (adapter / "adapter_config.json").write_text('{"alpha": 16.0, "r": 8}')
    assert adapter_digest(adapter) == first
    (adapter / "adapter_config.json").write_text('{"r": 8, "alpha": 32}')
    assert adapter_digest(adapter) != first


def test_other_weights_are_another_adapter(adapter):
    first = adapter_digest(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"Weights")
    assert adapter_digest(adapter) != first


@pytest.mark.parametrize("missing", ["adapter_model.safetensors", "adapter_config.json"])
def test_half_an_adapter_is_unknown(adapter, missing):
    (adapter / missing).unlink()
    with pytest.raises(IdentityError, match="unknown"):
        adapter_digest(adapter)


def test_an_adapter_whose_configuration_is_no_data_is_unknown(adapter):
    (adapter / "adapter_config.json").write_text("[" * 5000)
    with pytest.raises(IdentityError, match="unknown"):
        adapter_digest(adapter)
