"""A chain grows and shrinks: any history gives the keys of what is left, each grain hashed once."""

import hashlib
import struct
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_core.spec import keys
from ucm_core.spec.keys import LoraIdentity, MediaItem, PrefixChain, RequestIdentity, object_keys

IDENTITIES = [None, RequestIdentity(cache_salt="t"), RequestIdentity(LoraIdentity("fr", "5e" * 32))]
TOKENS = st.lists(st.integers(0, 2**20) | st.integers(2**32 - 2, 2**34), max_size=40)
CONTAINERS = [list, tuple, lambda ids: array("Q", ids), lambda ids: np.array(ids, np.uint64)]


def slow_chain(tokens, grain, *, seed=b"", media=()):
    """The formula of the contract, token by token and item by item."""
    digests = []
    for begin in range(0, len(tokens) - grain + 1, grain):
        ids = tokens[begin : begin + grain]
        page = seed + (b"\xff" if max(ids) >= 2**32 else b"")
        page += b"".join(struct.pack("<Q" if max(ids) >= 2**32 else "<I", token) for token in ids)
        inside = [item for item in media if item[1] < begin + grain and item[2] > begin]
        if inside:
            page += b"ucm-media-v1" + struct.pack("<I", len(inside))
            page += b"".join(digest + struct.pack("<q", begin - first) for digest, first, _ in inside)
        seed = hashlib.sha256(page).digest()
        digests.append(seed)
    return digests


def items():
    digest = st.binary(min_size=1, max_size=1).map(lambda byte: byte * 32)
    item = st.tuples(st.integers(0, 60), st.integers(1, 60), digest)
    return st.lists(item.map(lambda one: (one[2], one[0], one[0] + one[1])), max_size=5, unique=True)


def in_order(media):
    return sorted(media, key=lambda item: (item[1], item[2], item[0]))


STEPS = st.lists(TOKENS | st.floats(0, 1), max_size=8)


@given(STEPS, st.integers(1, 7), items(), st.sampled_from(IDENTITIES), st.sampled_from(CONTAINERS))
@settings(max_examples=150, deadline=None)
def test_any_history_gives_the_digests_of_the_tokens_that_are_left(steps, grain, media, identity, container):
    chain = PrefixChain(identity, grain_tokens=grain, media=[MediaItem(*item) for item in media])
    seed = b"" if identity is None else identity.seed
    tokens, held = [], []
    for step in steps:
        if isinstance(step, float):  # keep this share of it
            tokens = tokens[: int(step * len(tokens))]
            chain.truncate(len(tokens))
        else:
            tokens = tokens + step
            chain.extend(container(step))
        held.append((chain.digests, slow_chain(tokens, grain, seed=seed, media=in_order(media))))
    assert chain.token_count == len(tokens)
    for digests, expected in held:  # also those from before: what was handed out never changes
        assert [row.tobytes() for row in digests] == expected


class CountingHash:
    """A double for hashlib: hashes, and counts bytes."""

    def __init__(self, inner=None):
        self.inner, self.sizes = inner or hashlib.sha256(), []

    def sha256(self):
        return self

    def copy(self):
        made = CountingHash(self.inner.copy())
        made.sizes = self.sizes
        return made

    def update(self, body):
        self.sizes.append(len(body))
        self.inner.update(body)

    def digest(self):
        return self.inner.digest()


def test_appending_one_by_one_hashes_every_byte_once(monkeypatch):
    counting = CountingHash()
    monkeypatch.setattr(keys, "hashlib", counting)
    chain = PrefixChain(grain_tokens=10)
    for token in range(1000):
        chain.extend([token])
    assert [row.tobytes() for row in chain.digests] == slow_chain(list(range(1000)), 10)
    assert sum(counting.sizes) == 100 * 10 * 4 + 99 * 32


def test_appending_one_by_one_moves_what_is_there_a_few_times_only():
    chain, places = PrefixChain(grain_tokens=1), []
    for token in range(5000):
        chain.extend([token])
        if not places or places[-1] is not chain.digests.base:
            places.append(chain.digests.base)
    assert len(places) <= 14  # 2^13 > 5000


def test_giving_back_part_of_a_grain_moves_nothing():
    chain = PrefixChain(grain_tokens=4)
    chain.extend(range(38))
    before = chain.digests.base
    for _ in range(50):
        chain.extend([1])
        chain.truncate(38)
    assert chain.digests.base is before
    chain.extend([38, 39])
    assert [row.tobytes() for row in chain.digests] == slow_chain(list(range(40)), 4)


@given(items(), st.integers(0, 130), st.integers(1, 130))
def test_only_items_near_a_range_are_looked_at(media, begin, size):
    chain = PrefixChain(grain_tokens=4, media=[MediaItem(*item) for item in media])
    seen = chain._items_in(begin, begin + size)
    overlapping = [item for item in chain.media if item.begin < begin + size and item.end > begin]
    assert [item for item in seen if item in overlapping] == overlapping
    assert all(item.begin < begin + size for item in seen)
    assert not seen or seen[0] in overlapping


@pytest.mark.parametrize("items_before", [0, 1000])
def test_items_far_behind_are_not_looked_at(items_before):
    media = [MediaItem(bytes(32), 10 * index, 10 * index + 5) for index in range(items_before + 3)]
    chain = PrefixChain(grain_tokens=10, media=media)
    assert len(chain._items_in(10 * items_before, 10 * items_before + 20)) == 2


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=12),
    seeds=st.lists(st.sampled_from([bytes([n]) * 32 for n in range(3)]), min_size=1, max_size=4),
)
def test_kept_keys_are_those_of_the_digests_whatever_came_before(steps, seeds):
    chain, handed_out = PrefixChain(grain_tokens=4), []
    for step, (grow, count) in enumerate(steps):
        if grow:
            chain.extend(range(step, step + count))
        else:
            chain.truncate(max(0, chain.token_count - count))
        for seed in seeds:
            keys = chain.keys(seed)
            assert np.array_equal(keys, object_keys(seed, chain.digests))
            handed_out.append((keys, keys.copy()))
    assert all(np.array_equal(keys, then) for keys, then in handed_out)


def test_kept_keys_are_read_only():
    chain = PrefixChain(grain_tokens=4)
    chain.extend(range(8))
    with pytest.raises(ValueError, match="read-only"):
        chain.keys(bytes(32))[0] = 0


class Interrupted:
    """A double of ``hashlib.sha256``: the memory ends after ``left`` grains."""

    def __init__(self, left):
        self.left, self.real = left, hashlib.sha256()

    def copy(self):
        self.left -= 1
        if self.left < 0:
            raise MemoryError
        return self.real.copy()


@pytest.mark.parametrize("grains", range(6))
def test_a_chain_that_was_interrupted_shows_nothing_that_was_not_hashed(grains, monkeypatch):
    tokens, seed = list(range(50)), b"s" * 32
    chain = PrefixChain(grain_tokens=4)
    chain.extend(tokens[:9])
    before = chain.keys(seed).tobytes()
    double = Interrupted(grains)
    monkeypatch.setattr(keys.hashlib, "sha256", lambda: double)
    with pytest.raises(MemoryError):
        chain.extend(tokens[9:33])
    monkeypatch.undo()
    assert (chain.token_count, chain.keys(seed).tobytes()) == (9, before)
    chain.extend(tokens[9:])
    assert [bytes(digest) for digest in chain.digests] == slow_chain(tokens, 4)
