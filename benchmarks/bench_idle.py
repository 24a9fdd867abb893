"""An open cache with nothing to do: no processor time, few threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from benchmarks.frame import Figure, allowed
from benchmarks.rig import Rig, page_memory, some_keys, work_folder
from ucm_core.flow.copy import BufferBlocks
from ucm_core.store.geometry import Geometry

IDLE_S = 5.0
LEAST_S = 1e-4
"""What looking at the clock and sleeping cost by themselves."""


def figures() -> Iterator[Figure]:
    """A store whose threads have worked, then five seconds of nothing."""
    geometry, keys = Geometry(1, 1 << 20), some_keys(16)
    threads = threading.active_count()
    with work_folder() as folder, Rig(folder, geometry, slots=32) as rig:
        rig.keep(keys, page_memory(16, geometry))
        target = BufferBlocks(page_memory(16, geometry))
        assert rig.store.load(keys, target).wait(60)
        threads = threading.active_count() - threads
        begin = time.process_time()
        time.sleep(IDLE_S)
        used_s = time.process_time() - begin
        yield allowed(
            f"processor in {IDLE_S:.0f} s, idle, threads: {threads}", used_s * 1e3, LEAST_S * 1e3, unit="ms"
        )
