"""SGLang with UCM at its radix tree, without a host cache: a process serves and ends, new ones resume.

Every token is that of SGLang without UCM. What a host cache's backend saved is found as well, and noise in
the place of what was stored changes the tokens. SGLang counts what a linker brought as its host's.
"""

import pytest

from e2e import objects
from e2e.answers import cached, tokens_of
from e2e.harness import Answer
from e2e.pair import Alone, Linked, Pair
from e2e.runs import serve_apart
from e2e.shared import DENSE


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Alone:
    return pair.alone()


@pytest.fixture(scope="module")
def linked(pair: Pair) -> Linked:
    return pair.linking()


@pytest.fixture(scope="module")
def resumed(pair: Pair, linked: Linked) -> tuple[Answer, ...]:
    """The prompts in a new process; what is stored of the first is noise."""
    root = pair.runs.copy(linked.root, "sglang-linked-noise")
    for path in linked.pages:
        objects.fill_with_noise(root / path)
        assert objects.is_whole(root / path)
    with pair.linked("resuming-linked", root) as engine:
        return serve_apart(engine, DENSE.first)


@pytest.fixture(scope="module")
def crossed(pair: Pair) -> tuple[Answer, ...]:
    """The prompts in a process with a linker, on the root of one with a host cache."""
    with pair.linked("linking-saved", pair.root_copy("linked")) as engine:
        return serve_apart(engine, DENSE.first)


def test_saving_changes_no_token(alone: Alone, linked: Linked) -> None:
    assert tokens_of(linked.first) == tokens_of(alone.first)
    assert cached(linked.first) == [0, 0]


def test_a_new_process_resumes_with_the_same_tokens(alone: Alone, resumed: tuple[Answer, ...]) -> None:
    assert cached(resumed) == [DENSE.served_sglang(answer) for answer in resumed]
    assert resumed[1].tokens == alone.first[1].tokens


def test_noise_in_the_files_changes_the_tokens(alone: Alone, resumed: tuple[Answer, ...]) -> None:
    assert resumed[0].tokens != alone.first[0].tokens


def test_what_the_other_seam_saved_gives_the_same_tokens(alone: Alone, crossed: tuple[Answer, ...]) -> None:
    assert cached(crossed) == [DENSE.served_sglang(answer) for answer in crossed]
    assert tokens_of(crossed) == tokens_of(alone.first)
