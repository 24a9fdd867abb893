"""The connector as vLLM meets it: its signatures, what it refuses at start, and that no hook ever raises."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import families
from connectors import engine, finish, groups, pair, run_step
from engine_doubles import request, scheduler_output
from halves import PAGES, WAIT_S, memory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput

from ucm_core.errors import ConfigError, IdentityError, LayoutError
from ucm_core.flow.ticket import ResultCode
from ucm_core.store.files import FileTier
from ucm_core.store.tiers import log
from ucm_core.store.writing import Writer
from ucm_vllm.connector import UCMConnector


class Blocks:
    """A double of KVCacheBlocks."""

    def __init__(self, *tables: list[int]) -> None:
        self._tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self._tables


def test_the_package_imports_without_vllm() -> None:
    code = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; import ucm_vllm"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_vllm_finds_the_class_by_the_package_name() -> None:
    import ucm_vllm

    assert ucm_vllm.UCMConnector is UCMConnector
    assert issubclass(UCMConnector, SupportsHMA)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = ucm_vllm.Other


OVERRIDDEN = sorted(
    name
    for name, member in vars(UCMConnector).items()
    if callable(member) and hasattr(KVConnectorBase_V1, name) and not name.startswith("__")
)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_hooks_have_the_signature_that_vllm_calls(name: str) -> None:
    ours, theirs = (
        list(inspect.signature(getattr(c, name)).parameters) for c in (UCMConnector, KVConnectorBase_V1)
    )
    assert ours == theirs


def test_all_abstract_hooks_are_there() -> None:
    assert not UCMConnector.__abstractmethods__
    assert len(OVERRIDDEN) >= 15


# -- a whole life


def test_one_engine_saves_and_another_loads(tmp_path: Path) -> None:
    scheduler, worker, tensors = pair(tmp_path)
    first = request(300)
    assert scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    scheduler.update_state_after_alloc(first, Blocks([1, 2, 3]), 0)
    run_step(scheduler, worker, scheduler_output([(first, 0, 300, ([1, 2, 3],))], {}))
    finish(scheduler, worker, first)
    for half in (scheduler, worker):
        half.shutdown()
    scheduler, worker, empty = pair(tmp_path, fill="zero")
    again = request(300, "again")
    assert scheduler.get_num_new_matched_tokens(again, 0) == (256, False)
    scheduler.update_state_after_alloc(again, Blocks([7, 8, 9]), 256)
    done = run_step(scheduler, worker, scheduler_output([(again, 256, 44, ([7, 8, 9],))], {}))
    assert done.invalid_block_ids == set()
    for layer, tensor in tensors.items():
        assert (
            empty[layer][[7, 8]].view(dtype=families.torch.int16) == tensor[[1, 2]].view(families.torch.int16)
        ).all()
    for half in (scheduler, worker):
        half.shutdown()


def test_reset_cache_is_changed_weights(tmp_path: Path) -> None:
    scheduler, worker, _ = pair(tmp_path)
    first = request(300)
    scheduler.get_num_new_matched_tokens(first, 0)
    run_step(scheduler, worker, scheduler_output([(first, 0, 300, ([1, 2, 3],))], {}))
    assert scheduler.reset_cache() is True
    assert scheduler.get_num_new_matched_tokens(request(300, "again"), 0) == (0, False)
    for half in (scheduler, worker):
        half.shutdown()


@pytest.mark.parametrize(("blocks_in_use", "saves"), [(0, 1), (2, 0)])
def test_blocks_in_use_when_the_weights_change_are_not_trusted(
    tmp_path: Path, blocks_in_use: int, saves: int
) -> None:
    """Their blocks are named in vLLM's prefix cache only later, and may then be shared."""
    scheduler, worker, _ = pair(tmp_path)
    pool = BlockPool(PAGES, enable_caching=True, hash_block_size=128)
    scheduler.bind_kv_cache_manager(SimpleNamespace(block_pool=pool))  # type: ignore[arg-type]
    pool.get_new_blocks(blocks_in_use)
    assert scheduler.reset_cache() is True
    borrower = request(200)
    scheduler.get_num_new_matched_tokens(borrower, 128)
    step = scheduler.build_connector_meta(scheduler_output([(borrower, 128, 72, ([7, 8],))], {}))
    assert len(step.plan.saves) == saves
    for half in (scheduler, worker):
        half.shutdown()


