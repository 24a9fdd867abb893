"""vLLM and SGLang at the same time on one root: each resumes what only the other computed.

Blocks of one and pages of the other differ, as `shared.py` says, and so does how they lie in memory. In
float32 every token is that of the reading engine by itself. In bfloat16 each engine rounds in other places,
and on a CPU its own logits hardly depend on the shape of a batch: those after a load are measured by how far
both engines are apart. For one prompt both store the same values. What a change of weights made another
computation is served to nobody.
"""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from numpy.typing import NDArray

from e2e import objects
from e2e.answers import served, tokens_of
from e2e.crossing import Crossed, apart
from e2e.pair import Pair
from e2e.shared import EXACT, ROUNDED, SHARED, Shared

TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}
"""Of values of mean magnitude 1, computed by different kernels in a different order, up to four layers deep.

Those of another block are more than 5 away somewhere.
"""


@pytest.fixture
def shared(name: str) -> Shared:
    return SHARED[name]


@pytest.fixture
def crossed(pair: Pair, name: str) -> Crossed:
    return pair.crossed(name)


@pytest.mark.parametrize("name", SHARED)
def test_both_wrote_what_they_computed(crossed: Crossed, name: str) -> None:
    """Those that began on the root of a pair of another type were served nothing of it."""
    assert served(crossed.sglang_wrote + crossed.vllm_wrote) == [0, 0, 0]


@pytest.mark.parametrize("name", SHARED)
def test_vllm_resumes_what_sglang_saved(shared: Shared, crossed: Crossed, name: str) -> None:
    assert served(crossed.vllm_read) == [shared.served_vllm(answer) for answer in crossed.vllm_read]


@pytest.mark.parametrize("name", SHARED)
def test_sglang_resumes_what_vllm_saved(shared: Shared, crossed: Crossed, name: str) -> None:
    assert served(crossed.sglang_read) == [shared.served_sglang(answer) for answer in crossed.sglang_read]


@pytest.mark.parametrize("name", EXACT)
def test_tokens_are_those_of_the_reading_engine_by_itself(crossed: Crossed, name: str) -> None:
    assert tokens_of(crossed.vllm_read) == tokens_of(crossed.vllm.cold[:2])
    assert tokens_of(crossed.sglang_read) == tokens_of(crossed.sglang.cold[2:])


@pytest.mark.parametrize("name", ROUNDED)
def test_logits_are_no_farther_from_its_own_than_those_of_the_other_engine(
    crossed: Crossed, name: str
) -> None:
    """On average than those are at most, beside what an engine's own differ with the shape of a batch."""
    bound = max(apart(crossed.vllm.cold, crossed.sglang.cold))
    assert fmean(apart(crossed.vllm_read, crossed.vllm.cold[:2])) <= bound + crossed.vllm.spread
    assert fmean(apart(crossed.sglang_read, crossed.sglang.cold[2:])) <= bound + crossed.sglang.spread


@pytest.mark.parametrize("name", SHARED)
def test_what_is_stored_wrong_is_served_too(shared: Shared, crossed: Crossed, name: str) -> None:
    for vllm, sglang in crossed.misled.values():
        assert served((vllm, sglang)) == [shared.served_vllm(vllm), shared.served_sglang(sglang)]


@pytest.mark.parametrize("name", EXACT)
def test_what_either_is_served_is_what_it_computes_with(crossed: Crossed, name: str) -> None:
    """So with the layers of any row in the wrong order tokens are wrong."""
    for vllm, sglang in crossed.misled.values():
        assert vllm.tokens != crossed.vllm.cold[0].tokens
        assert sglang.tokens != crossed.sglang.cold[0].tokens


@pytest.mark.parametrize("name", SHARED)
def test_both_store_the_same_values(shared: Shared, crossed: Crossed, name: str) -> None:
    """Each object of the one is like one of the other's, another each; a wrong one is far from all."""
    rows = objects.by_row(crossed.sglang_pages), objects.by_row(crossed.vllm_pages)
    assert rows[0].keys() == rows[1].keys()
    for row in rows[0]:
        fewer, more = sorted((values(one[row], shared) for one in rows), key=len)
        differences = np.array([np.abs(more - one).max(axis=1) for one in fewer])
        assert len(set(differences.argmin(axis=1))) == len(fewer)
        assert differences.min(axis=1).max() < TOLERANCE[shared.dtype]


def values(pages: list[Path], shared: Shared) -> NDArray[np.float32]:
    return np.stack([objects.values(path, shared.dtype) for path in pages])


@pytest.mark.parametrize("name", SHARED)
def test_after_new_weights_nobody_is_served_what_the_old_ones_computed(
    shared: Shared, crossed: Crossed, name: str
) -> None:
    updated = crossed.updated
    assert served((updated.before, updated.fresh)) == [0, 0]
    assert served((updated.again,)) == [shared.served_sglang(updated.again)]


@pytest.mark.parametrize("name", SHARED)
def test_what_new_weights_computed_is_not_served_to_who_has_the_old_ones(crossed: Crossed, name: str) -> None:
    assert served((crossed.updated.vllm,)) == [0]


@pytest.mark.parametrize("name", EXACT)
def test_after_the_same_weights_once_more_tokens_are_the_same(crossed: Crossed, name: str) -> None:
    updated = crossed.updated
    right = tokens_of(crossed.sglang.cold[:1])
    for answer in (updated.before, updated.fresh, updated.again, updated.vllm):
        assert tokens_of((answer,)) == right
