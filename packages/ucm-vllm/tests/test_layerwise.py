"""Layer by layer: hooks in order, repeated, skipped, unknown; loads that fail half-way; what is saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import families
import torch
from engine_doubles import Engine, request, saved
from halves import PAGES, Halves, backend, kind
from prometheus_client import REGISTRY
from test_round_trip import corrupt, equal, file_of, load_dense, objects, reader_keys, restarted

from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.spec.units import UnitMap
from ucm_core.store.block import BlockStore
from ucm_vllm.spec_from_engine import engine_spec

TABLES = ([7, 8, 9],)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def plan_load(engine: Halves, asked: Any, tables: Any = TABLES) -> Any:
    """The plan of a step that loads 256 tokens and computes the rest."""
    assert engine.scheduler.matched_tokens(asked, 0) == (256, False)
    engine.scheduler.allocated(asked, tables, external_tokens=256)
    return engine.plan((asked, 256, asked.num_tokens - 256, tables))


def written(engines: Any, **more: Any) -> tuple[Halves, Halves]:
    """An engine that has saved a prompt of 300 tokens, and an empty one."""
    writer, reader = engines(), engines(fill="zero", **more)
    writer.write_prompt(request(300), ([1, 2, 3],))
    return writer, reader


def run_layers(engine: Halves, plan: Any, *names: str) -> tuple[set[int], set[str]]:
    """A step whose hooks come for these layers, in this order; broken pages and what was dropped."""
    engine.worker.before_step(plan)
    engine.worker.start_loads(plan)
    for name in names:
        engine.worker.before_layer(plan, name)
        engine.worker.after_layer(plan, name)
    engine.worker.end_step(plan)
    engine.worker.collect(plan)
    broken, report = engine.worker.broken_pages(plan), engine.worker.report()
    engine.scheduler.take_output(report, broken_pages=broken)
    return broken, set() if report is None else set(report.dropped)


LAYERS = [families.attention(number) for number in range(4)]


@pytest.mark.parametrize("layerwise", [True, False])
def test_the_scheduler_has_looked_for_what_a_worker_saves(
    engines: Any, monkeypatch: pytest.MonkeyPatch, layerwise: bool
) -> None:
    told, save, begin_save = [], BlockStore.save, BlockStore.begin_save

    def noted(call: Any) -> Any:
        return lambda *given, **more: (told.append(more["absent"]), call(*given, **more))[1]

    monkeypatch.setattr(BlockStore, "save", noted(save))
    monkeypatch.setattr(BlockStore, "begin_save", noted(begin_save))
    engines(layerwise=layerwise).write_prompt(request(300), ([1, 2, 3],))
    assert told
    assert all(told)


# -- loads


def test_each_layer_has_come_when_its_hook_returns(engines: Any) -> None:
    writer, reader = written(engines)
    plan, kept = plan_load(reader, request(300)), writer.blocks(0, [1, 2])
    reader.worker.start_loads(plan)
    for layer in LAYERS:
        reader.worker.before_layer(plan, layer)
        assert (reader.blocks(0, [7, 8])[layer] == kept[layer]).all()


def test_whole_loads_are_there_before_the_first_layer(engines: Any) -> None:
    writer, reader = written(engines, layerwise=False)
    reader.worker.start_loads(plan_load(reader, request(300)))
    assert equal(reader.blocks(0, [7, 8]), writer.blocks(0, [1, 2]))


def test_a_model_of_one_group_may_load_asynchronously(engines: Any) -> None:
    writer, reader = written(engines, load_asynchronously=True)
    asked = request(300)
    assert reader.scheduler.matched_tokens(asked, 0) == (256, True)
    reader.scheduler.allocated(asked, TABLES, external_tokens=256)
    step = reader.receive("r")
    assert (step.failed, step.broken) == (set(), set())
    assert equal(reader.blocks(0, [7, 8]), writer.blocks(0, [1, 2]))


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_failed_block_is_told_after_the_step(engines: Any, tmp_path: Path, layerwise: bool) -> None:
    restarted(engines, tmp_path).close()
    reader = engines(fill="zero", layerwise=layerwise)
    corrupt(file_of(tmp_path, reader_keys(reader, request(300))[3]))
    assert load_dense(reader).broken == {8}


def test_what_a_step_computes_from_a_failed_block_is_told_with_it(engines: Any, tmp_path: Path) -> None:
    restarted(engines, tmp_path).close()
    reader = engines(fill="zero")
    corrupt(file_of(tmp_path, reader_keys(reader, request(400))[0]))
    reader.scheduler.matched_tokens(request(400), 0)
    reader.scheduler.allocated(request(400), ([7, 8, 9, 10],), external_tokens=256)
    guest = request(420, "guest")
    shared = (guest, 384, 36, ([11, 12, 9, 13],))
    assert reader.step((request(400), 256, 144, ([7, 8, 9, 10],)), shared).broken == {7, 9}


def test_a_block_that_a_step_reads_broken_is_told_once_more(engines: Any) -> None:
    engine = engines()
    plan = replace(engine.plan(), broken=frozenset({5}))
    assert engine.execute(plan).broken == {5}
    assert engine.step().broken == set()


def test_a_layer_whose_hook_does_not_come_fails_the_load(engines: Any) -> None:
    _, reader = written(engines)
    before = counted("ucm_layers_unseen_total")
    assert run_layers(reader, plan_load(reader, request(300)), *LAYERS[:3])[0] == {7, 8}
    assert counted("ucm_layers_unseen_total") == before + 1


def test_results_may_be_asked_for_before_the_step_ends(engines: Any, tmp_path: Path) -> None:
    """The order of vLLM with a draft model: results, then the draft's layers, then the end."""
    reader = restarted(engines, tmp_path)
    corrupt(file_of(tmp_path, reader_keys(reader, request(300))[0]))
    plan = plan_load(reader, request(300))
    reader.worker.start_loads(plan)
    for layer in LAYERS:
        reader.worker.before_layer(plan, layer)
        reader.worker.after_layer(plan, layer)
    reader.worker.collect(plan)
    assert reader.worker.broken_pages(plan) == {7}
    reader.worker.end_step(plan)
    assert reader.worker.broken_pages(plan) == set()