def test_blocks_that_could_not_be_filled_are_taken_out_of_the_prefix_cache_of_vllm(tmp_path: Path) -> None:
    """Their request is to compute them again; if it is preempted or aborted before, they stay garbage."""
    scheduler, worker, _ = pair(tmp_path)
    withdrawn: list[set[int]] = []
    manager = SimpleNamespace(block_pool=None, evict_blocks=withdrawn.append)
    scheduler.bind_kv_cache_manager(manager)  # type: ignore[arg-type]
    scheduler.update_connector_output(KVConnectorOutput())
    scheduler.update_connector_output(KVConnectorOutput(invalid_block_ids={7}))
    scheduler.update_connector_output(KVConnectorOutput())
    assert withdrawn == [{7}, {7}], "until they are computed again"
    for half in (scheduler, worker):
        half.shutdown()


def test_a_cache_is_best_effort(tmp_path: Path) -> None:
    scheduler, worker, _ = pair(tmp_path)
    assert not scheduler.requires_kv_delivery
    assert UCMConnector._cache_hit_source.value == "disk"
    for half in (scheduler, worker):
        half.shutdown()


# -- what cannot work is refused at start, before any file is touched


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy = 'fail'"),
        ({"extra": {"rot": "/tmp/x"}}, "unknown setting 'rot'; did you mean 'root'"),
        ({"extra": {"grain_tokens": 0}}, "grain_tokens"),
        ({"extra": {"ring_bytes": 4096}}, "ring_bytes"),
        ({"extra": {"config_file": "settings.yaml"}}, "config_file and ring_bytes, root"),
        ({"parallel": {"data_parallel_size": 2}}, "data_parallel_size = 2"),
    ],
)
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_setting_that_cannot_work(
    tmp_path: Path, changes: dict[str, Any], message: str, role: KVConnectorRole
) -> None:
    with pytest.raises(ConfigError, match=message):
        UCMConnector(engine(tmp_path, **changes), role, groups())
    assert not (tmp_path / "root").exists()


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        UCMConnector(engine(tmp_path), KVConnectorRole.WORKER, groups())


def test_groups_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.0\.attn\.attn"):
        UCMConnector(engine(tmp_path), KVConnectorRole.SCHEDULER, groups(families.GPT_OSS))
    assert not (tmp_path / "root").exists()


def test_a_layout_that_is_not_known(tmp_path: Path) -> None:
    worker = UCMConnector(engine(tmp_path, isa="amx"), KVConnectorRole.WORKER, groups())
    with pytest.raises(LayoutError, match="ISA 'amx'"):
        worker.register_kv_caches(memory(families.DENSE, "zero"))
    worker.shutdown()


def test_halves_of_different_models(tmp_path: Path) -> None:
    config = engine(tmp_path)
    worker = UCMConnector(config, KVConnectorRole.WORKER, groups())
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    scheduler = UCMConnector(config, KVConnectorRole.SCHEDULER, groups())
    with pytest.raises(IdentityError, match="weights"):
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    for half in (scheduler, worker):
        half.shutdown()


def test_settings_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(f"root: {tmp_path / 'elsewhere'}\n")
    config = engine(tmp_path)
    config.kv_transfer_config.kv_connector_extra_config = {"config_file": str(tmp_path / "settings.yaml")}
    UCMConnector(config, KVConnectorRole.WORKER, groups()).shutdown()
    assert (tmp_path / "elsewhere").is_dir()


