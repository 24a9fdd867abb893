"""Paths give SGLang's page hashes: the contract's vectors, any splitting of the input, there and back."""

from array import array
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import formula, model_of, table_of

from ucm_core.errors import IdentityError, SpecError
from ucm_core.spec.keys import PrefixChain, RequestIdentity
from ucm_position_key import KeyView, PositionPath, digests_of

T = list(range(100, 108))
# (tokens, extra key, salt, view, two page hashes), P = 4: the six golden vectors of SGLang 0.5.23.
GOLDEN = {
    "plain": (
        T,
        RequestIdentity(),
        KeyView.PLAIN,
        "9d373db168e3e6a03e12ea791ce33b00590b4652dd4618889639c8095ac017f7",
        "ba16f22309bf4813eb11f38cd4bbe8797d6020c94bedf8172295626dbe0105a2",
    ),
    "salted": (
        T,
        RequestIdentity(cache_salt="tenant-a"),
        KeyView.PLAIN,
        "ba8fe3ecf621d94507e99bc0c73884f996633d3ab3c3cf484886ba693f710ffd",
        "86f91a36dc16cf11adb029805d1342fd359c7e262f410a98be0fbf2aa174ab27",
    ),
    "extra key": (
        T,
        RequestIdentity(extra_key="lora-7"),
        KeyView.PLAIN,
        "e3d47e498a86430645fe4fab540a4ec008ec769e9ff7e5c88974e393b65dec00",
        "26dff7948f618204cb4e50691637de1ee5eb41902e2dcf670371e19256c083bf",
    ),
    "both": (
        T,
        RequestIdentity(extra_key="lora-7", cache_salt="tenant-a"),
        KeyView.PLAIN,
        "4217e6fca0357ae1f67a741ee23d5552378e7327d70b22324bd02b95dcc48ef4",
        "a45fa5b21e7c1161b243c0061dc1992477c3ce2ba1f21819ab06078955335749",
    ),
    "bigram": (
        [*T, 108],
        RequestIdentity(),
        KeyView.BIGRAM,
        "7839f315d1508e59abac64d3102386a95b6ab0637a1216e8f50481ff464ab790",
        "69e2f7cdca78b47d1bae8fc5bd3e17151db00625ce4173cf859300b7b8903712",
    ),
    "wide ids": (
        [5, 4294967303, 6, 1099511627776, 1, 2, 3, 4],
        RequestIdentity(),
        KeyView.PLAIN,
        "3a63c93dc76fe516db7cc47a6d435886aa6c331bd7d8877b3e07a03bd62e00da",
        "cade8819981705d2ed38c1c68970c57541838bdacf05e72e9497e9e5cbf8a816",
    ),
}

ids = st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1), st.integers(2**32, 2**62))
texts = st.one_of(st.none(), st.text(min_size=1, max_size=5))
identities = st.builds(RequestIdentity, cache_salt=texts, extra_key=texts)
views = st.sampled_from(KeyView)


def flat(tokens, view):
    """The ids that a path hashes, by the contract's words."""
    if view is KeyView.PLAIN:
        return list(tokens)
    return [token for pair in pairwise(tokens) for token in pair]


def path_of(tokens, identity=None, *, page=4, view=KeyView.PLAIN):
    path = PositionPath(identity, grain_tokens=page, view=view)
    path.extend(tokens)
    return path


@pytest.mark.parametrize("name", GOLDEN)
def test_page_hashes_are_those_of_the_contract(name):
    tokens, identity, view, first, second = GOLDEN[name]
    assert path_of(tokens, identity, view=view).page_hashes == (first, second)


def test_page_hashes_of_another_page_size_are_those_of_the_contract():
    tokens = [(i * 7) % 250 + 3 for i in range(64)]
    fine, coarse = path_of(tokens, page=16).page_hashes, path_of(tokens, page=64).page_hashes
    assert fine[0] == "ef66402027be807f0317fb8db9154e3cda178b57f4c69097ac5878a9082a7aec"
    assert coarse == ("09772ff86b8710fc8a8789e20666b73fbf7319ece27439515058d2bd07f8ec31",)
    assert not {*fine} & {*coarse}


def test_an_empty_extra_key_seeds_as_in_the_contract():
    (first, _) = path_of(T, RequestIdentity(extra_key="")).page_hashes
    assert first == "cb4446ba9295142ea9c1f6b94523b739dbadb46ce597894897bd1acce9ee02fc"


@given(st.lists(st.lists(ids, max_size=9), max_size=6), identities, st.integers(1, 7), views)
def test_a_path_is_the_formula_however_its_tokens_arrive(parts, identity, page, view):
    path = PositionPath(identity, grain_tokens=page, view=view)
    for part in parts:
        path.extend(part)
    tokens = [token for part in parts for token in part]
    expected = formula(flat(tokens, view), page * view.ids_per_position, identity.seed)
    assert np.array_equal(path.digests, expected)
    assert path.tokens().tolist() == tokens
    assert (path.token_count, path.positions) == (len(tokens), view.positions(len(tokens)))