@pytest.mark.parametrize("seen", [[0, 1, 3], [0, 1, 2], []])
def test_a_hook_that_did_not_come_before_the_results_fails_the_load(engines: Any, seen: list[int]) -> None:
    _, reader = written(engines)
    plan = plan_load(reader, request(300))
    reader.worker.start_loads(plan)
    for number in seen:
        reader.worker.before_layer(plan, LAYERS[number])
    assert reader.worker.broken_pages(plan) == {7, 8}
    reader.worker.end_step(plan)
    report = reader.worker.report()
    assert report is not None
    assert report.failures == 1


def test_a_step_that_was_never_ended_fails_with_the_next(engines: Any) -> None:
    _, reader = written(engines)
    reader.worker.start_loads(plan_load(reader, request(300)))
    plan = reader.plan()
    reader.worker.end_step(plan)
    assert reader.worker.broken_pages(plan) == {7, 8}
    assert reader.worker.open_saves == 0


def test_what_no_layer_waited_for_fails_with_the_next_step_though_it_came(engines: Any) -> None:
    _, reader = written(engines)
    reader.worker.start_loads(planned := plan_load(reader, request(300)))
    tickets = [ticket for load in reader.worker._loads._step for ticket in load.tickets]
    assert tickets
    assert all(ticket.ok for ticket in tickets)  # it is small, and in the ring
    reader.worker.before_layer(plan := reader.plan(), "model.layers.0.self_attn.attn")
    assert plan is not planned
    reader.worker.end_step(plan)
    assert reader.worker.broken_pages(plan) == {7, 8}


def test_a_save_that_cannot_begin_leaves_nothing_open(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr("ucm_core.flow.pipeline.LayerPipeline.begin_step", refuse)
    engine = engines()
    asked = request(300)
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, TABLES, external_tokens=0)
    engine.step((asked, 0, 300, TABLES))
    assert engine.worker.open_saves == 0