def slots(worker: UCMConnector) -> int:
    return store_of(worker).slots


def store_of(worker: UCMConnector) -> Any:
    assert worker._worker is not None
    cache = worker._worker._cache.current
    assert cache is not None
    return cache.stores["full"]


EFFECTS: dict[tuple[str, Any], Callable[[UCMConnector, Path], bool]] = {
    ("ring_bytes", 0): lambda worker, root: slots(worker) == 0 and len(objects(root)) == 4,
    ("disk_bytes", 0): lambda worker, root: slots(worker) > 4 and objects(root) == [],
    ("ring_policy", "lru"): lambda worker, _: store_of(worker).statistics().ring.policy == "lru",
    ("ttl_s", 60): lambda worker, _: store_of(worker)._tiers.limits.ttl_s == 60,
    ("io_engine", "uring"): lambda _, root: len(objects(root)) == 4,
    ("io_engine", "threads"): lambda _, root: len(objects(root)) == 4,
}
"""Per setting of the store what shows that the adapter passes it on."""


def objects(root: Path) -> list[Path]:
    return [path for path in root.glob("*/full/*/*") if path.is_file()]


@pytest.mark.parametrize("setting", EFFECTS, ids=str)
def test_settings_of_the_store_reach_both_halves_and_blocks_come_back(
    tmp_path: Path, setting: tuple[str, Any]
) -> None:
    name, value = setting
    scheduler, worker, _ = pair(tmp_path, extra={name: value})
    for half in (scheduler._scheduler, worker._worker):
        assert half is not None
        assert getattr(half._cache.current.config, name) == value
    first = request(300)
    scheduler.get_num_new_matched_tokens(first, 0)
    run_step(scheduler, worker, scheduler_output([(first, 0, 300, ([1, 2, 3],))], {}))
    worker._worker.wait_durable(WAIT_S)  # type: ignore[union-attr]  # False without files
    assert EFFECTS[setting](worker, tmp_path / "root")
    assert scheduler.get_num_new_matched_tokens(request(300, "again"), 0) == (256, False)
    scheduler.request_finished(request(300, "again"), [])
    for half in (scheduler, worker):
        half.shutdown()


