"""SGLang's real radix tree, host pools and storage threads over `UCMHiCache`: what an empty tree reads."""

import pytest

from tree_world import SETTINGS, start_of, torch  # isort: skip (its doubles come first)
from host_tree import HostTree, TreeBackend
from sglang.srt.runtime_context import get_parallel


@pytest.fixture(params=SETTINGS, ids=lambda cfg: cfg.label)
def cfg(request):
    return request.param


@pytest.fixture
def engines(cfg, tmp_path):
    """Make engines on one root; a later one has nothing but the root of an earlier one."""
    made = []
    TreeBackend.started = start_of(cfg, tmp_path / "root")

    def make():
        made.append(HostTree(cfg))
        return made[-1]

    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        yield make
        for tree in made:
            tree.close()


def test_an_empty_tree_resumes_with_every_byte(engines):
    first = engines()
    first.compute(seed=1)
    first.store()
    right = first.held()
    first.close()
    second = engines()
    second.resume()
    found = second.held()
    assert found.keys() == right.keys()
    for component, buffers in right.items():
        for mine, theirs in zip(found[component], buffers, strict=True):
            assert torch.equal(mine, theirs), component


def test_without_any_one_row_nothing_is_resumed(engines, tmp_path):
    first = engines()
    first.compute(seed=1)
    first.store()
    first.close()
    rows = [row.name for row in TreeBackend.started.model.table.rows]
    for row in rows:
        lost = [path for path in (tmp_path / "root").rglob("*") if path.is_file() and path.parts[-3] == row]
        assert lost
        for path in lost:
            path.rename(path.with_suffix(".away"))
        tree = engines()
        assert tree.prefetch()[1] == 0
        tree.close()
        for path in lost:
            path.with_suffix(".away").rename(path)
