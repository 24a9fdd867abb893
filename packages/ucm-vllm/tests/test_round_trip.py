"""Bytes from one engine's memory through the store into another's, and every way in which a load may fail."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import families
from engine_doubles import request
from halves import WAIT_S, WEIGHTS, Halves, model_of, settings
from prometheus_client import REGISTRY

from ucm_core.engine_cache import EngineCache
from ucm_core.errors import ConfigError
from ucm_core.ops.config import RowRetention


def objects(root: Path, row: str = "*") -> list[Path]:
    return sorted(path for path in root.glob(f"root/*/{row}/*/*") if path.is_file())


def equal(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


def load_dense(reader: Halves, tables: tuple[list[int], ...] = ([7, 8, 9],)) -> Any:
    """A prompt of 300 tokens of which 256 are served, in one synchronous step."""
    asked = request(300)
    assert reader.scheduler.matched_tokens(asked, 0) == (256, False)
    reader.scheduler.allocated(asked, tables, external_tokens=256)
    return reader.step((asked, 256, 44, tables))


# -- what was saved is what is loaded


def test_a_dense_prompt(engines: Any) -> None:
    writer, reader = engines(), engines(fill="zero")
    writer.write_prompt(request(300), ([1, 2, 3],))
    step = load_dense(reader)
    assert step.broken == set()
    assert equal(reader.blocks(0, [7, 8]), writer.blocks(0, [1, 2]))
    assert not any(part.any() for part in reader.blocks(0, [6, 9]).values())


def test_a_dense_prompt_after_a_restart(engines: Any) -> None:
    writer = engines()
    writer.write_prompt(request(300), ([1, 2, 3],))
    kept = writer.blocks(0, [1, 2])
    writer.close()
    reader = engines(fill="zero")
    load_dense(reader)
    assert equal(reader.blocks(0, [7, 8]), kept)


def test_blocks_that_the_engine_holds_are_not_written(engines: Any) -> None:
    writer, reader = engines(), engines(fill="zero")
    writer.write_prompt(request(300), ([1, 2, 3],))
    asked = request(300)
    assert reader.scheduler.matched_tokens(asked, 128) == (128, False)
    reader.scheduler.allocated(asked, ([7, 8, 9],), external_tokens=128)
    reader.step((asked, 256, 44, ([7, 8, 9],)))
    assert not any(part.any() for part in reader.blocks(0, [7]).values())
    assert equal(reader.blocks(0, [8]), writer.blocks(0, [2]))


def test_an_mla_prompt_with_small_pages(engines: Any) -> None:
    writer, reader = (engines(families.DEEPSEEK, fill=fill, align=16) for fill in ("random", "zero"))
    writer.write_prompt(request(200), (list(range(1, 14)),))
    asked = request(200)
    assert reader.scheduler.matched_tokens(asked, 0) == (192, False)
    table = list(range(13, 0, -1))
    reader.scheduler.allocated(asked, (table,), external_tokens=192)
    reader.step((asked, 192, 8, (table,)))
    assert equal(reader.blocks(0, table[:12]), writer.blocks(0, list(range(1, 13))))


def test_a_window_prompt_loads_only_the_window(engines: Any) -> None:
    writer, reader = (engines(families.GPT_OSS, fill=fill) for fill in ("random", "zero"))
    writer.write_prompt(request(300), ([1, 2, 3], [4, 5, 6]))
    asked = request(300)
    assert reader.scheduler.matched_tokens(asked, 0) == (256, True)
    reader.scheduler.allocated(asked, ([0, 7], [8, 9]), external_tokens=256)
    assert reader.receive("r").failed == set()
    assert equal(reader.blocks(1, [8, 9]), writer.blocks(1, [4, 5]))
    window, kept = reader.blocks(0, [7]), writer.blocks(0, [2])
    for layer, blocks in window.items():
        second_half = kept[layer].view(np.uint16).reshape(2, 2, 32, 128)[:, 0, :, 64:]
        assert (blocks.view(np.uint16).reshape(2, 2, 32, 128)[:, 0, :, 64:] == second_half).all()


HYBRID = ([0, 1], [0, 2], [0, 3], [4, 5, 6])
STATES = [(0, 11, 256), (1, 12, 256), (2, 13, 256)]


def hybrid_pair(engines: Any) -> tuple[Halves, Halves]:
    writer, reader = (engines(families.GRANITE, fill=fill) for fill in ("random", "zero"))
    writer.write_prompt(request(300, "writer"), HYBRID, offers={"writer": STATES})
    return writer, reader


def begin_hybrid(reader: Halves) -> Any:
    asked = request(300)
    assert reader.scheduler.matched_tokens(asked, 0) == (256, True)
    reader.scheduler.allocated(asked, ([0, 7], [0, 8], [0, 9], [10, 14]), external_tokens=256)
    return asked


def test_a_hybrid_prompt_with_its_states(engines: Any) -> None:
    writer, reader = hybrid_pair(engines)
    begin_hybrid(reader)
    step = reader.receive("r")
    assert (step.received, step.failed) == ({"r"}, set())
    for group, page in ((0, 7), (1, 8), (2, 9)):
        assert equal(reader.blocks(group, [page]), writer.blocks(group, [11 + group]))
    assert equal(reader.blocks(3, [10, 14]), writer.blocks(3, [4, 5]))


def test_an_asynchronous_load_is_reported_once(engines: Any) -> None:
    _, reader = hybrid_pair(engines)
    begin_hybrid(reader)
    reader.receive("r")
    assert [reader.step().received for _ in range(3)] == [set()] * 3
    assert reader.worker.pending_count == 0


def test_an_aborted_load_is_still_reported_once(engines: Any) -> None:
    _, reader = hybrid_pair(engines)
    begin_hybrid(reader)
    plan = reader.plan()
    reader.scheduler.finished("r")
    reader.execute(plan)
    if reader.worker.pending_count:
        reader.receive("r")
    assert reader.worker.pending_count == 0
    assert reader.scheduler.request_count == 0


# -- what fails


def corrupt(path: Path, offset: int = 5000) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def restarted(engines: Any, tmp_path: Path) -> Halves:
    """An engine whose ring is empty, over files of a prompt of 300 tokens."""
    writer = engines()
    writer.write_prompt(request(300), ([1, 2, 3],))
    writer.close()
    assert len(objects(tmp_path)) == 4
    return engines(fill="zero")


def test_a_flipped_byte_fails_its_block_and_is_healed_by_the_next_save(engines: Any, tmp_path: Path) -> None:
    reader = restarted(engines, tmp_path)
    asked = request(300)
    keys = reader_keys(reader, asked)
    corrupt(file_of(tmp_path, keys[2]))
    reader.scheduler.matched_tokens(asked, 0)
    reader.scheduler.allocated(asked, ([7, 8, 9],), external_tokens=256)
    step = reader.step((asked, 256, 44, ([7, 8, 9],)))
    assert step.broken == {8}
    assert not file_of(tmp_path, keys[2]).exists()
    plan = reader.plan((asked, 128, 172, ([7, 8, 9],)))
    assert [len(save.rows[0].keys) for save in plan.saves] == [1]
    reader.execute(plan)
    reader.settle()
    assert file_of(tmp_path, keys[2]).exists()


def reader_keys(reader: Halves, asked: Any) -> np.ndarray:
    cache = reader.scheduler_cache.current
    assert cache is not None
    return cache.coordinator.keys(cache.chain(list(asked.all_token_ids)), "full", begin_block=0, end_block=4)


def file_of(root: Path, key: np.ndarray) -> Path:
    name = key.tobytes()[:16].hex()
    (namespace,) = (path for path in (root / "root").iterdir() if (path / "manifest.json").is_file())
    return next((namespace / "full" / name[:3]).glob(f"{name}.*"), namespace / "full" / name[:3] / name)


def test_nothing_computed_on_garbage_is_saved(engines: Any, tmp_path: Path) -> None:
    reader = restarted(engines, tmp_path)
    asked, other = request(500), request(200, "other", first=5)
    corrupt(file_of(tmp_path, reader_keys(reader, asked)[0]))
    reader.scheduler.matched_tokens(asked, 0)
    reader.scheduler.allocated(asked, ([7, 8, 9, 10],), external_tokens=256)
    reader.scheduler.matched_tokens(other, 0)
    step = reader.step((asked, 256, 244, ([7, 8, 9, 10],)), (other, 0, 200, ([12, 13],)))
    assert step.broken == {7}
    assert len(step.plan.saves) == 2
    reader.settle()
    assert len(objects(tmp_path)) == 3
    again = reader.step((asked, 0, 500, ([7, 8, 9, 10],)), (other, 199, 1, ([12, 13],)))
    assert sorted(len(save.rows[0].keys) for save in again.plan.saves) == [3, 4]
    reader.settle()
    assert len(objects(tmp_path)) == 7 + 3


def test_a_step_planned_before_the_failure_was_known_saves_nothing(engines: Any, tmp_path: Path) -> None:
    reader = restarted(engines, tmp_path)
    asked, other = request(300), request(200, "other", first=5)
    corrupt(file_of(tmp_path, reader_keys(reader, asked)[0]))
    reader.scheduler.matched_tokens(asked, 0)
    reader.scheduler.allocated(asked, ([7, 8, 9],), external_tokens=256)
    first = reader.plan((asked, 256, 44, ([7, 8, 9],)))
    reader.scheduler.matched_tokens(other, 0)
    second = reader.plan((other, 0, 200, ([12, 13],)))
    reader.execute(first)
    reader.execute(second)
    reader.settle()
    assert len(objects(tmp_path)) == 3


def test_a_failed_state_fails_the_request_and_is_not_promised_again(engines: Any, tmp_path: Path) -> None:
    for engine in hybrid_pair(engines):
        engine.close()
    for path in objects(tmp_path, "mamba2*"):
        corrupt(path)
    reader = engines(families.GRANITE, fill="zero")
    begin_hybrid(reader)
    step = reader.receive("r")
    assert (step.received, step.failed, step.broken) == ({"r"}, {"r"}, set())
    assert reader.scheduler.matched_tokens(request(300, "next"), 0) == (0, False)


def test_blocks_that_vanish_after_the_promise_are_failed_blocks(engines: Any, tmp_path: Path) -> None:
    reader = restarted(engines, tmp_path)
    asked = request(300)
    reader.scheduler.matched_tokens(asked, 0)
    for path in objects(tmp_path):
        path.unlink()
    reader.scheduler.allocated(asked, ([7, 8, 9],), external_tokens=256)
    step = reader.step((asked, 256, 44, ([7, 8, 9],)))
    assert step.broken == {7, 8}


def test_a_store_that_raises_is_a_failed_load_and_a_dropped_save(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = engines(), engines(fill="zero")
    writer.write_prompt(request(300), ([1, 2, 3],))

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the medium is gone")

    for name in ("load", "save", "begin_load", "begin_save"):
        monkeypatch.setattr(f"ucm_core.store.block.BlockStore.{name}", broken)
    step = load_dense(reader)
    assert step.broken == {7, 8}
    assert reader.scheduler.matched_tokens(request(300, "next"), 0)[0] in {0, 256}


def test_a_load_whose_outcome_cannot_be_read_has_failed(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = engines(), engines(fill="zero")
    writer.write_prompt(request(300), ([1, 2, 3],))
    monkeypatch.setattr("ucm_vllm.worker_loads.failed_objects", _defect)
    assert load_dense(reader).broken == {7, 8}


def test_an_asynchronous_load_whose_outcome_cannot_be_read_has_failed(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, reader = hybrid_pair(engines)
    begin_hybrid(reader)
    monkeypatch.setattr("ucm_vllm.worker_loads.failed_objects", _defect)
    step = reader.receive("r")
    assert (step.received, step.failed) == ({"r"}, {"r"})
    assert reader.worker.pending_count == 0


def _defect(*_: object) -> Any:
    raise RuntimeError("a defect")


def test_a_worker_in_another_namespace_loads_and_saves_nothing(engines: Any, tmp_path: Path) -> None:
    writer, reader = engines(), engines(fill="zero")
    writer.write_prompt(request(300), ([1, 2, 3],))
    asked = request(300)
    reader.scheduler.matched_tokens(asked, 0)
    reader.scheduler.allocated(asked, ([7, 8, 9],), external_tokens=256)
    plan = reader.plan((asked, 256, 44, ([7, 8, 9],)))
    foreign = type(plan)("0" * 32, loads=plan.loads, saves=plan.saves)
    assert reader.execute(foreign).broken == {7, 8}


# -- changed weights


def test_after_changed_weights_both_halves_move_on(engines: Any, tmp_path: Path) -> None:
    engine = engines()
    engine.write_prompt(request(300, "before"), ([1, 2, 3],))
    old = engine.worker_cache.identity.namespace
    assert engine.scheduler.reset()
    assert engine.scheduler.matched_tokens(request(300, "after"), 0) == (0, False)
    engine.write_prompt(request(300, "after"), ([1, 2, 3],))
    assert engine.worker_cache.identity == engine.scheduler_cache.identity
    assert engine.worker_cache.identity.namespace != old
    assert engine.scheduler.matched_tokens(request(300, "again"), 0) == (256, False)
    other = engines(fill="zero")
    assert other.scheduler.matched_tokens(request(300), 0) == (0, False)


def test_a_load_of_old_weights_that_is_under_way_has_failed(engines: Any) -> None:
    _, reader = hybrid_pair(engines)
    asked = begin_hybrid(reader)
    reader.worker.start_loads(reader.plan())
    reader.scheduler.reset()
    step = reader.receive("r")
    assert (step.received, step.failed) == ({"r"}, {"r"})
    assert reader.matched_again(asked) == (0, False)


def test_where_the_change_itself_fails_nothing_is_found_any_more(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    engine.write_prompt(request(300, "before"), ([1, 2, 3],))
    monkeypatch.setattr("ucm_core.cache.Cache.weights_changed", _defect)
    assert not engine.scheduler.reset()
    assert engine.scheduler.matched_tokens(request(300, "after"), 0) == (0, False)
    assert engine.plan().namespace is None


def test_a_reset_that_a_tier_refuses_is_a_failure_and_finds_nothing_all_the_same(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines()
    engine.write_prompt(request(300, "before"), ([1, 2, 3],))
    root = engine.scheduler._cache.config.root
    (root / ".generations").write_text("no directory")
    assert not engine.scheduler.reset()
    assert "tier 'file' was not reset" in caplog.text
    assert engine.scheduler.matched_tokens(request(300, "after"), 0) == (0, False)


def test_weights_that_change_before_they_are_known_are_not_those_of_the_checkpoint(tmp_path: Path) -> None:
    known = threading.Event()
    caches = [
        EngineCache(
            model_of(families.DENSE),
            settings(tmp_path / "root"),
            digest=lambda _: WEIGHTS if known.wait(WAIT_S) else "",
            start_wait_s=0,
        )
        for _ in range(2)
    ]
    caches[0].weights_changed()
    known.set()
    identities = [cache.wait(WAIT_S).identity for cache in caches if cache.wait(WAIT_S)]
    assert [bool(identity.private_token) for identity in identities] == [True, False]
    for cache in caches:
        cache.close()


# -- start-up


def test_a_cache_is_not_there_until_the_weights_are_known(tmp_path: Path) -> None:
    known = threading.Event()

    def digest(_: Path) -> str:
        assert known.wait(WAIT_S)
        return WEIGHTS

    cache = EngineCache(model_of(families.DENSE), settings(tmp_path / "root"), digest=digest, start_wait_s=0)
    assert cache.current is None
    assert not cache.identity.known
    known.set()
    assert cache.wait(WAIT_S) is not None
    assert cache.identity.known
    cache.close()
    assert cache.current is None


def test_an_open_cache_says_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="ucm_core"):
        cache = EngineCache(
            model_of(families.DENSE),
            settings(tmp_path / "root"),
            digest=lambda _: WEIGHTS,
            start_wait_s=WAIT_S,
        )
    (line,) = [record.message for record in caplog.records if record.name.startswith("ucm_core.engine_cache")]
    assert f"cache {tmp_path / 'root'}, namespace {cache.identity.namespace}, rows full;" in line
    cache.close()


def test_weights_without_a_digest_cache_nothing(tmp_path: Path) -> None:
    cache = EngineCache(model_of(families.DENSE), settings(tmp_path / "root"), start_wait_s=WAIT_S)
    assert cache.current is None
    cache.close()


def test_whatever_keeps_a_cache_from_opening_is_counted(tmp_path: Path) -> None:
    def fail(_: Path) -> str:
        raise RuntimeError("nobody expected this")

    def errors() -> float:
        return REGISTRY.get_sample_value("ucm_errors_total", {"where": "open"}) or 0.0

    before = errors()
    cache = EngineCache(
        model_of(families.DENSE), settings(tmp_path / "root"), digest=fail, start_wait_s=WAIT_S
    )
    assert cache.current is None
    assert errors() == before + 1
    cache.close()


def test_a_cache_that_is_closed_while_it_opens_stays_closed(tmp_path: Path) -> None:
    known = threading.Event()
    cache = EngineCache(
        model_of(families.DENSE),
        settings(tmp_path / "root"),
        digest=lambda _: WEIGHTS if known.wait(WAIT_S) else "",
        start_wait_s=0,
    )
    cache.close()
    known.set()
    assert cache.wait(WAIT_S) is None


def test_settings_of_a_row_without_states_are_refused_at_the_start(tmp_path: Path) -> None:
    config = settings(tmp_path / "root").model_copy(update={"retention": {"full": RowRetention()}})
    with pytest.raises(ConfigError, match="row 'full' holds no states; rows that do: "):
        EngineCache(model_of(families.GRANITE), config)


def test_a_root_that_is_a_file_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ValueError, match="file' is not a directory"):
        EngineCache(model_of(families.DENSE), settings(tmp_path / "file" / "root"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# -- what is counted


def counted_tokens() -> np.ndarray:
    """Tokens so far: hit, failed, computed."""
    names = ("hit", "failed", "computed")
    return np.array([REGISTRY.get_sample_value(f"ucm_{name}_tokens_total") or 0.0 for name in names])


def test_a_damaged_block_counts_as_failed_from_its_page_on(engines: Any, tmp_path: Path) -> None:
    reader = restarted(engines, tmp_path)
    corrupt(file_of(tmp_path, reader_keys(reader, request(300))[2]))
    before = counted_tokens()
    assert load_dense(reader).broken == {8}
    reader.scheduler.finished("r")
    assert (counted_tokens() - before).tolist() == [256, 128, 172]


def test_a_failed_state_counts_as_failed_as_a_whole(engines: Any, tmp_path: Path) -> None:
    for engine in hybrid_pair(engines):
        engine.close()
    for path in objects(tmp_path, "mamba2*"):
        corrupt(path)
    reader = engines(families.GRANITE, fill="zero")
    before = counted_tokens()
    asked = begin_hybrid(reader)
    assert reader.receive("r").failed == {"r"}
    assert reader.matched_again(asked) == (0, False)
    reader.scheduler.finished("r")
    assert (counted_tokens() - before).tolist() == [256, 256, 300]
