"""The prefix chain: golden vectors, media, truncation, and what must and must not share."""

import hashlib
import struct
from array import array

import numpy as np
import pytest

from ucm_core.errors import IdentityError, SpecError
from ucm_core.spec.keys import (
    LoraIdentity,
    MediaItem,
    PrefixChain,
    RequestIdentity,
    object_keys,
    row_seed,
)

T = list(range(100, 108))
SALT_SEED = "9d303df3761a7561353e2ae7459eb4ab12a08abb37951b696aa4f0c059c7caaa"

# (tokens, extra key, salt, seed, two page digests), P = 4: SGLang 0.5.23's own answers.
GOLDEN = {
    "plain": (
        T,
        None,
        None,
        "",
        "9d373db168e3e6a03e12ea791ce33b00590b4652dd4618889639c8095ac017f7",
        "ba16f22309bf4813eb11f38cd4bbe8797d6020c94bedf8172295626dbe0105a2",
    ),
    "salted": (
        T,
        None,
        "tenant-a",
        SALT_SEED,
        "ba8fe3ecf621d94507e99bc0c73884f996633d3ab3c3cf484886ba693f710ffd",
        "86f91a36dc16cf11adb029805d1342fd359c7e262f410a98be0fbf2aa174ab27",
    ),
    "extra key": (
        T,
        "lora-7",
        None,
        "a6f1938021f59be4331d56bfd53d749754b4d491d90a96de4f0ae1141bb8fba1",
        "e3d47e498a86430645fe4fab540a4ec008ec769e9ff7e5c88974e393b65dec00",
        "26dff7948f618204cb4e50691637de1ee5eb41902e2dcf670371e19256c083bf",
    ),
    "both": (
        T,
        "lora-7",
        "tenant-a",
        "754e9f584a7810c41a50b1b8be63c06a52a77c75b5dda46aae8b69e51d5acff6",
        "4217e6fca0357ae1f67a741ee23d5552378e7327d70b22324bd02b95dcc48ef4",
        "a45fa5b21e7c1161b243c0061dc1992477c3ce2ba1f21819ab06078955335749",
    ),
    "wide ids": (
        [5, 4294967303, 6, 1099511627776, 1, 2, 3, 4],
        None,
        None,
        "",
        "3a63c93dc76fe516db7cc47a6d435886aa6c331bd7d8877b3e07a03bd62e00da",
        "cade8819981705d2ed38c1c68970c57541838bdacf05e72e9497e9e5cbf8a816",
    ),
    "1 to 8": (
        list(range(1, 9)),
        None,
        None,
        "",
        "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
        "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
    ),
    "1 to 8 salted": (
        list(range(1, 9)),
        None,
        "tenant-a",
        SALT_SEED,
        "2fd053693d7ef6aeb2f9315a5ca100dfe4b99434c563241ee3243a9163846222",
        "39ba3f7b77a6d9be73bc583518710afb6b630f81f7fc266efce37828cbf9a04e",
    ),
}


def hex_chain(tokens, grain, identity=None, media=()):
    chain = PrefixChain(identity, grain_tokens=grain, media=media)
    chain.extend(tokens)
    return [row.tobytes().hex() for row in chain.digests]


