"""What benchmarks of the store kernel have in common: a store over this disk, and a compiled neighbour."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from benchmarks.frame import Cost, Round
from ucm_core.flow.copy import BufferBlocks
from ucm_core.ops.config import CacheConfig
from ucm_core.store import names, region
from ucm_core.store.block import BlockStore
from ucm_core.store.files import FileTier
from ucm_core.store.geometry import Geometry
from ucm_core.store.pool import IoPool
from ucm_core.store.ring import Ring, RingOptions
from ucm_core.store.root import CacheRoot
from ucm_core.store.tiers import StoreLimits, Tiers

NATIVE = Path(__file__).parent.parent / "packages/ucm-core/native"
WAIT_S = 120.0

Bytes = npt.NDArray[np.uint8]


def some_keys(count: int, seed: int = 0) -> Bytes:
    """Keys that are no other seed's."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def page_memory(objects: int, geometry: Geometry) -> Bytes:
    """Page-aligned ``uint8[objects, shards, shard_bytes]``, all touched, different from place to place."""
    shape = (objects, geometry.shards, geometry.shard_bytes)
    memory = np.frombuffer(mmap.mmap(-1, int(np.prod(shape))), dtype=np.uint8)
    memory[:] = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8), memory.size)
    return memory.reshape(shape)


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder on the disk of the present directory; O_DIRECT must work there."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        yield Path(folder)


class Rig:
    """A store of its own: a ring of ``slots``, files in ``folder``, threads as in a cache. A context.

    The ring has its memory from the beginning: what that takes is another benchmark's (`bench_open`).
    """

    def __init__(
        self,
        folder: Path,
        geometry: Geometry,
        *,
        slots: int,
        ring_name: str | None = None,
        uring: bool = False,
    ) -> None:
        self.geometry = geometry
        self.ring_name = ring_name or f"bench-{secrets.token_hex(8)}"
        self.root = CacheRoot(folder, uring=uring).open()
        row = self.root.path / ("0" * 32) / f"{geometry.shards}-{geometry.shard_bytes}"
        self.files = FileTier(row, geometry, row_seed=b"", segment="hx", root=self.root)
        self.ring = Ring.open(
            self.ring_name,
            slots=slots,
            payload_bytes=geometry.payload_bytes,
            geometry_digest=geometry.digest,
            options=RingOptions(shards=geometry.shards, prefault=True),
        )
        self.pool = IoPool(CacheConfig().thread_count())
        self.store = BlockStore(Tiers(self.ring, self.files, self.pool, "row", StoreLimits()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.close()
        self.pool.close(WAIT_S)
        self.root.close()

    def await_idle(self) -> None:
        """Wait until no work of the store is under way: no slot is referenced then."""
        assert self.store._work.wait_idle(WAIT_S)
        assert self.store._writer.wait_idle(WAIT_S)

    def know_folders(self) -> None:
        """Let all folders be there and known, as in a root that is in use."""
        folders = [f"{number:03x}" for number in range(1 << 4 * names.FAN_OUT_DIGITS)]
        for folder in folders:
            (self.files.directory / folder).mkdir(parents=True, exist_ok=True)
        keys = np.frombuffer(bytes.fromhex("".join(f"{folder:0<64}" for folder in folders)), dtype=np.uint8)
        assert not self.store.lookup(keys.reshape(-1, 32)).any()

    def keep(self, keys: Bytes, payloads: Bytes) -> None:
        """Save, and wait for the files."""
        if not self.store.save(keys, BufferBlocks(payloads)).wait_durable(WAIT_S):
            raise SystemExit("this disk keeps nothing: is it full?")


class Neighbour:
    """`kernel.cc` at work in a process of its own, one round at a time. A context."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [_compiled(), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @classmethod
    def on_files(cls, rig: Rig, count: int, size_bytes: int) -> Self:
        """One whose files are so many and so large, in the folders and the ring of a store."""
        rig.files.directory.mkdir(parents=True, exist_ok=True)
        memory = region.DIRECTORY / f"ucm-{os.geteuid()}-{rig.ring_name}"
        begin = memory.stat().st_size - rig.ring.slots * rig.geometry.payload_bytes  # payloads come last
        return cls("files", str(rig.files.directory), str(count), str(size_bytes), str(memory), str(begin))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def answer(self, words: str) -> Cost | None:
        """The cost of one round; None where this kind of round is refused."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the neighbour ended at {words!r}")
        numbers = [int(word) * 1e-9 for word in line.split()]
        return Cost(*numbers) if numbers else None

    def round(self, words: str = "") -> Round:
        """This round, to be run in turns with others."""

        def run() -> Cost:
            cost = self.answer(words)
            assert cost is not None
            return cost

        return run


_folder: tempfile.TemporaryDirectory[str] | None = None


def _compiled() -> str:
    """Compile `kernel.cc` once per run, with the compiler of the system."""
    global _folder  # noqa: PLW0603 - lives as long as the run
    if _folder is None:
        compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
        folder = tempfile.TemporaryDirectory(prefix="ucm-bench-")
        source, binary = Path(__file__).parent / "kernel.cc", Path(folder.name) / "kernel"
        command = [compiler, "-std=c++17", "-O2", f"-I{NATIVE}", str(source), "-o", str(binary), "-pthread"]
        subprocess.run(command, check=True)
        _folder = folder
    return str(Path(_folder.name) / "kernel")
