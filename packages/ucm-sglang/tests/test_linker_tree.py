"""SGLang's real radix tree over `UCMLinker`: what an empty tree loads, and what the other seam saved."""

import pytest

from tree_world import SETTINGS, start_of, torch  # isort: skip (its doubles come first)
from host_tree import HostTree, TreeBackend
from linker_tree import LinkedTree, TreeLinker
from sglang.srt.runtime_context import get_parallel


@pytest.fixture(params=SETTINGS, ids=lambda cfg: cfg.label)
def cfg(request):
    return request.param


@pytest.fixture
def engines(cfg, tmp_path):
    """Make engines on one root; a later one has nothing but the root of an earlier one."""
    made = []
    TreeBackend.started = TreeLinker.started = start_of(cfg, tmp_path / "root")

    def make(kind=LinkedTree):
        made.append(kind(cfg))
        return made[-1]

    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1):
        yield make
        for tree in made:
            tree.close()


def equal(found, right):
    assert found.keys() == right.keys()
    return {
        component: all(torch.equal(*pair) for pair in zip(found[component], buffers, strict=True))
        for component, buffers in right.items()
    }


def test_an_empty_tree_resumes_with_every_byte(engines):
    first = engines()
    first.compute(seed=1)
    first.store()
    right = first.held()
    first.close()
    found = equal(engines().resume(), right)
    assert all(found.values()), found


@pytest.mark.parametrize(("writer", "reader"), [(HostTree, LinkedTree), (LinkedTree, HostTree)])
def test_each_seam_reads_what_the_other_saved(engines, writer, reader):
    first = engines(writer)
    first.compute(seed=2)
    first.store()
    right = first.held()
    first.close()
    second = engines(reader)
    found = second.resume()
    found = equal(second.held() if found is None else found, right)
    assert all(found.values()), found


def test_without_any_one_row_nothing_is_found(engines, tmp_path):
    first = engines()
    first.compute(seed=3)
    first.store()
    first.close()
    for row in (row.name for row in TreeLinker.started.model.table.rows):
        lost = [path for path in (tmp_path / "root").rglob("*") if path.is_file() and path.parts[-3] == row]
        assert lost
        for path in lost:
            path.rename(path.with_suffix(".away"))
        tree = engines()
        assert tree.match().host_hit_length == 0
        tree.close()
        for path in lost:
            path.with_suffix(".away").rename(path)
