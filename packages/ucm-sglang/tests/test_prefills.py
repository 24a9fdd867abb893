"""What a step computes of its requests: pages by SGLang's own hashes, or nothing."""

import numpy as np
import pytest
from step_doubles import DECODE, EAGLE, MIXED, TensorDouble, batch_of, forward_of, prompt, request

from ucm_sglang.prefills import SPECIAL, agrees, is_prefill, prefills_of, special, whole_pages

TOKENS = list(range(100, 108))
PAGE = 4
GOLDEN = {
    (None, None): (
        "9d373db168e3e6a03e12ea791ce33b00590b4652dd4618889639c8095ac017f7",
        "ba16f22309bf4813eb11f38cd4bbe8797d6020c94bedf8172295626dbe0105a2",
    ),
    ("tenant-a", None): (
        "ba8fe3ecf621d94507e99bc0c73884f996633d3ab3c3cf484886ba693f710ffd",
        "86f91a36dc16cf11adb029805d1342fd359c7e262f410a98be0fbf2aa174ab27",
    ),
    ("tenant-a", "lora-7"): (
        "4217e6fca0357ae1f67a741ee23d5552378e7327d70b22324bd02b95dcc48ef4",
        "a45fa5b21e7c1161b243c0061dc1992477c3ce2ba1f21819ab06078955335749",
    ),
}
"""Salt and extra key to the hashes that SGLang itself gives the two pages."""


def pages_of(*requests):
    return whole_pages(prefills_of(batch_of(*requests)), PAGE)


def asked(tokens=TOKENS, pages=(5, 9), **more):
    return request(tokens, pages, page=PAGE, **more)


@pytest.mark.parametrize(("salt", "key"), GOLDEN)
def test_pages_have_the_hashes_that_sglang_gives_them(salt, key):
    (pages,) = pages_of(asked(salt=salt, key=key))
    assert tuple(pages.hashes) == GOLDEN[salt, key]
    assert pages.indices.tolist() == [20, 21, 22, 23, 36, 37, 38, 39]
    assert (pages.pool, pages.before) == ("kv", None)


def test_only_pages_that_are_whole_at_the_end_of_the_step():
    (pages,) = pages_of(asked(end=7))
    assert (len(pages.hashes), pages.indices.tolist()) == (1, [20, 21, 22, 23])
    assert pages_of(asked(end=3)) == []


def test_a_chunk_goes_on_where_the_one_before_ended():
    (pages,) = pages_of(asked(begin=4))
    assert (tuple(pages.hashes), pages.before) == (GOLDEN[None, None][1:], GOLDEN[None, None][0])
    assert pages.indices.tolist() == [36, 37, 38, 39]


def test_a_page_of_which_the_step_computes_a_part_is_left_out():
    (pages,) = pages_of(asked(begin=3))
    assert pages.indices.tolist() == [36, 37, 38, 39]
    assert pages_of(asked(begin=5)) == []


def test_a_page_that_two_requests_compute_is_there_once():
    other = asked([*TOKENS[:4], 1, 2, 3, 4], (11, 12), name="s")
    first, second = pages_of(asked(), other)
    assert (len(first.hashes), len(second.hashes)) == (2, 1)
    assert second.indices.tolist() == [48, 49, 50, 51]
    assert second.before == GOLDEN[None, None][0]


def test_a_request_whose_pages_another_computes_is_left_out():
    (pages,) = pages_of(asked(), asked(pages=(11, 12), name="s"))
    assert pages.indices[0] == 20


@pytest.mark.parametrize("name", SPECIAL)
def test_what_depends_on_more_than_tokens_is_told(name):
    plain, other = prefills_of(batch_of(asked(), asked(pages=(11, 12), **{name: "x"})))
    assert (plain.is_plain, other.is_plain) == (True, False)
    assert (special([plain, other], PAGE), special([plain, other], 9)) == (1, 0)
    assert [pages.indices[0] for pages in whole_pages([other, plain], PAGE)] == [20]


def test_a_request_that_does_not_say_is_no_request():
    silent = asked()
    del silent.lora_id
    with pytest.raises(AttributeError, match="lora_id"):
        prefills_of(batch_of(silent))


def test_only_prompts_without_drafts_are_prefills():
    modes = {"mode": MIXED}, {"mode": DECODE}, {"drafts": EAGLE}, {"drafts": None}, {}
    assert [is_prefill(batch_of(asked(), **mode)) for mode in modes] == [False, False, False, True, True]


def test_a_forward_of_the_batch_agrees():
    batch = batch_of(asked(begin=4), request(prompt(20), range(20, 25), page=PAGE, name="s"))
    assert agrees(prefills_of(batch), forward_of(batch))


@pytest.mark.parametrize("name", ["input_ids", "positions", "out_cache_loc"])
def test_a_forward_of_anything_else_does_not(name):
    batch = batch_of(asked())
    right = getattr(forward_of(batch), name).values
    for wrong in (right + (np.arange(8) == 7), right[:-1], np.append(right, 0)):
        assert not agrees(prefills_of(batch), forward_of(batch, **{name: TensorDouble(wrong)}))


def test_a_forward_in_another_mode_does_not():
    batch = batch_of(asked())
    assert not agrees(prefills_of(batch), forward_of(batch, forward_mode=MIXED))


def test_what_was_read_does_not_change_with_sglangs_memory():
    batch = batch_of(asked())
    (prefill,) = prefills_of(batch)
    batch.req_to_token_pool.req_to_token.values[:] = 0
    assert prefill.slots.tolist() == [20, 21, 22, 23, 36, 37, 38, 39]
