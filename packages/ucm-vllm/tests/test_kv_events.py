"""KV events: an index that adds what is stored and drops what is removed equals the medium (C-69)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import families
from engine_doubles import request
from halves import Halves
from test_round_trip import objects
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from ucm_core.events import EventStream
from ucm_vllm.connector import _kv_events
from ucm_vllm.kv_events import KvEvents, StoredObject
from ucm_vllm.metadata import Happened

PAGES = ([1, 2, 3],)


def following(engine: Halves) -> Halves:
    engine.scheduler.follow_events()
    engine.worker.follow_events()
    return engine


def followed(engine: Halves, index: set[bytes] | None = None) -> set[bytes]:
    """The index after one more step."""
    index = set() if index is None else index
    engine.step()
    for event in engine.scheduler.take_events():
        (index.add if event.stored else index.discard)(event.name)
    return index


def names_on_disk(root: Path) -> set[bytes]:
    return {bytes.fromhex(path.name.split(".")[0]) for path in objects(root)}


def prompt_events(engine: Halves, tokens: int = 300) -> list[StoredObject]:
    engine.write_prompt(request(tokens), PAGES)
    engine.step()
    return [event for event in engine.scheduler.take_events() if event.stored]


def test_a_saved_prompt_is_told_with_tokens_and_parents(engines: Any) -> None:
    events = prompt_events(following(engines()))
    by_tokens = {event.token_ids: event for event in events}
    ids, before = tuple(request(300).all_token_ids), None
    for block in range(4):
        event = by_tokens[ids[64 * block : 64 * block + 64]]
        assert (event.block_tokens, event.group, event.kind) == (64, 0, "full_attention")
        assert event.parent == before
        before = event.name


def test_what_lies_there_already_is_told_without_tokens(engines: Any, tmp_path: Path) -> None:
    engines().write_prompt(request(300), PAGES)
    late = following(engines())
    late.step()
    events = late.scheduler.take_events()
    assert {event.name for event in events} == names_on_disk(tmp_path)
    assert {(event.stored, event.token_ids, event.parent) for event in events} == {(True, (), None)}


def test_the_index_equals_the_files_after_stores_and_removals(engines: Any, tmp_path: Path) -> None:
    engine = following(engines())
    engine.write_prompt(request(300), PAGES)
    index = followed(engine)
    assert index == names_on_disk(tmp_path)
    engine.worker_cache.current.stores["full"].drop(keys_of(engine)[1:3])  # type: ignore[union-attr]
    assert followed(engine, index) == names_on_disk(tmp_path)
    assert len(index) == 2


def keys_of(engine: Halves) -> np.ndarray:
    cache = engine.worker_cache.current
    assert cache is not None
    return cache.coordinator.keys(
        cache.chain(list(request(300).all_token_ids)), "full", begin_block=0, end_block=4
    )


def test_lost_events_cost_an_enumeration_and_no_truth(engines: Any, tmp_path: Path) -> None:
    engine = following(engines())
    engine.write_prompt(request(300), PAGES)
    index = followed(engine)
    objects(tmp_path)[0].unlink()
    cache = engine.worker_cache.current
    assert cache is not None
    cache._spaces.root.journal.lose()
    engine.write_prompt(request(300, first=5), PAGES)
    assert followed(engine, index) == names_on_disk(tmp_path)


@pytest.mark.parametrize("call", ["take", "contents"])
def test_an_enumeration_that_fails_is_made_again_and_keeps_back_nothing_else(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    engine = following(engines())
    engine.write_prompt(request(300), PAGES)
    index = followed(engine)
    lose_one(engine, tmp_path)
    monkeypatch.setattr(EventStream, call, fail_after_one(getattr(EventStream, call)))
    engine.write_prompt(request(300, "more", first=5), PAGES)  # its blocks come back
    followed(engine, index)
    monkeypatch.undo()
    assert followed(engine, index) == names_on_disk(tmp_path)


def lose_one(engine: Halves, root: Path) -> None:
    """An object goes, and whoever follows has missed it."""
    objects(root)[0].unlink()
    cache = engine.worker_cache.current
    assert cache is not None
    cache._spaces.root.journal.lose()


def fail_after_one(real: Callable[..., Iterable[Any]]) -> Callable[..., Any]:
    def one(*arguments: Any) -> Any:
        yield next(iter(real(*arguments)), None)
        raise OSError("gone")

    return one


def test_an_index_that_was_not_asked_for_long_hears_the_last_word_of_each_object(
    engines: Any, tmp_path: Path
) -> None:
    """However much lies on the medium when it begins: nothing is left out."""
    engine = following(engines())
    engine.write_prompt(request(300), PAGES)
    cache = engine.worker_cache.current
    assert cache is not None
    for turn in range(4):
        cache.stores["full"].drop(keys_of(engine)[: turn + 1])
        engine.write_prompt(request(300, f"turn {turn}"), PAGES)
    engine.step()
    events = engine.scheduler.take_events()
    assert len(events) == len({event.name for event in events}) == 4
    assert {event.name for event in events if event.stored} == names_on_disk(tmp_path)


def test_nothing_is_left_out_however_much_there_is(engines: Any) -> None:
    engine = following(engines())
    engine.write_prompt(request(128), PAGES)
    cache, names = engine.scheduler_cache.current, range(70_000)
    assert cache is not None
    told = Happened("full", tuple(number.to_bytes(16, "little") for number in names), True, "file")
    events = KvEvents(engine.spec)
    events.add(cache, [told])
    assert len(events.take()) == len(names)
    assert events.take() == []


def test_a_new_generation_forgets_the_old_one(engines: Any) -> None:
    engine = following(engines())
    engine.write_prompt(request(300), PAGES)
    index = followed(engine)
    assert len(index) == 4
    engine.scheduler.reset(local_is_empty=True)
    engine.write_prompt(request(200, "after"), PAGES)
    assert len(followed(engine, index)) == 3


def test_nothing_is_told_where_nobody_follows(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventStream, "__init__", None)  # would raise
    engine = engines()
    engine.write_prompt(request(300), PAGES)
    assert engine.scheduler.take_events() == []


def test_only_one_worker_tells(engines: Any) -> None:
    engine = engines()
    engine.worker._worker = 1
    following(engine)
    assert prompt_events(engine) == []


def test_rows_are_told_apart(engines: Any) -> None:
    engine = following(engines(families.GPT_OSS))
    engine.write_prompt(request(300), ([1, 2, 3], [4, 5, 6]))
    engine.step()
    told = {
        (event.group, event.kind, event.window_tokens)
        for event in engine.scheduler.take_events()
        if event.stored
    }
    assert told == {(0, "sliding_window", 64), (1, "full_attention", None)}


# -- as vLLM knows them


def events_of(*happened: StoredObject) -> Iterable[Any]:
    return list(_kv_events(happened))


def test_a_stored_object_in_vllm_s_words() -> None:
    (event,) = events_of(StoredObject(True, b"n" * 16, 1, "sliding_window", 64, 128, b"p" * 16, (7, 8)))
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash) == ([b"n" * 16], b"p" * 16)
    assert (event.token_ids, event.block_size, event.medium) == ([7, 8], 64, "STORAGE")
    assert (event.group_idx, event.kv_cache_spec_sliding_window) == (1, 128)
    hash(event)  # vLLM counts them


def test_a_removed_object_in_vllm_s_words() -> None:
    (event,) = events_of(StoredObject(False, b"n" * 16, 0, "mamba", 64, None))
    assert isinstance(event, BlockRemoved)
    assert (event.block_hashes, event.medium, event.group_idx) == ([b"n" * 16], "STORAGE", 0)
