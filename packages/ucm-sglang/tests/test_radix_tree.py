"""SGLang's real radix tree and pools over `UCMHiCache` or `UCMLinker`: what an empty tree resumes."""

import pytest

from tree_world import SETTINGS, start_of, torch  # isort: skip (its doubles come first)
from host_tree import HostTree, TreeBackend
from linker_tree import LinkedTree, TreeLinker
from sglang.srt.runtime_context import get_parallel

SEAMS = (HostTree, LinkedTree)


@pytest.fixture(params=SETTINGS, ids=lambda cfg: cfg.label)
def cfg(request):
    return request.param


@pytest.fixture
def engines(cfg, tmp_path):
    """Make engines on one root; a later one has nothing but the root of an earlier one."""
    made = []
    TreeBackend.started = TreeLinker.started = start_of(cfg, tmp_path / "root")

    def make(kind):
        made.append(kind(cfg))
        return made[-1]

    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1):
        yield make
        for tree in made:
            tree.close()


def leave(engines, kind, *, seed):
    """Compute and store the prompt in a tree that is gone then; the bytes that it had."""
    tree = engines(kind)
    tree.compute(seed)
    tree.store()
    held = tree.held()
    tree.close()
    return held


@pytest.mark.parametrize("reader", SEAMS)
@pytest.mark.parametrize("writer", SEAMS)
def test_an_empty_tree_resumes_with_every_byte(engines, writer, reader):
    right = leave(engines, writer, seed=1)
    found = engines(reader).resume()
    assert found.keys() == right.keys()
    for component, buffers in right.items():
        for mine, theirs in zip(found[component], buffers, strict=True):
            assert torch.equal(mine, theirs), component


@pytest.mark.parametrize("kind", SEAMS)
def test_without_any_one_row_nothing_is_resumed(engines, tmp_path, kind):
    leave(engines, kind, seed=3)
    for row in (row.name for row in TreeBackend.started.model.table.rows):
        lost = [path for path in (tmp_path / "root").rglob("*") if path.is_file() and path.parts[-3] == row]
        assert lost
        for path in lost:
            path.rename(path.with_suffix(".away"))
        tree = engines(kind)
        assert tree.restorable() == 0
        tree.close()
        for path in lost:
            path.with_suffix(".away").rename(path)