@given(st.lists(ids, max_size=30), identities, st.integers(1, 7))
def test_a_plain_path_is_the_cores_own_chain(tokens, identity, page):
    chain = PrefixChain(identity, grain_tokens=page)
    chain.extend(tokens)
    assert np.array_equal(path_of(tokens, identity, page=page).digests, chain.digests)


@given(st.lists(ids, max_size=20), st.lists(ids, max_size=20), st.data(), st.integers(1, 5), views)
def test_a_branch_is_a_path_that_was_cut_and_went_on(first, second, data, page, view):
    path = path_of(first, page=page, view=view)
    kept, before = data.draw(st.integers(0, len(first))), path.digests.copy()
    view_of_before = path.digests
    path.truncate(kept)
    assert path.tokens().tolist() == first[:kept]
    path.extend(second)
    other = path_of(first[:kept] + second, page=page, view=view)
    assert np.array_equal(path.digests, other.digests)
    assert path.tokens().tolist() == first[:kept] + second
    assert np.array_equal(view_of_before, before)


@given(st.lists(ids, min_size=1, max_size=30), st.integers(1, 5), identities, identities)
def test_two_identities_share_no_page(tokens, page, one, other):
    shared = {*path_of(tokens, one, page=page).page_hashes} & {*path_of(tokens, other, page=page).page_hashes}
    assert not shared or one == other


@pytest.mark.parametrize(("tokens", "pages"), [(64, 3), (65, 4), (1, 0), (0, 0), (16, 0), (17, 1)])
def test_pairs_fill_one_page_less_when_tokens_just_fill_them(tokens, pages):
    path = path_of(range(tokens), page=16, view=KeyView.BIGRAM)
    assert len(path.digests) == pages == max(tokens - 1, 0) // 16


@pytest.mark.parametrize("view", KeyView)
@pytest.mark.parametrize("container", [tuple, np.array, lambda x: array("q", x), lambda x: np.array(x, "i4")])
def test_every_container_gives_the_same_pages(container, view):
    tokens = [1, 2, 300, 70000, 5] * 4
    assert path_of(container(tokens), view=view).page_hashes == path_of(tokens, view=view).page_hashes


@pytest.mark.parametrize("view", KeyView)
@pytest.mark.parametrize("bad", [[-1], [1.5], ["1"], np.zeros((2, 2), int), {1, 2}])
def test_bad_tokens_are_refused_and_change_nothing(bad, view):
    path = path_of([1, 2, 3], page=1, view=view)
    before = path.page_hashes
    with pytest.raises(IdentityError):
        path.extend(bad)
    assert path.page_hashes == before
    assert path.tokens().tolist() == [1, 2, 3]


@pytest.mark.parametrize("page", [0, -4, 1.5, None, True])
def test_a_page_of_nothing_is_refused(page):
    with pytest.raises(SpecError, match="grain_tokens is"):
        PositionPath(grain_tokens=page)


@pytest.mark.parametrize("view", KeyView)
@pytest.mark.parametrize("tokens", [4, -1])
def test_cutting_to_more_than_there_is_is_refused(tokens, view):
    path = path_of([1, 2, 3], view=view)
    with pytest.raises(SpecError, match=f"path of 3 tokens to {tokens}"):
        path.truncate(tokens)
    assert path.tokens().tolist() == [1, 2, 3]


@given(st.lists(ids, max_size=20), identities, st.integers(1, 4), views)
def test_page_hashes_and_digests_are_one_thing(tokens, identity, page, view):
    path = path_of(tokens, identity, page=page, view=view)
    assert np.array_equal(digests_of(path.page_hashes), path.digests)


@pytest.mark.parametrize(
    "bad", ["__placeholder__", "AB" * 32, "ab" * 31, "ab" * 33, "ab" * 31 + "a ", "", None, b"ab" * 32]
)
def test_what_is_no_page_hash_is_refused_by_its_number(bad):
    with pytest.raises(IdentityError, match=r"page hash 1 is .* must be 64 lower-case hex digits"):
        digests_of(["ab" * 32, bad])


def test_no_page_hashes_are_no_digests():
    assert digests_of([]).shape == (0, 32)


@pytest.mark.parametrize("options", ["null", '{"sparse": true}', '{"key_view": "other"}'])
def test_pairs_have_an_identity_of_their_own_and_plain_keys_that_of_the_model(options):
    model = model_of(table_of(4), run_options=options)
    assert KeyView.PLAIN.identity_of(model) == model
    pairs = KeyView.BIGRAM.identity_of(model)
    assert pairs.namespace != model.namespace
    assert "run_options" in pairs.first_difference(model)
    assert KeyView.BIGRAM.identity_of(pairs) == pairs


def test_run_options_that_hold_no_names_are_refused():
    with pytest.raises(IdentityError, match=r"run_options are .* must be a mapping"):
        KeyView.BIGRAM.identity_of(model_of(table_of(4), run_options="[1]"))


def test_a_path_of_pairs_that_is_cut_to_nothing_begins_again():
    path = path_of([1, 2, 3], page=1, view=KeyView.BIGRAM)
    path.truncate(0)
    path.extend([9, 8])
    assert path.tokens().tolist() == [9, 8]
    assert path.page_hashes == path_of([9, 8], page=1, view=KeyView.BIGRAM).page_hashes
