"""How neighbours keep blocks, where they are installed: their own calls, over units of equal size.

Each function makes a `StorePeer` for a number of objects of one unit; ImportError where it is not installed.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame import Round, timed
from benchmarks.rig import WAIT_S, page_memory
from ucm_core.ops.config import CacheConfig
from ucm_core.store.geometry import Geometry

THREADS = CacheConfig().thread_count()
"""As many as ours has, for whoever lets that be chosen."""


@dataclass(frozen=True, slots=True)
class StorePeer:
    """Rounds of one neighbour: a save goes under new names, a load brings what was saved last."""

    save: Round
    load: Round
    close: Callable[[], object]


def vllm_files(folder: Path, objects: int, unit_bytes: int) -> StorePeer:
    """The file calls of vLLM's offload tier: O_DIRECT, temporary name, rename; no checksum."""
    calls = importlib.import_module("vllm.v1.kv_offload.tiering.fs.io")
    memory = page_memory(objects, Geometry(1, unit_bytes)).reshape(-1).data
    offsets = [unit_bytes * n for n in range(objects)]
    pool, names = ThreadPoolExecutor(THREADS), _Names(folder / "vllm", objects)

    def run(call: Callable[..., object]) -> None:
        parts = [slice(begin, None, THREADS) for begin in range(THREADS)]
        works = [pool.submit(call, names.now[part], memory, offsets[part], unit_bytes) for part in parts]
        for work in works:
            work.result(WAIT_S)

    save = names.renewed(timed(lambda: run(calls.batch_store_block)))
    return StorePeer(save, timed(lambda: run(calls.batch_load_block)), pool.shutdown)


def lmcache_files(folder: Path, objects: int, unit_bytes: int) -> StorePeer:
    """The local disk of LMCache with O_DIRECT: written in place, known only to the process that wrote."""
    torch = importlib.import_module("torch")
    backend = importlib.import_module("lmcache.v1.storage_backend.local_disk_backend").LocalDiskBackend
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    host, make_keys = _lmcache_host(folder / "lmcache", objects, unit_bytes)
    disk: Any = backend(host.config, loop, host, dst_device="cpu")
    held = [_allocate(host, unit_bytes, torch) for _ in range(objects)]
    seeds, keys = itertools.count(), make_keys(0)

    def save() -> None:
        ended = threading.Semaphore(0)
        disk.batched_submit_put_task(keys, held, on_complete_callback=lambda _: ended.release())
        for _ in keys:
            assert ended.acquire(timeout=WAIT_S)

    def load() -> None:
        for each in disk.batched_get_blocking(keys):
            each.ref_count_down()

    def renew() -> None:
        keys[:] = make_keys(next(seeds) + 1)

    return StorePeer(_after(renew, timed(save)), timed(load), lambda: loop.call_soon_threadsafe(loop.stop))


def lmcache_memory(folder: Path, objects: int, unit_bytes: int) -> StorePeer:
    """The host memory of LMCache: a save allocates, copies and enters; a load looks up and copies."""
    torch = importlib.import_module("torch")
    host, make_keys = _lmcache_host(folder / "lmcache-memory", objects, unit_bytes)
    engine = torch.from_numpy(page_memory(objects, Geometry(1, unit_bytes)).reshape(objects, unit_bytes))
    seeds, keys = itertools.count(), make_keys(0)

    def save() -> None:
        held = [_allocate(host, unit_bytes, torch) for _ in keys]
        for each, unit in zip(held, engine, strict=True):
            each.tensor.copy_(unit)
        host.batched_submit_put_task(keys, held)
        for each in held:
            each.ref_count_down()

    def load() -> None:
        for key, unit in zip(keys, engine, strict=True):
            found = host.get_blocking(key)
            unit.copy_(found.tensor)
            found.ref_count_down()

    def renew() -> None:
        for key in keys:
            host.remove(key)
        keys[:] = make_keys(next(seeds) + 1)

    save()
    return StorePeer(_after(renew, timed(save)), timed(load), lambda: None)