def reference_chain(tokens, grain, seed=b"", suffix=lambda index: b""):
    """The formula of the contract, token by token."""
    digests = []
    for index in range(len(tokens) // grain):
        ids = tokens[index * grain : (index + 1) * grain]
        wide = max(ids) > 0xFFFFFFFF
        body = b"\xff" + struct.pack(f"<{grain}Q", *ids) if wide else struct.pack(f"<{grain}I", *ids)
        seed = hashlib.sha256(seed + body + suffix(index)).digest()
        digests.append(seed.hex())
    return digests


@pytest.mark.parametrize("name", GOLDEN)
def test_the_chain_is_sglangs_page_hash_byte_for_byte(name):
    tokens, extra_key, salt, seed, first, second = GOLDEN[name]
    identity = RequestIdentity(extra_key=extra_key, cache_salt=salt)
    assert identity.seed.hex() == seed
    assert hex_chain(tokens, 4, identity) == [first, second]


def test_flattened_bigram_pairs_give_sglangs_bigram_pages():
    pairs = [token for first in range(100, 108) for token in (first, first + 1)]
    assert hex_chain(pairs, 8) == [
        "7839f315d1508e59abac64d3102386a95b6ab0637a1216e8f50481ff464ab790",
        "69e2f7cdca78b47d1bae8fc5bd3e17151db00625ce4173cf859300b7b8903712",
    ]


def test_an_empty_extra_key_is_a_value_of_its_own():
    identity = RequestIdentity(extra_key="")
    assert identity.seed.hex() == "fd649dd130277fa0773e23e84ddfa4ec779d9df77087968a60d7cefb9050ab1d"
    assert hex_chain(T, 4, identity)[0] == "cb4446ba9295142ea9c1f6b94523b739dbadb46ce597894897bd1acce9ee02fc"


def test_chains_of_different_grains_share_nothing():
    tokens = [(i * 7) % 250 + 3 for i in range(64)]
    fine, coarse = hex_chain(tokens, 16), hex_chain(tokens, 64)
    assert fine[0] == "ef66402027be807f0317fb8db9154e3cda178b57f4c69097ac5878a9082a7aec"
    assert coarse == ["09772ff86b8710fc8a8789e20666b73fbf7319ece27439515058d2bd07f8ec31"]
    assert not set(fine) & set(coarse)


def test_parts_of_the_seed_are_framed():
    assert (
        RequestIdentity(extra_key="ab", cache_salt="c").seed
        != RequestIdentity(extra_key="a", cache_salt="bc").seed
    )


def test_an_empty_salt_is_refused():
    with pytest.raises(IdentityError, match="cache_salt is empty"):
        RequestIdentity(cache_salt="")


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(IdentityError, match="UTF-8"):
        _ = RequestIdentity(cache_salt="\ud800").seed


@pytest.mark.parametrize("field", ["lora", "cache_salt", "extra_key"])
def test_a_part_of_another_type_is_refused_by_name(field):
    with pytest.raises(IdentityError, match=field):
        RequestIdentity(**{field: 5})


def test_an_adapter_is_part_of_the_seed_by_name_and_by_content():
    adapters = [
        LoraIdentity("fr", "5e" * 32),
        LoraIdentity("fr", "5f" * 32),
        LoraIdentity("de", "5e" * 32),
        None,
    ]
    seeds = [RequestIdentity(lora=lora).seed for lora in adapters]
    assert len(set(seeds)) == 4
    assert RequestIdentity(lora=LoraIdentity("fr", "5E" * 32)).seed == seeds[0]


def test_an_adapter_of_unknown_content_is_not_cached_at_all():
    identity = RequestIdentity(lora=LoraIdentity("fr", None))
    assert not identity.cacheable
    assert RequestIdentity(lora=LoraIdentity("fr", "5e" * 32)).cacheable
    for use in (lambda: identity.seed, lambda: PrefixChain(identity, grain_tokens=4)):
        with pytest.raises(IdentityError, match="not cached"):
            use()


@pytest.mark.parametrize(
    ("name", "digest"), [("", "5e" * 32), (7, "5e" * 32), ("fr", "5e"), ("fr", "xyz"), ("fr", ""), ("fr", 5)]
)
def test_a_vague_adapter_is_refused(name, digest):
    with pytest.raises(IdentityError):
        LoraIdentity(name, digest)


class TensorDouble:
    """Stands for a torch CPU tensor: all the chain asks of one is ``numpy()``."""

    def __init__(self, ids):
        self._ids = np.array(ids, np.int64)

    def numpy(self):
        return self._ids


CONTAINERS = [
    list,
    tuple,
    lambda ids: array("i", ids),
    lambda ids: array("q", ids),
    lambda ids: np.array(ids, np.int32),
    lambda ids: np.array(ids, np.int64),
    lambda ids: np.array(ids, np.uint32),
    lambda ids: np.array(ids, ">i8"),
    lambda ids: np.repeat(np.array(ids, np.int64), 2)[::2],
    lambda ids: [np.int64(token) for token in ids],
    TensorDouble,
]


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_gives_the_same_digests(container):
    ids = [1, 2, 300, 70000] * 16
    assert hex_chain(container(ids), 16) == reference_chain(ids, 16)


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview, lambda ids: array("B", ids)])
def test_bytes_are_one_token_each(container):
    ids = [1, 0, 0, 0, 7, 200] * 8
    tokens = container(ids if container is not memoryview else bytes(ids))
    assert hex_chain(tokens, 4) == reference_chain(ids, 4)
    assert hex_chain(tokens, 4) != hex_chain([1, 7], 4)