def test_a_load_that_cannot_begin_has_failed(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, reader = written(engines)

    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr("ucm_core.flow.pipeline.LayerPipeline.begin_step", refuse)
    assert load_dense(reader).broken == {7, 8}


def test_a_load_whose_unit_never_comes_is_ended_with_its_step(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NeverLoads:
        """A double of a `UnitLoad` that brings nothing until it is cancelled."""

        together, small = 1, False

        def __init__(self, keys: np.ndarray) -> None:
            self.ticket = Ticket(len(keys), 4, durable=False)

        def submit(self, shards: slice, *, urgency: int = 0, here: bool = False) -> None:
            """Bring nothing."""

        def cancel(self) -> None:
            self.ticket.settle_rest(ResultCode.CANCELLED)

    _, reader = written(engines)
    monkeypatch.setattr(
        "ucm_core.store.block.BlockStore.begin_load", lambda _, keys, *__, **___: NeverLoads(keys)
    )
    assert run_layers(reader, plan_load(reader, request(300)))[0] == {7, 8}


# -- hooks that nobody expects


@pytest.mark.parametrize("name", ["", "model.layers.99.self_attn.attn", "visual.blocks.3.attn"])
def test_a_name_that_was_never_registered_is_counted_and_nothing_else(engines: Any, name: str) -> None:
    writer, reader = written(engines)
    before = counted("ucm_errors_total", where="layer_name")
    broken, _ = run_layers(reader, plan_load(reader, request(300)), name, *LAYERS)
    assert counted("ucm_errors_total", where="layer_name") == before + 2
    assert broken == set()
    assert equal(reader.blocks(0, [7, 8]), writer.blocks(0, [1, 2]))


def test_hooks_out_of_order_lose_nothing(engines: Any) -> None:
    writer, reader = written(engines)
    broken, _ = run_layers(reader, plan_load(reader, request(300)), *reversed(LAYERS))
    assert broken == set()
    assert equal(reader.blocks(0, [7, 8]), writer.blocks(0, [1, 2]))


def test_hooks_without_a_step_do_nothing(engines: Any) -> None:
    engine = engines()
    plan = engine.plan()
    engine.worker.before_layer(plan, LAYERS[0])
    engine.worker.after_layer(plan, LAYERS[0])
    assert engine.worker.report() is not None


# -- saves


def save_plan(engine: Halves, asked: Any, tables: Any = ([1, 2, 3],)) -> Any:
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, tables, external_tokens=0)
    return engine.plan((asked, 0, asked.num_tokens, tables))


def test_a_layer_is_saved_once_and_the_last_bytes_win(engines: Any, tmp_path: Path) -> None:
    """Speculative decoding repeats hooks (C-52)."""
    writer, reader = engines(), engines(fill="zero")
    plan = save_plan(writer, request(300))
    for layer in LAYERS:
        writer.worker.before_layer(plan, layer)
        writer.worker.after_layer(plan, layer)
    for value in (1, 2, 3):
        writer.memory[LAYERS[3]][1:3] = value
        writer.worker.before_layer(plan, LAYERS[3])
        writer.worker.after_layer(plan, LAYERS[3])
    writer.worker.end_step(plan)
    writer.step_until(lambda _: writer.worker.open_saves == 0)
    assert load_dense(reader).broken == set()
    assert (reader.memory[LAYERS[3]][7:9] == 3).all()
    writer.settle()
    assert len(objects(tmp_path)) == 4


@pytest.mark.parametrize("seen", [0, 2])
def test_layers_whose_hooks_do_not_come_are_saved_at_the_end(engines: Any, seen: int) -> None:
    writer, reader = engines(), engines(fill="zero")
    run_layers(writer, save_plan(writer, request(300)), *LAYERS[:seen])
    writer.step_until(lambda _: writer.worker.open_saves == 0)
    load_dense(reader)
    assert equal(reader.blocks(0, [7, 8]), writer.blocks(0, [1, 2]))


def test_nothing_of_a_step_with_a_failed_load_is_saved_by_anybody(engines: Any, tmp_path: Path) -> None:
    reader = restarted(engines, tmp_path)
    asked, other = request(300), request(200, "other", first=5)
    corrupt(file_of(tmp_path, reader_keys(reader, asked)[0]))
    assert reader.scheduler.matched_tokens(asked, 0) == (256, False)
    reader.scheduler.allocated(asked, TABLES, external_tokens=256)
    reader.scheduler.matched_tokens(other, 0)
    reader.step((asked, 256, 44, TABLES), (other, 0, 200, ([12, 13],)))
    reader.settle()
    assert len(objects(tmp_path)) == 3


def test_a_request_whose_load_failed_is_saved_from_its_beginning(engines: Any, tmp_path: Path) -> None:
    """Seven blocks, two a step; block 1 is damaged (C-37)."""
    writer = engines()
    writer.write_prompt(request(450), ([1, 2, 3, 4],))
    kept = writer.blocks(0, [1, 2, 3, 4])
    writer.close()
    reader = engines(fill="zero")
    keys = all_keys(reader, 450)
    for key in keys[4:]:
        file_of(tmp_path, key).unlink()
    corrupt(file_of(tmp_path, keys[1]))
    asked, table = request(450), ([7, 8, 9, 10],)
    plan = plan_load(reader, asked, table)
    assert reader.execute(plan).broken == {7}
    for begin in range(0, 450, 128):  # vLLM computes from the first broken block on
        for name, tensor in reader.memory.items():
            page = begin // 128
            tensor[7 + page] = torch.from_numpy(kept[name][page]).view(tensor.dtype).view(tensor[0].shape)
        reader.step((asked, begin, min(128, 450 - begin), table))
    reader.finish("r")
    reader.settle()
    again = engines(fill="zero")
    assert again.scheduler.matched_tokens(request(450, "again"), 0) == (384, False)
    again.scheduler.allocated(request(450, "again"), table, external_tokens=384)
    assert len(objects(tmp_path)) == 7


def all_keys(engine: Halves, tokens: int) -> np.ndarray:
    cache = engine.scheduler_cache.current
    assert cache is not None
    chain = cache.chain(list(request(tokens).all_token_ids))
    return cache.coordinator.keys(chain, "full", begin_block=0, end_block=tokens // 64)


# -- what is planned


def dense() -> Engine:
    return Engine(
        engine_spec(families.DENSE.table, families.DENSE.groups, spec_kind=kind, engine_align_tokens=128)
    )


def test_only_accepted_tokens_are_keyed() -> None:
    """80 computed of which 12 are placeholders; then 5 drafts rejected of 144 (C-52)."""
    engine, asked = dense(), request(68)
    engine.half.matched_tokens(asked, 0)
    assert saved(engine.run((asked, 0, 80, ([1, 2],)))) == [(0, 1, 64)]
    asked.append_output_token_ids([9] * 59)  # 127 accepted
    assert saved(engine.run((asked, 80, 64, ([1, 2],)))) == []


def test_a_resumed_request_is_saved_from_its_new_blocks() -> None:
    """384 tokens saved and 10 generated, preempted, resumed elsewhere, run to 520 (C-39)."""
    engine, asked = dense(), request(384)
    engine.half.matched_tokens(asked, 0)
    engine.half.allocated(asked, ([1, 2, 3, 4],), external_tokens=0)
    assert len(saved(engine.run((asked, 0, 384, ([1, 2, 3, 4],))))) == 6
    asked.append_output_token_ids([9] * 10)
    new = ([13, 14, 15, 16, 17],)
    assert engine.half.matched_tokens(asked, 0) == (384, False)
    engine.half.allocated(asked, new, external_tokens=384)
    assert saved(engine.run((asked, 384, 10, new))) == []
    asked.append_output_token_ids([8] * 126)
    assert saved(engine.run((asked, 394, 126, new))) == [(0, 16, 64), (0, 16, 64)]


def test_tokens_that_are_taken_back_end_saves_of_their_blocks() -> None:
    engine, asked = dense(), request(130)
    engine.half.matched_tokens(asked, 0)
    engine.run((asked, 0, 130, ([1, 2],)))
    del asked._all_token_ids[100:]
    assert engine.step((asked, 100, 1, ([1, 2],))).overwritten == {"r"}
    assert engine.step((asked, 101, 1, ([1, 2],))).overwritten == set()


def test_preempted_requests_are_named_in_the_plan(engines: Any) -> None:
    engine = engines()
    assert engine.plan(preempted={"a", "b"}).overwritten == {"a", "b"}


# -- all rows rewind together (C-36)


def test_a_failed_window_block_fails_the_whole_request_and_shortens_the_next_answer(
    engines: Any, tmp_path: Path
) -> None:
    writer = engines(families.GPT_OSS)
    writer.write_prompt(request(300), ([1, 2, 3], [4, 5, 6]))
    writer.close()
    for path in objects(tmp_path, "window-64"):
        corrupt(path)
    reader = engines(families.GPT_OSS, fill="zero")
    asked = request(300)
    assert reader.scheduler.matched_tokens(asked, 0) == (256, True)
    reader.scheduler.allocated(asked, ([0, 7], [8, 9]), external_tokens=256)
    step = reader.receive("r")
    assert (step.failed, step.broken) == ({"r"}, set())
    tokens, _ = reader.matched_again(asked)
    assert tokens is not None
    assert tokens < 256


# -- the trace


def test_steps_are_traced_while_a_file_says_so(engines: Any, tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    directory.mkdir()
    (directory / "on").touch()
    engine = engines(trace_dir=directory)
    engine.write_prompt(request(300), ([1, 2, 3],))
    engine.close()
    (written,) = directory.glob("ucm-*.json")
    kinds = {event["name"] for event in json.loads(written.read_text())["traceEvents"]}
    assert any("save" in kind for kind in kinds)


# -- layers that share one tensor


def test_a_layer_that_reads_another_s_blocks_waits_for_them(engines: Any) -> None:
    engine = engines()
    engine.memory["model.layers.4.self_attn.attn"] = engine.memory[LAYERS[2]]
    engine.worker._memory.register(engine.memory, num_blocks=PAGES, backend_of=backend)
    units: UnitMap = engine.worker._memory.units
    assert units.await_before(4) == units.await_before(2)
    assert units.save_after(4) == ()
