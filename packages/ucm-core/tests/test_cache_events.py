"""An index made of a cache's events equals the files (C-69), whatever happens to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import GRAIN, HYBRID, RING_BYTES, identity_of, payloads_of

from ucm_core import Cache, CacheConfig, CacheEvent, EventKind, EventStream, PrefixChain, RequestIdentity
from ucm_core.store.gc import Collector

TOKENS = [[7 * prompt + token for token in range(6 * GRAIN)] for prompt in range(3)]


def open_cache(root: Path) -> Cache:
    config = CacheConfig(root=root, ring_bytes=RING_BYTES, disk_bytes=1 << 30)
    return Cache.open(config, HYBRID, identity=identity_of(HYBRID))


@dataclass
class Index:
    """What somebody else knows of the cache: by events alone, enumerating only when told to."""

    stream: EventStream
    known: dict[tuple[str, bytes], CacheEvent | None] = field(default_factory=dict)
    resyncs: int = 0
    events: list[CacheEvent] = field(default_factory=list)

    def follow(self) -> set[tuple[str, bytes]]:
        for event in self.stream.take():
            self.events.append(event)
            if event.kind is EventKind.RESYNC:
                self.resyncs += 1
                listed = [(row, name) for row, names in self.stream.contents() for name in names]
                self.known = dict.fromkeys(listed)
            elif event.kind is EventKind.STORED:
                self.known[event.row, event.name] = event
            else:
                self.known.pop((event.row, event.name), None)
        return set(self.known)


def files(cache: Cache) -> dict[tuple[str, bytes], Path]:
    """What is stored, by looking at the file system and nothing else."""
    root = cache.config.root / str(cache.namespace)
    found = (path for path in root.glob("*/???/*") if not path.name.startswith("."))
    return {(path.parts[-3], bytes.fromhex(path.name[:32])): path for path in found if path.is_file()}


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with open_cache(tmp_path) as cache:
        yield cache


def save(cache: Cache, *, prompt: int = 0, blocks: int = 6) -> PrefixChain:
    chain = cache.chain(TOKENS[prompt])
    cache.save(chain, payloads_of(HYBRID, blocks)).wait_durable(60.0)
    return chain


def test_an_index_begins_with_what_is_there(cache: Cache) -> None:
    save(cache)
    index = Index(cache.events())
    assert index.follow() == set(files(cache))
    assert (index.resyncs, len(index.known)) == (1, 18)


def test_an_event_carries_row_size_medium_parent_and_tokens(cache: Cache) -> None:
    index = Index(cache.events())
    index.follow()
    chain = save(cache)
    index.follow()
    for (row, name), event in index.known.items():
        assert event is not None
        assert event.origin is not None
        end = event.origin.begin_tokens + GRAIN
        assert event.origin.tokens == tuple(TOKENS[0][end - GRAIN : end])
        assert event.origin.digest == chain.digest_at(end)
        assert event.origin.parent == (chain.digest_at(end - GRAIN) if end > GRAIN else None)
        assert event.size_bytes == files(cache)[row, name].stat().st_size
        assert event.medium == "file"
    assert {row for row, _ in index.known} == {"full", "window-40", "state"}


def test_promotion_from_file_to_ring_is_no_event(tmp_path: Path) -> None:
    with open_cache(tmp_path) as writer:
        save(writer)
    with open_cache(tmp_path) as cache:
        index = Index(cache.events())
        index.follow()
        chain = cache.chain(TOKENS[0])
        assert cache.load(chain, cache.resolve(chain)).resume_tokens == 5 * GRAIN
        assert cache.events().take()[0].kind is EventKind.RESYNC
        assert index.follow() == set(files(cache))
        assert len(index.events) == 1


@pytest.mark.parametrize("row", ["full", "window-40", "state"])
def test_a_foreign_unlink_shows_when_it_is_missed(tmp_path: Path, row: str) -> None:
    with open_cache(tmp_path) as writer:
        save(writer)
    with open_cache(tmp_path) as cache:
        index = Index(cache.events())
        before = index.follow()
        chain = cache.chain([*TOKENS[0], 1])
        lost = cache.coordinator.keys(chain, row, begin_block=5, end_block=6)[0].tobytes()[:16]
        files(cache)[row, lost].unlink()
        assert index.follow() == before
        cache.resolve(chain)
        assert index.follow() == set(files(cache)) == before - {(row, lost)}


def test_a_failed_store_is_not_stored_and_a_later_one_is(cache: Cache) -> None:
    save(cache, prompt=1, blocks=1)
    index = Index(cache.events())
    index.follow()
    name = cache.keys("full", cache.chain(TOKENS[0]).block_digests(GRAIN)[2:3])[0].tobytes()[:16]
    other = next(path for (row, _), path in files(cache).items() if row == "full")
    place = other.parent.parent / name.hex()[:3] / f"{name.hex()}{other.name[32:]}"
    (place / "in the way").mkdir(parents=True)
    save(cache)
    assert index.follow() == set(files(cache))
    assert ("full", name) not in index.known
    (place / "in the way").rmdir()
    place.rmdir()
    save(cache)
    assert index.follow() == set(files(cache))
    assert ("full", name) in index.known


def test_an_overflow_is_a_resync_and_then_all_is_well(cache: Cache) -> None:
    index = Index(cache.events(capacity=4))
    index.follow()
    save(cache)
    assert index.follow() == set(files(cache))
    assert [event.kind for event in index.events] == [EventKind.RESYNC] * 2
    cache.stores["full"].drop(
        cache.coordinator.keys(cache.chain(TOKENS[0]), "full", begin_block=0, end_block=2)
    )
    assert index.follow() == set(files(cache))
    assert index.resyncs == 2


def test_changed_weights_are_a_resync_and_nothing_old_is_told_after(cache: Cache) -> None:
    save(cache)
    index = Index(cache.events())
    (name, *_) = (name for row, name in index.follow() if row == "full")
    old = cache._spaces.followed().places["full"]
    cache.weights_changed()
    assert index.follow() == set(files(cache)) == set()
    late = np.frombuffer(name, dtype=np.uint8)[None]  # a save that was under way when the weights changed
    cache._spaces.root.journal.tell(
        old, late, stored=True, exist=lambda asked: np.ones(len(asked), dtype=np.bool_)
    )
    save(cache, prompt=1)
    assert index.follow() == set(files(cache))


def test_a_closed_stream_hears_nothing_and_costs_nothing(cache: Cache) -> None:
    stream = cache.events()
    stream.take()
    stream.close()
    stream.close()
    save(cache)
    assert stream.take() == []


def test_what_is_remembered_of_origins_is_bounded(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucm_core.coordinator.origins.MAX_ORIGINS", 4)
    index = Index(cache.events())
    index.follow()
    save(cache)
    index.follow()
    assert sum(event is not None and event.origin is not None for event in index.known.values()) == 4


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["save", "drop", "unlink", "damage", "load", "collect"]),
        st.integers(0, 2),
        st.integers(0, 5),
    ),
    max_size=12,
)


class Hand:
    """What can happen to the objects of one block of a prompt, by this process or by anybody."""

    def __init__(self, cache: Cache, prompt: int, block: int) -> None:
        self.cache, self.prompt, self.block = cache, prompt, block
        digests = cache.chain(TOKENS[prompt]).block_digests(GRAIN)[block : block + 1]
        self.keys = {row: cache.keys(row, digests) for row in cache.stores}

    def paths(self) -> list[Path]:
        present = files(self.cache)
        found = (present.get((row, key[0].tobytes()[:16])) for row, key in self.keys.items())
        return [path for path in found if path is not None]

    def save(self) -> None:
        save(self.cache, prompt=self.prompt, blocks=self.block + 1)

    def load(self) -> None:
        chain = self.cache.chain([*TOKENS[self.prompt], 1])
        self.cache.load(chain, self.cache.resolve(chain))

    def drop(self) -> None:
        for row, key in self.keys.items():
            self.cache.stores[row].drop(key)

    def unlink(self) -> None:
        for path in self.paths():
            path.unlink()

    def damage(self) -> None:
        for path in self.paths():
            path.write_bytes(bytes(path.stat().st_size))

    def collect(self) -> None:
        """A pass of the collector below a bound that half of the objects exceed."""
        usage, room = self.cache._spaces.root.usage, self.cache._spaces._parts.room
        bound, usage.capacity_bytes = usage.capacity_bytes, max(1, usage.used_bytes // 2)
        assert isinstance(room, Collector)
        room.collect()
        usage.capacity_bytes = bound


def look_at_the_files(cache: Cache, index: Index) -> None:
    """Ask the medium for all that is believed, as a lookup does for what the ring does not hold."""
    for row, store in cache.stores.items():
        names = [np.frombuffer(name, np.uint8) for known, name in index.known if known == row]
        store._tiers.files.exist(np.array(names, dtype=np.uint8).reshape(-1, 16))  # type: ignore[attr-defined]


@settings(max_examples=40, deadline=None)
@given(OPERATIONS, st.sampled_from([5, 65_536]))
def test_after_anything_the_index_equals_the_files(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, int]], capacity: int
) -> None:
    """What others removed counts once somebody asked for it."""
    with open_cache(tmp_path_factory.mktemp("root")) as cache:
        index = Index(cache.events(capacity=capacity))
        for name, prompt, block in operations:
            getattr(Hand(cache, prompt, block), name)()
            index.follow()
        look_at_the_files(cache, index)
        assert index.follow() == set(files(cache))


def test_events_of_one_tenant_say_nothing_to_another(cache: Cache) -> None:
    """Equal tokens, other salt (C-02): no name, digest or parent of the one is one of the other's."""
    seen: list[set[bytes | None]] = []
    for salt in ("t1", "t2", None):
        index = Index(cache.events())
        index.follow()
        chain = cache.chain(TOKENS[0], RequestIdentity(cache_salt=salt))
        cache.save(chain, payloads_of(HYBRID, 4)).wait_durable(60.0)
        index.follow()
        origins = [event.origin for event in index.events if event.origin is not None]
        names = {event.name for event in index.events if event.kind is EventKind.STORED}
        assert len(origins) == len(names) == 12
        seen.append(names | {origin.digest for origin in origins} | {origin.parent for origin in origins})
    assert seen[0] & seen[1] == seen[0] & seen[2] == seen[1] & seen[2] == {None}


def test_no_block_of_a_prompt_that_repeats_is_its_own_parent(cache: Cache) -> None:
    """C-16: four equal blocks, four digests, each the next one's parent."""
    index = Index(cache.events())
    index.follow()
    cache.save(cache.chain([7] * 4 * GRAIN), payloads_of(HYBRID, 4)).wait_durable(60.0)
    index.follow()
    found = [event.origin for event in index.events if event.row == "full" and event.origin]
    found.sort(key=lambda origin: origin.begin_tokens)
    assert [origin.parent for origin in found] == [None, *(origin.digest for origin in found[:3])]
    assert len({origin.digest for origin in found}) == 4