@pytest.mark.parametrize("ids", [[-1, 2], np.array([3, -7]), array("q", [5, -(2**40)])])
def test_a_negative_id_is_refused_and_leaves_the_chain_as_it_was(ids):
    chain = PrefixChain(grain_tokens=2)
    chain.extend([1, 2])
    with pytest.raises(IdentityError, match="negative"):
        chain.extend(ids)
    assert chain.token_count == 2
    assert [row.tobytes().hex() for row in chain.digests] == reference_chain([1, 2], 2)


@pytest.mark.parametrize(
    "ids",
    [
        *([1.5], ["1"], [2**64], [-1, 2**63], 7, "1", None, {1, 2}, {1: 2}, iter([1])),
        *(np.array([1.0]), np.array([[1], [2]]), np.array([True]), array("d", [1.0]), array("u", "1")),
    ],
)
def test_what_is_not_a_row_of_integers_is_refused(ids):
    with pytest.raises(IdentityError, match="integers"):
        PrefixChain(grain_tokens=1).extend(ids)


@pytest.mark.parametrize("empty", [[], (), array("q"), np.array([], np.int64), np.array([], np.int32)])
def test_no_tokens_give_no_digests(empty):
    chain = PrefixChain(grain_tokens=4)
    chain.extend(empty)
    assert chain.token_count == 0
    assert chain.digests.shape == (0, 32)
    assert chain.block_digests(8).shape == (0, 32)


def test_truncating_past_the_end_is_refused():
    chain = PrefixChain(grain_tokens=4)
    chain.extend(T)
    with pytest.raises(SpecError, match="chain of 8 tokens to 9"):
        chain.truncate(9)


