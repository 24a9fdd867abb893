"""Makes the helpers of this folder importable; names what file tests run with."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rings import new_name

from ucm_core import _native
from ucm_core.store import region

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _regions_of_its_own() -> Iterator[None]:
    """A file's regions lie apart: whoever opens a ring removes dead ones, and other files run meanwhile."""
    apart = tempfile.TemporaryDirectory(dir=region.DIRECTORY, prefix="test-ucm-")
    with apart as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(region, "DIRECTORY", Path(place))
        yield


@pytest.fixture
def name() -> str:
    """Of a region."""
    return new_name()


@pytest.fixture(params=[False, True], ids=["threads", "uring"])
def uring(request: pytest.FixtureRequest) -> bool:
    """Whether files are moved through io_uring: what a file tier promises, it promises with either engine."""
    if request.param and not _native.probe_uring():
        pytest.skip("this kernel refuses io_uring")
    return bool(request.param)
