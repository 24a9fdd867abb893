"""vLLM and SGLang at the same time on one root: each resumes what only the other computed.

Their blocks differ (32 tokens and pages of 16; MLA: 16 and 16), and so does how they lie in memory. Every
token is that of the reading engine without UCM, and for one prompt both store the same values.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from e2e import objects
from e2e.harness import Answer
from e2e.models import MAX_TOKENS
from e2e.pair import SHARED, Pair, page_count, served_again
from e2e.runs import serve_apart

TOLERANCE = 1e-3
"""Of values of mean magnitude 1 in float32, computed by different kernels in a different order."""


@dataclass(frozen=True, slots=True)
class Crossed:
    """What either engine computed, and what it was served from the other."""

    sglang_wrote: tuple[Answer, ...]
    """SGLang, computing the first prompts."""
    vllm_wrote: tuple[Answer, ...]
    """vLLM, computing the other prompt meanwhile."""
    vllm_read: tuple[Answer, ...]
    """vLLM, on the first prompts."""
    sglang_read: tuple[Answer, ...]
    """SGLang, on the other prompt."""
    sglang_pages: list[Path]
    """Objects that SGLang wrote of the first prompts."""
    vllm_pages: list[Path]
    """Objects that vLLM wrote of the first of them, under a salt."""


@pytest.fixture(scope="module", params=SHARED)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def crossed(pair: Pair, family: str) -> Crossed:
    shared, root = SHARED[family], pair.runs.empty_root(f"cross-{family}")
    salted = replace(shared.first[0], salt="tenant-b")
    with pair.vllm("crossing", family, root) as vllm, pair.sglang("crossing", family, root) as sglang:
        sglang.begin_generate(shared.first, max_tokens=MAX_TOKENS)
        vllm_wrote = serve_apart(vllm, shared.other)
        sglang_wrote = tuple(sglang.end_generate())
        written = page_count(*sglang_wrote, *vllm_wrote)
        before = objects.wait_whole(root, written, writer=sglang)
        vllm_read, sglang_read = serve_apart(vllm, shared.first), serve_apart(sglang, shared.other)
        under_salt = serve_apart(vllm, (salted,))
        after = objects.wait_whole(root, written + page_count(*under_salt), writer=vllm)
    theirs = [path for path in after if path not in before]
    ours = [root / path for path in pair.saved(family).pages[0]]
    return Crossed(sglang_wrote, vllm_wrote, vllm_read, sglang_read, ours, theirs)


def test_both_wrote_what_they_computed(crossed: Crossed) -> None:
    assert [answer.cached_tokens for answer in crossed.sglang_wrote + crossed.vllm_wrote] == [0, 0, 0]


def test_vllm_resumes_what_sglang_saved(pair: Pair, family: str, crossed: Crossed) -> None:
    right = [answer.tokens for answer in pair.vllm_alone(family).first]
    assert [answer.tokens for answer in crossed.vllm_read] == right
    assert [answer.external_tokens for answer in crossed.vllm_read] == [192, 320]


def test_sglang_resumes_what_vllm_saved(pair: Pair, family: str, crossed: Crossed) -> None:
    right = [answer.tokens for answer in pair.sglang_alone(family).other]
    assert [answer.tokens for answer in crossed.sglang_read] == right
    assert [answer.external_tokens for answer in crossed.sglang_read] == [
        served_again(crossed.sglang_read[0])
    ]


def test_both_store_the_same_values(crossed: Crossed) -> None:
    """Each block of vLLM's is like one of SGLang's, another each; a wrong one would be far from all."""
    ours, theirs = values(crossed.sglang_pages), values(crossed.vllm_pages)
    assert ours.shape == theirs.shape
    differences = np.array([np.abs(ours - one).max(axis=1) for one in theirs])
    assert (np.sort(differences.argmin(axis=1)) == np.arange(len(ours))).all()
    assert differences.min(axis=1).max() < TOLERANCE


def values(pages: list[Path]) -> NDArray[np.float32]:
    return np.stack([objects.values(path) for path in pages])