def test_digests_are_read_only():
    chain = PrefixChain(grain_tokens=4)
    chain.extend(T)
    with pytest.raises(ValueError, match="read-only"):
        chain.digests[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        chain.block_digests(8)[0, 0] = 1


def test_a_block_is_named_by_its_last_grain():
    chain = PrefixChain(grain_tokens=4)
    chain.extend(range(100, 121))
    assert np.array_equal(chain.block_digests(4), chain.digests)
    assert np.array_equal(chain.block_digests(8), chain.digests[[1, 3]])
    assert np.array_equal(chain.block_digests(12), chain.digests[[2]])
    assert chain.digest_at(8) == chain.digests[1].tobytes()


@pytest.mark.parametrize("block_tokens", [0, 6, 2, -4])
def test_a_block_that_is_no_whole_number_of_grains_is_refused(block_tokens):
    with pytest.raises(SpecError, match="no multiple of the chain's grain 4"):
        PrefixChain(grain_tokens=4).block_digests(block_tokens)


@pytest.mark.parametrize("position", [0, 3, -4, 12])
def test_a_position_without_a_digest_is_refused(position):
    chain = PrefixChain(grain_tokens=4)
    chain.extend(range(10))
    with pytest.raises(SpecError, match=rf"position {position} has no digest"):
        chain.digest_at(position)


def test_a_salt_alone_is_no_identity():
    with pytest.raises(IdentityError, match="RequestIdentity"):
        PrefixChain("tenant", grain_tokens=4)


def test_a_grain_of_nothing_is_refused():
    with pytest.raises(SpecError, match="grain_tokens is 0"):
        PrefixChain(grain_tokens=0)


def test_media_are_appended_to_the_grains_they_overlap():
    first, second = MediaItem(b"\x01" * 32, 3, 6), MediaItem(b"\x02" * 32, 5, 13)

    def frame(*items):
        body = b"".join(digest + struct.pack("<q", offset) for digest, offset in items)
        return b"ucm-media-v1" + struct.pack("<I", len(items)) + body

    suffixes = {
        0: frame((first.digest, -3)),
        1: frame((first.digest, 1), (second.digest, -1)),
        2: frame((second.digest, 3)),
        3: frame((second.digest, 7)),
    }
    expected = reference_chain(list(range(20)), 4, suffix=lambda index: suffixes.get(index, b""))
    assert hex_chain(range(20), 4, media=(second, first)) == expected


def test_edges_of_an_item_may_be_numpy_numbers():
    item = MediaItem(b"\x01" * 32, np.int64(6), np.uint8(11))
    assert item == MediaItem(b"\x01" * 32, 6, 11)
    assert hex_chain(range(12), 4, media=[item]) == hex_chain(
        range(12), 4, media=[MediaItem(item.digest, 6, 11)]
    )


@pytest.mark.parametrize(
    ("digest", "begin", "end"),
    [(b"\x01" * 16, 0, 1), (b"\x01" * 32, 2, 2), (b"\x01" * 32, -1, 2), (b"\x01" * 32, 0.5, 2)],
)
def test_a_vague_media_item_is_refused(digest, begin, end):
    with pytest.raises(IdentityError):
        MediaItem(digest, begin, end)


def test_row_seeds_differ_by_row_and_by_namespace():
    seeds = {row_seed(digest, name) for digest in (b"a" * 32, b"b" * 32) for name in ("full", "window-64")}
    assert len(seeds) == 4
    assert all(len(seed) == 32 for seed in seeds)


def test_seeds_are_blake2b_over_framed_parts():
    def framed(kind, body):
        return kind + len(body).to_bytes(8, "little") + body

    def digest(tag, *parts):
        inner = b"l" + len(parts).to_bytes(8, "little") + b"".join(parts)
        body = b"l" + (2).to_bytes(8, "little") + framed(b"s", tag) + inner
        return hashlib.blake2b(body, digest_size=32).hexdigest()

    row = digest(b"ucm-row-seed-1", framed(b"x", b"n" * 32), framed(b"s", b"full"))
    lora = digest(b"ucm-lora-1", framed(b"x", b""), framed(b"s", b"fr"), framed(b"s", b"5e" * 32))
    assert (
        row_seed(b"n" * 32, "full").hex()
        == row
        == "63597c00f68fe733c3da492becf4d43f3c9d7ff26e01c8099c5f10eb9bf12279"
    )
    assert (
        RequestIdentity(LoraIdentity("fr", "5e" * 32)).seed.hex()
        == lora
        == "ace0306e2a692a0df79d810b97bd673407a631ea03209098a236b56bc0ec1bb3"
    )


def test_object_keys_are_the_xor_of_seed_and_digest():
    chain = PrefixChain(grain_tokens=4)
    chain.extend(T)
    seed = row_seed(b"n" * 32, "full")
    keys = object_keys(seed, chain.digests)
    expected = [bytes(a ^ b for a, b in zip(seed, row.tobytes(), strict=True)) for row in chain.digests]
    assert [row.tobytes() for row in keys] == expected
    assert object_keys(seed, chain.digests[:0]).shape == (0, 32)


@pytest.mark.parametrize(("seed", "shape"), [(b"short", (1, 32)), (b"s" * 32, (32,)), (b"s" * 32, (1, 16))])
def test_object_keys_of_the_wrong_width_are_refused(seed, shape):
    with pytest.raises(SpecError):
        object_keys(seed, np.zeros(shape, np.uint8))
