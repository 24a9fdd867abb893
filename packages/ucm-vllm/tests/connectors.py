"""Both halves of a connector on the tiny dense model, stepped in vLLM's order."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
from engine_doubles import scheduler_output
from halves import PAGES, memory
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from ucm_vllm.connector import UCMConnector

PARALLEL = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "rank": 0}


def checkpoint(directory: Path) -> Path:
    """Configuration and weights of the tiny dense model; the weights are only ever read as bytes."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(families.DENSE.config))
    (directory / "model.safetensors").write_bytes(b"the weights")
    return directory


def engine(directory: Path, **changes: Any) -> Any:
    """A double of VllmConfig with a real KVTransferConfig; layers are found where vLLM keeps them."""
    extra = {"root": str(directory / "root"), "ring_bytes": "32MiB"} | changes.pop("extra", {})
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    layer = SimpleNamespace(get_attn_backend=lambda: backend, isa=changes.pop("isa", "vec"))
    transfer = {"kv_connector": "UCMConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    model = {
        "model": str(checkpoint(directory)),
        "hf_overrides": {},
        "hf_config_path": None,
        "quantization": None,
    }
    model |= {"dtype": "torch.bfloat16", "max_model_len": 2048, "revision": None} | changes.pop("model", {})
    parallel = PARALLEL | changes.pop("parallel", {})
    load_format = changes.pop("load_format", "auto")
    events = SimpleNamespace(enable_kv_cache_events=changes.pop("events", False))
    scheduling = SimpleNamespace(async_scheduling=changes.pop("async_scheduling", False))
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**transfer | changes, kv_connector_extra_config=extra),
        model_config=SimpleNamespace(**model),
        load_config=SimpleNamespace(load_format=load_format),
        cache_config=SimpleNamespace(),
        kv_events_config=events,
        scheduler_config=scheduling,
        parallel_config=SimpleNamespace(**parallel),
        compilation_config=SimpleNamespace(
            static_forward_context={families.attention(n): layer for n in range(4)}
        ),
    )


def groups(model: families.TinyModel = families.DENSE) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=PAGES,
        kv_cache_tensors=[],
        kv_cache_groups=list(model.groups),
        cache_hit_alignment_tokens=128,
    )


def pair(directory: Path, fill: str = "random", **changes: Any) -> tuple[UCMConnector, UCMConnector, Any]:
    """(scheduler's, worker's, memory), made in vLLM's order and introduced to each other."""
    config = engine(directory, **changes)
    worker = UCMConnector(config, KVConnectorRole.WORKER, groups())
    tensors = memory(families.DENSE, fill)
    worker.register_kv_caches(tensors)
    scheduler = UCMConnector(config, KVConnectorRole.SCHEDULER, groups())
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    return scheduler, worker, tensors


def run_step(scheduler: UCMConnector, worker: UCMConnector, output: Any) -> KVConnectorOutput:
    """One step in the order of vLLM's V1 runner, metadata pickled as between processes."""
    meta = pickle.loads(pickle.dumps(scheduler.build_connector_meta(output)))
    worker.handle_preemptions(meta)
    worker.bind_connector_metadata(meta)
    worker.start_load_kv(None)
    for number in range(4):
        worker.wait_for_layer_load(families.attention(number))
        worker.save_kv_layer(families.attention(number), None, None)
    worker.wait_for_save()
    results = worker.get_transfer_results(set())
    done = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_stats=worker.get_kv_connector_stats(),
        kv_connector_worker_meta=pickle.loads(pickle.dumps(worker.build_connector_worker_meta())),
    )
    worker.clear_connector_metadata()
    scheduler.update_connector_output(done)
    return done


def finish(scheduler: UCMConnector, worker: UCMConnector, ended: Any) -> None:
    """End a request; when this returns its blocks are vLLM's again, told once."""
    waits, parameters = scheduler.request_finished_all_groups(ended, ([],))
    assert parameters is None
    sent: list[str] = []
    while waits and not sent:
        assert scheduler.has_pending_block_frees()
        sent += run_step(scheduler, worker, scheduler_output([], {})).finished_sending or ()
    assert sent == ([ended.request_id] if waits else [])
    assert not scheduler.has_pending_block_frees()
    assert run_step(scheduler, worker, scheduler_output([], {})).finished_sending == set()
