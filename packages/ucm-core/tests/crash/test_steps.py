"""Steps cost nothing where nobody looks: the hook is not there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from ucm_core import _native

COUNT = """
from shim import Shim
from ucm_core.store.ring import Ring
shim = Shim()
shim.watch("/nowhere")
Ring.open(None, slots=2, payload_bytes=4096, geometry_digest=bytes(32)).close()
print(shim.counts()["ring.join.done"])
"""


def test_in_production_nobody_defines_the_hook() -> None:
    assert not hasattr(ctypes.CDLL(_native.__file__), "ucm_step")
    assert not hasattr(ctypes.CDLL(None), "ucm_step")


def test_a_preloaded_library_defines_it(library: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == "1\n"