def test_what_is_not_kept_at_shutdown_is_said_in_the_log_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that are still being written when vLLM ends, on a medium that then refuses them."""
    closing, real = threading.Event(), Writer.wait_idle

    def refuse(_: FileTier, keys: Any, *__: Any, **___: Any) -> Any:
        assert closing.wait(WAIT_S)
        return np.full(len(keys), ResultCode.UNAVAILABLE, dtype=np.uint8)

    def wait_idle(writer: Writer, timeout_s: float | None) -> bool:
        closing.set()
        return real(writer, timeout_s)

    monkeypatch.setattr(FileTier, "write", refuse)
    monkeypatch.setattr(Writer, "wait_idle", wait_idle)
    monkeypatch.setattr(log, "filters", [])  # the same may have been said a moment ago
    scheduler, worker, _ = pair(tmp_path)
    first = request(300)
    scheduler.get_num_new_matched_tokens(first, 0)
    run_step(scheduler, worker, scheduler_output([(first, 0, 300, ([1, 2, 3],))], {}))
    worker.shutdown()
    assert "row full is closed: 0 objects reached the medium, 4 did not" in caplog.text
    scheduler.shutdown()


# -- what cannot be identified is not cached, and nothing else happens


def test_an_unknown_model_works_and_caches_nothing(tmp_path: Path) -> None:
    scheduler, worker, _ = pair(tmp_path, load_format="dummy")
    asked = request(300)
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
    scheduler.update_state_after_alloc(asked, Blocks([1, 2, 3]), 0)
    run_step(scheduler, worker, scheduler_output([(asked, 0, 300, ([1, 2, 3],))], {}))
    assert scheduler.request_finished_all_groups(asked, ([1, 2, 3],)) == (False, None)
    assert scheduler.reset_cache() is None
    assert not (tmp_path / "root").exists()


# -- layers, statistics, events


def test_layer_by_layer_wants_graphs_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("layerwise: false\n")
    wants = UCMConnector.requires_piecewise_for_cudagraph
    assert [wants({}), wants({"layerwise": False}), wants({"config_file": str(file)})] == [True, False, False]


@pytest.mark.parametrize("given", [{"extra": {"load_asynchronously": True}}, {"async_scheduling": True}])
def test_asynchronous_loads_are_a_setting_and_a_must_where_steps_are_planned_ahead(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    scheduler, worker, _ = pair(tmp_path, **given)
    first = request(300)
    scheduler.get_num_new_matched_tokens(first, 0)
    run_step(scheduler, worker, scheduler_output([(first, 0, 300, ([1, 2, 3],))], {}))
    finish(scheduler, worker, first)
    assert scheduler.get_num_new_matched_tokens(request(300, "again"), 0) == (256, True)
    for half in (scheduler, worker):
        half.shutdown()


def test_vllm_knows_the_class_by_name() -> None:
    assert KVConnectorFactory.get_connector_class_by_name("UCMConnector") is UCMConnector


def test_events_are_told_where_vllm_publishes_them(tmp_path: Path) -> None:
    scheduler, worker, _ = pair(tmp_path, events=True)
    first = request(300)
    scheduler.get_num_new_matched_tokens(first, 0)
    run_step(scheduler, worker, scheduler_output([(first, 0, 300, ([1, 2, 3],))], {}))
    finish(scheduler, worker, first)
    worker._worker.wait_durable(WAIT_S)  # type: ignore[union-attr]
    run_step(scheduler, worker, scheduler_output([], {}))
    events = list(scheduler.take_events())
    assert sorted(event.token_ids[0] for event in events) == sorted(first.all_token_ids[0:256:64])  # type: ignore[attr-defined]
    for half in (scheduler, worker):
        half.shutdown()


def test_a_handshake_of_another_connector_waits_for_the_first_report(tmp_path: Path) -> None:
    """Beside it, vLLM's wrapper passes on one for all."""
    scheduler, worker, _ = pair(tmp_path)
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): KVConnectorHandshakeMetadata()})
    first = request(300)
    scheduler.get_num_new_matched_tokens(first, 0)
    run_step(scheduler, worker, scheduler_output([(first, 0, 300, ([1, 2, 3],))], {}))
    finish(scheduler, worker, first)
    assert scheduler.get_num_new_matched_tokens(request(300, "again"), 0) == (256, False)
    for half in (scheduler, worker):
        half.shutdown()


# -- no hook raises


def test_scheduler_hooks_that_fail_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, worker, _ = pair(tmp_path)
    monkeypatch.setattr("ucm_core.coordinator.coordinator.Coordinator.verdict", _fail)
    monkeypatch.setattr("ucm_core.coordinator.coordinator.Coordinator.missing", _fail)
    asked = request(300)
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
    scheduler.update_state_after_alloc(asked, Blocks([1, 2, 3]), 256)
    done = run_step(scheduler, worker, scheduler_output([(asked, 256, 44, ([1, 2, 3],))], {}))
    assert done.invalid_block_ids == {1, 2}
    for half in (scheduler, worker):
        half.shutdown()


def test_worker_hooks_that_fail_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, worker, _ = pair(tmp_path)
    for name in ("before_layer", "after_layer", "end_step", "collect", "report"):
        monkeypatch.setattr(f"ucm_vllm.worker_half.WorkerHalf.{name}", _fail)
    done = run_step(scheduler, worker, scheduler_output([], {}))
    assert (done.finished_recving, done.kv_connector_worker_meta) == (set(), None)
    monkeypatch.undo()
    for half in (scheduler, worker):
        half.shutdown()


def _fail(*_: object, **__: object) -> Any:
    raise RuntimeError("a defect")
