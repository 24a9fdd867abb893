"""Makes the helpers of this folder importable; names what file tests run with."""

import sys
from pathlib import Path

import pytest

from ucm_core import _native

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=[False, True], ids=["threads", "uring"])
def uring(request: pytest.FixtureRequest) -> bool:
    """Whether files are moved through io_uring: what a file tier promises, it promises with either engine."""
    if request.param and not _native.probe_uring():
        pytest.skip("this kernel refuses io_uring")
    return bool(request.param)
