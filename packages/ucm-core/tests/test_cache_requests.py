"""Requests that must not meet, over a real cache and by every path into it (C-01 .. C-06, C-14, C-16)."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import FULL, GRAIN, blocks_of, identity_of, payloads_of
from test_cache import WAIT_S, open_cache

from ucm_core.cache import Cache
from ucm_core.errors import IdentityError
from ucm_core.spec.keys import LoraIdentity, MediaItem, RequestIdentity
from ucm_core.spec.table import SpecTable

TOKENS = list(range(8 * GRAIN))
TENANTS = {"none": None, "t1": RequestIdentity(cache_salt="t1"), "t2": RequestIdentity(cache_salt="t2")}


def lora(name: str, digest: str) -> RequestIdentity:
    return RequestIdentity(LoraIdentity(name, digest * 32))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with open_cache(tmp_path / "cache") as cache:
        yield cache
        cache.check_integrity()


def store(
    cache: Cache,
    identity: RequestIdentity | None,
    *,
    tokens: list[int] = TOKENS,
    media: tuple[MediaItem, ...] = (),
) -> None:
    """Keep the prompt's blocks under ``identity``; which ones they are shows in their bytes."""
    chain = cache.chain(tokens, identity, media=media)
    seed = int.from_bytes(hashlib.sha256(repr((identity, media)).encode()).digest()[:4], "little")
    payloads = payloads_of(cache.table, len(tokens) // GRAIN, seed=seed)
    assert cache.save(chain, payloads).wait_durable(WAIT_S)


def found(
    cache: Cache,
    identity: RequestIdentity | None,
    *,
    tokens: list[int] = TOKENS,
    media: tuple[MediaItem, ...] = (),
) -> int:
    chain = cache.chain(tokens, identity, media=media)
    return cache.resolve(chain, request_tokens=len(tokens) + 1).hit.resume_tokens


def test_an_adapter_is_part_of_every_key(cache: Cache) -> None:
    two, one = lora("law-v2", "a2"), lora("law-v1", "a1")
    store(cache, two)
    assert [found(cache, two, tokens=[*TOKENS, *range(25)]), found(cache, one), found(cache, None)] == [
        8 * GRAIN, 0, 0,
    ]  # fmt: skip


def test_what_the_base_model_stored_is_not_an_adapters(cache: Cache) -> None:
    store(cache, None)
    assert found(cache, lora("law-v2", "a2")) == 0


def test_an_adapter_reloaded_under_its_name_is_another(cache: Cache) -> None:
    store(cache, lora("fr", "5e"))
    assert [found(cache, lora("fr", "5e")), found(cache, lora("fr", "5f"))] == [8 * GRAIN, 0]


def test_an_adapter_of_unknown_content_stores_and_finds_nothing(cache: Cache) -> None:
    unknown = RequestIdentity(LoraIdentity("fr", None))
    with pytest.raises(IdentityError, match="not cached"):
        cache.chain(TOKENS, unknown)


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product(TENANTS, repeat=2)))
def test_tenants_meet_on_no_path(cache: Cache, mine: str, theirs: str) -> None:
    store(cache, TENANTS[mine])
    chain = cache.chain(TOKENS, TENANTS[theirs])
    same = mine == theirs
    assert found(cache, TENANTS[theirs]) == (8 * GRAIN if same else 0)
    owners = cache.resolve(cache.chain(TOKENS, TENANTS[mine]), request_tokens=len(TOKENS) + 1)
    loaded = cache.load(chain, owners)  # with the other's verdict in hand
    assert loaded.resume_tokens == (8 * GRAIN if same else 0)
    assert len(loaded.payloads["full"]) == (8 if same else 0)


def test_a_tenant_that_stores_equal_tokens_replaces_nothing(cache: Cache) -> None:
    store(cache, TENANTS["t1"])
    first = cache.load(one := cache.chain(TOKENS, TENANTS["t1"]), cache.resolve(one)).payloads["full"]
    store(cache, TENANTS["t2"])
    again = cache.load(one, cache.resolve(one)).payloads["full"]
    other = cache.load(two := cache.chain(TOKENS, TENANTS["t2"]), cache.resolve(two)).payloads["full"]
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_equal_text_around_another_picture_is_found_up_to_the_picture_only(cache: Cache) -> None:
    picture, other = (MediaItem(bytes([byte]) * 32, 40, 70) for byte in (1, 2))
    store(cache, None, media=(picture,))
    hits = [found(cache, None, media=media) for media in [(picture,), (other,), ()]]
    assert hits == [8 * GRAIN, 2 * GRAIN, 2 * GRAIN]


def test_prompts_of_embeddings_are_told_apart_by_their_digests_or_not_cached(cache: Cache) -> None:
    """An engine gives zeros as ids; the content stands behind them as one item over all."""
    zeros = [0] * 50
    first, second = ((MediaItem(bytes([byte]) * 32, 0, 50),) for byte in (1, 2))
    store(cache, None, tokens=zeros, media=first)
    assert found(cache, None, tokens=zeros, media=first) == 3 * GRAIN
    assert found(cache, None, tokens=zeros, media=second) == 0
    with pytest.raises(IdentityError, match="token ids"):
        cache.chain(None)  # type: ignore[arg-type]  # neither ids nor a digest: nothing names it


def test_repeated_blocks_are_different_blocks(cache: Cache) -> None:
    tokens = [7] * (4 * GRAIN)
    store(cache, None, tokens=tokens)
    keys = cache.keys("full", cache.chain(tokens).digests)
    assert len({key.tobytes() for key in keys}) == 4
    cache.stores["full"].drop(keys[2:3])
    assert found(cache, None, tokens=tokens) == 2 * GRAIN


NAMES = next(
    case["input"]["names"]
    for case in json.loads((Path(__file__).parent / "data" / "cases-identity.json").read_text())["cases"]
    if case["id"] == "C-14.1"
)


def test_names_lead_nowhere_and_share_nothing(tmp_path: Path) -> None:
    """Each name at once as a row's, a model's, an adapter's and a tenant's."""
    for number, name in enumerate(NAMES):
        table = SpecTable((replace(FULL, name=name),), GRAIN)
        identity = identity_of(table, config=json.dumps({"name": name}))
        who = RequestIdentity(LoraIdentity(name, "5e" * 32), cache_salt=name, extra_key=name)
        with open_cache(tmp_path / "inside" / "cache", table, identity) as cache:
            chain = cache.chain(TOKENS, who)
            assert cache.resolve(chain).hit.resume_tokens == 0
            blocks = blocks_of(FULL, 8, seed=number)
            assert cache.save(chain, {name: blocks}).wait_durable(WAIT_S)
            loaded = cache.load(chain, cache.resolve(chain, request_tokens=len(TOKENS) + 1))
            assert np.array_equal(loaded.payloads[name], blocks)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert [path.name for path in (tmp_path / "inside").iterdir()] == ["cache"]
    assert max(len(path.name.encode()) for path in tmp_path.rglob("*")) <= 255
