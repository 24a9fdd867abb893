"""The ring is told which block follows which, so that a prompt that outgrows it keeps its head there."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import families
from engine_doubles import request
from halves import PAGES, WAIT_S, Halves

from ucm_core.cache import Cache
from ucm_core.coordinator.coordinator import Verdict
from ucm_core.flow.ticket import Ticket, TicketGroup
from ucm_core.spec.keys import Keys, following
from ucm_core.store.files import FileTier
from ucm_core.store.ring import Ring

PAGE, BLOCK = 128, 64


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Keys, Keys | None]]:
    """What rings are asked for from now on: keys, and the key before each."""
    asked: list[tuple[Keys, Keys | None]] = []
    claim, gather = Ring.claim, Ring.gather

    def claimed(ring: Ring, keys: Keys, parents: Keys | None = None, **more: Any) -> Any:
        asked.append((keys, parents))
        return claim(ring, keys, parents, **more)

    def gathered(ring: Ring, keys: Keys, strides: Any, *, parents: Keys | None = None, **more: Any) -> Any:
        asked.append((keys, parents))
        return gather(ring, keys, strides, parents=parents, **more)

    monkeypatch.setattr(Ring, "claim", claimed)
    monkeypatch.setattr(Ring, "gather", gathered)
    return asked


def keys_of(engine: Halves, tokens: int, row: str = "full") -> Keys:
    cache = engine.scheduler_cache.current
    assert cache is not None
    chain = cache.chain(list(request(tokens).all_token_ids))
    return cache.coordinator.keys(chain, row, begin_block=0, end_block=tokens // BLOCK)


def parent_of(claims: list[tuple[Keys, Keys | None]]) -> dict[bytes, bytes]:
    """Key by key, the one before it as the ring was told."""
    told = [
        pair for keys, parents in claims if parents is not None for pair in zip(keys, parents, strict=True)
    ]
    return {key.tobytes(): parent.tobytes() for key, parent in told}


def in_order(keys: Keys) -> dict[bytes, bytes]:
    return {key.tobytes(): parent.tobytes() for key, parent in zip(keys, following(keys), strict=True)}


def prefill(engine: Halves, asked: Any, table: list[int], *, step_tokens: int) -> None:
    """Compute and save a prompt, step by step."""
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, (table,), external_tokens=0)
    for begin in range(0, asked.num_tokens, step_tokens):
        engine.step((asked, begin, min(step_tokens, asked.num_tokens - begin), (table,)))
        engine.step_until(lambda _: engine.worker.open_saves == 0)
    engine.finish(asked.request_id)


def test_a_saved_block_follows_the_one_before_it_also_across_steps(engines: Any, claims: Any) -> None:
    engine = engines()
    prefill(engine, request(5 * PAGE), [1, 2, 3, 4, 5], step_tokens=2 * PAGE)
    assert len(claims) == 3
    assert parent_of(claims) == in_order(keys_of(engine, 5 * PAGE))


def test_a_block_that_fills_a_hole_follows_the_one_before_the_hole(engines: Any, claims: Any) -> None:
    engine = engines()
    prefill(engine, request(3 * PAGE), [1, 2, 3], step_tokens=3 * PAGE)
    engine.settle()
    keys = keys_of(engine, 3 * PAGE)
    engine.worker_cache.current.stores["full"].drop(keys[[1, 4]])
    claims.clear()
    prefill(engine, request(3 * PAGE), [1, 2, 3], step_tokens=3 * PAGE)
    assert parent_of(claims) == {keys[i].tobytes(): keys[i - 1].tobytes() for i in (1, 4)}


def test_a_loaded_block_follows_one_that_the_engine_holds(engines: Any, claims: Any) -> None:
    writer = engines()
    writer.write_prompt(request(300), ([1, 2, 3],))
    writer.close()
    reader, asked = engines(fill="zero"), request(300)
    claims.clear()
    assert reader.scheduler.matched_tokens(asked, PAGE) == (PAGE, False)
    reader.scheduler.allocated(asked, ([7, 8, 9],), external_tokens=PAGE)
    assert reader.step((asked, 2 * PAGE, 44, ([7, 8, 9],))).broken == set()
    keys = keys_of(reader, 300)
    assert parent_of(claims) == {keys[i].tobytes(): keys[i - 1].tobytes() for i in (2, 3)}


def test_a_block_of_a_window_follows_nothing(engines: Any, claims: Any) -> None:
    engine = engines(families.GPT_OSS)
    engine.write_prompt(request(300), ([1, 2, 3], [4, 5, 6]))
    full, others = parent_of(claims), [keys for keys, parents in claims if parents is None]
    assert full == in_order(keys_of(engine, 300))
    assert sum(map(len, others)) == 300 // BLOCK


def test_a_prompt_that_outgrows_the_ring_keeps_a_head_that_others_load(engines: Any) -> None:
    """Without files: what left the ring is gone."""
    settings = {"ring_bytes": "1MiB", "disk_bytes": 0}
    writer, reader = engines(**settings), engines(fill="zero", **settings)
    slots = writer.worker_cache.current.stores["full"].slots
    pages = list(range(1, PAGES))
    assert slots < PAGE // BLOCK * len(pages)
    prefill(writer, request(PAGE * len(pages)), pages, step_tokens=2 * PAGE)
    asked, kept_pages = request(PAGE * len(pages)), (slots - slots // 16 - 1) * BLOCK // PAGE
    tokens, _ = reader.scheduler.matched_tokens(asked, 0)
    assert tokens >= kept_pages * PAGE > 0
    reader.scheduler.allocated(asked, (pages,), external_tokens=tokens)
    assert reader.step((asked, tokens, PAGE, (pages,))).broken == set()
    right, found = (engine.blocks(0, pages[:kept_pages]) for engine in (writer, reader))
    assert all((found[layer] == right[layer]).all() for layer in right)


# -- prefetch on lookup


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Ticket]:
    """Tickets of what is read ahead from now on."""
    begun: list[Ticket] = []
    real = Cache.prefetch

    def prefetch(cache: Cache, verdict: Verdict) -> Verdict:
        reading = real(cache, verdict)
        assert isinstance(reading.prefetch, TicketGroup)
        begun.append(reading.prefetch.rows["full"])
        return reading

    monkeypatch.setattr(Cache, "prefetch", prefetch)
    return begun


@pytest.fixture
def stored(engines: Any) -> None:
    writer = engines()
    writer.write_prompt(request(300), ([1, 2, 3],))
    writer.close()


@pytest.mark.usefixtures("stored")
def test_what_is_promised_is_read_before_vllm_has_room_for_it(
    engines: Any, reads: list[Ticket], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, asked = engines(fill="zero", prefetch_on_lookup=True), request(300)
    assert reader.scheduler.matched_tokens(asked, 0) == (256, False)
    assert reads[0].wait(WAIT_S)
    monkeypatch.setattr(FileTier, "read", _unreadable)
    reader.scheduler.allocated(asked, ([7, 8, 9],), external_tokens=256)
    assert reader.step((asked, 256, 44, ([7, 8, 9],))).broken == set()
    assert reads[0].cancelled


def _unreadable(*_: object) -> Any:
    raise OSError("the worker reads files that were read already")


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("end", ["ask again", "finish"])
def test_what_is_not_loaded_is_not_read_on(engines: Any, reads: list[Ticket], end: str) -> None:
    reader, asked = engines(prefetch_on_lookup=True), request(300)
    reader.scheduler.matched_tokens(asked, 0)
    assert not reads[0].cancelled
    if end == "finish":
        reader.scheduler.finished("r")
    else:
        reader.scheduler.matched_tokens(asked, 0)
        assert not reads[1].cancelled
    assert reads[0].cancelled


@pytest.mark.usefixtures("stored")
def test_by_default_nothing_is_read_ahead(engines: Any, reads: list[Ticket]) -> None:
    assert engines().scheduler.matched_tokens(request(300), 0) == (256, False)
    assert reads == []