def mooncake_memory(folder: Path, objects: int, unit_bytes: int) -> StorePeer:
    """A Mooncake store with a segment of its own: everything is a copy within this process."""
    module = importlib.import_module("mooncake.store")
    master, address = _mooncake_master(Path(module.__file__ or "").parent / "mooncake_master", folder)
    store: Any = module.MooncakeDistributedStore()
    size = 3 * objects * unit_bytes
    assert store.setup(f"127.0.0.1:{_port()}", "P2PHANDSHAKE", size, 64 << 20, "tcp", "", address) == 0
    memory = page_memory(objects, Geometry(1, unit_bytes))
    assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    addresses = (memory.ctypes.data + unit_bytes * np.arange(objects)).tolist()
    names, sizes = _Names(Path(), objects), [unit_bytes] * objects

    def save() -> None:
        assert not any(store.batch_put_from(names.now, addresses, sizes))

    def load() -> None:
        assert store.batch_get_into(names.now, addresses, sizes) == sizes

    def renew() -> None:
        for name in names.now:
            store.remove(name, True)
        names.renew()

    def close() -> None:
        store.unregister_buffer(memory.ctypes.data)  # the memory lives until here
        store.close()
        master.terminate()
        master.wait(WAIT_S)

    save()
    return StorePeer(_after(renew, timed(save)), timed(load), close)


class _Names:
    """Names of one round after the other."""

    def __init__(self, folder: Path, objects: int) -> None:
        self._folder, self._objects, self._round = folder, objects, itertools.count()
        self.now: list[str] = []
        self.renew()

    def renew(self) -> None:
        number = next(self._round)
        self.now = [str(self._folder / f"{number}-{n}") for n in range(self._objects)]

    def renewed(self, round_: Round) -> Round:
        """The round, under new names each time."""
        return _after(self.renew, round_)


def _after(first: Callable[[], object], round_: Round) -> Round:
    """The round, and ``first`` before it, which is not measured."""
    return lambda: (first(), round_())[1]


def _lmcache_host(folder: Path, objects: int, unit_bytes: int) -> tuple[Any, Callable[[int], list[Any]]]:
    """The host memory of LMCache, large enough for four rounds, and keys of a round."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # those that have shared a copy go on spinning, in whoever's turn comes next
    config = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig
    metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata
    backend = importlib.import_module("lmcache.v1.storage_backend.local_cpu_backend").LocalCPUBackend
    make_key = importlib.import_module("lmcache.utils").CacheEngineKey
    settings = config.from_defaults(
        local_cpu=True,
        max_local_cpu_size=4 * objects * unit_bytes / 2**30,
        local_disk=str(folder),
        max_local_disk_size=64.0,
        extra_config={"use_odirect": True, "disk_io_threads": THREADS},
    )
    host = backend(settings, metadata("m", 1, 1, 0, 0, torch.uint8, (1, 2, 256, 8, 64)), dst_device="cpu")
    return host, lambda seed: [make_key("m", 1, 0, seed << 20 | n, torch.uint8) for n in range(objects)]


def _allocate(host: Any, unit_bytes: int, torch: Any) -> Any:
    form = importlib.import_module("lmcache.v1.memory_management").MemoryFormat.KV_2LTD
    return host.allocate(torch.Size([unit_bytes]), torch.uint8, form)


def _mooncake_master(binary: Path, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The server of Mooncake's directory, and its address once it answers."""
    port, metrics = _port(), _port()
    words = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}"]
    words += ["--metrics_host=127.0.0.1", "--enable_http_metadata_server=false"]
    quiet = subprocess.DEVNULL
    master = subprocess.Popen([binary, *words], stdout=quiet, stderr=quiet, cwd=folder, env=os.environ)
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return master, f"127.0.0.1:{port}"
        except OSError:
            time.sleep(0.05)
    master.kill()
    raise SystemExit("the master of Mooncake does not answer")


def _port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


FILES = {"vLLM's file tier": vllm_files, "LMCache's disk": lmcache_files}
MEMORY = {"LMCache's host memory": lmcache_memory, "Mooncake": mooncake_memory}
"""What a benchmark calls them."""
