"""SGLang with UCM at its radix tree, whose prompts are saved layer by layer while they are computed.

A linker that takes none of the nodes that SGLang offers stores nothing without the setting; with it, all
pages of the prompts, byte for byte those that SGLang offers otherwise. A new process resumes from them with
the tokens of SGLang without UCM, and noise in their place changes the tokens.
"""

from pathlib import Path

import pytest

from e2e import objects
from e2e.answers import cached, tokens_of
from e2e.harness import Answer
from e2e.pair import Alone, Linked, Pair
from e2e.runs import serve_apart
from e2e.shared import DENSE

LAYERWISE = {"layerwise_save": True}


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Alone:
    return pair.alone()


@pytest.fixture(scope="module")
def layered(pair: Pair) -> Linked:
    """Only what layers left."""
    root = pair.runs.empty_root("sglang-layered")
    with pair.linked("layers", root, offloads=False, **LAYERWISE) as engine:
        first = serve_apart(engine, DENSE.first[:1])
        pages = objects.wait_whole(root, prompt_pages(first), writer=engine)
        pages_of_first = frozenset(path.relative_to(root) for path in pages)
        first += serve_apart(engine, DENSE.first[1:])
        objects.wait_whole(root, prompt_pages(first), writer=engine)
    return Linked(root, first, pages_of_first)


@pytest.fixture(scope="module")
def resumed(pair: Pair, layered: Linked) -> tuple[Answer, ...]:
    """The prompts in a new process; what is stored of the first is noise."""
    root = pair.runs.copy(layered.root, "sglang-layered-noise")
    for path in layered.pages:
        objects.fill_with_noise(root / path)
    with pair.linked("resuming-layers", root, **LAYERWISE) as engine:
        return serve_apart(engine, DENSE.first)


@pytest.fixture(scope="module")
def both(pair: Pair) -> tuple[Path, tuple[Answer, ...]]:
    """The root of a process that saves layer by layer, and what SGLang offers."""
    root = pair.runs.empty_root("sglang-both")
    with pair.linked("layers-and-nodes", root, **LAYERWISE) as engine:
        first = serve_apart(engine, DENSE.first)
        objects.wait_whole(root, DENSE.pages(first), writer=engine)
    return root, first


def prompt_pages(answers: tuple[Answer, ...]) -> int:
    """Pages that the prompts fill."""
    return sum(answer.prompt_tokens // DENSE.page_tokens for answer in answers)


def test_saving_layer_by_layer_changes_no_token(alone: Alone, layered: Linked) -> None:
    assert tokens_of(layered.first) == tokens_of(alone.first)
    assert cached(layered.first) == [0, 0]


def test_every_page_of_the_prompts_came_layer_by_layer_and_no_other(layered: Linked) -> None:
    assert len(objects.objects(layered.root)) == prompt_pages(layered.first)


def test_without_the_setting_the_same_process_stores_nothing(pair: Pair) -> None:
    root = pair.runs.empty_root("sglang-deaf")
    with pair.linked("deaf", root, offloads=False) as engine:
        assert cached(serve_apart(engine, DENSE.first)) == [0, 0]
    assert objects.objects(root) == []


def test_the_bytes_are_those_that_sglang_offers(pair: Pair, layered: Linked) -> None:
    offered, by_layer = objects.contents(pair.linking().root), objects.contents(layered.root)
    assert by_layer.items() <= offered.items()


def test_with_both_ways_there_is_what_there_is_with_one(
    pair: Pair, both: tuple[Path, tuple[Answer, ...]]
) -> None:
    root, first = both
    assert objects.contents(root) == objects.contents(pair.linking().root)
    assert tokens_of(first) == tokens_of(pair.alone().first)


def test_a_new_process_resumes_with_the_same_tokens(alone: Alone, resumed: tuple[Answer, ...]) -> None:
    assert cached(resumed) == [DENSE.served_sglang(answer) for answer in resumed]
    assert resumed[1].tokens == alone.first[1].tokens


def test_noise_in_the_files_changes_the_tokens(alone: Alone, resumed: tuple[Answer, ...]) -> None:
    assert resumed[0].tokens != alone.first[0].tokens
