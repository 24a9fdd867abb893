"""The scheduler's half, step by step: what it promises, plans, remembers and forgets."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import families
from engine_doubles import IDENTITY, Engine, balanced, request, saved
from halves import kind

from ucm_core.errors import IdentityError
from ucm_vllm.metadata import FailedLoad, Handshake
from ucm_vllm.spec_from_engine import EngineSpec, engine_spec


def spec_of(model: families.TinyModel, align: int = 128) -> EngineSpec:
    return engine_spec(model.table, model.groups, spec_kind=kind, engine_align_tokens=align)


@pytest.fixture
def dense() -> Iterator[Engine]:
    yield from balanced(Engine(spec_of(families.DENSE)))


@pytest.fixture
def hybrid() -> Iterator[Engine]:
    yield from balanced(Engine(spec_of(families.GRANITE)))


def store_prompt(engine: Engine, tokens: int, tables: tuple[list[int], ...], **more: Any) -> None:
    """Another request with the same tokens computes and saves its prompt, and ends."""
    first = request(tokens, "writer")
    engine.half.matched_tokens(first, 0)
    engine.half.allocated(first, tables, external_tokens=0)
    engine.run((first, 0, tokens, tables), **more)
    engine.half.finished("writer")


# -- verdicts


def test_nothing_stored_is_no_hit(dense: Engine) -> None:
    assert dense.half.matched_tokens(request(300), 0) == (0, False)


def test_a_stored_prompt_is_found_up_to_the_alignment(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    assert dense.half.matched_tokens(request(300), 0) == (256, False)


def test_asking_again_changes_nothing(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    assert {dense.half.matched_tokens(asked, 0) for _ in range(3)} == {(256, False)}
    assert dense.step().loads == ()


def test_the_last_token_is_always_computed(dense: Engine) -> None:
    store_prompt(dense, 257, ([1, 2, 3],))
    assert dense.half.matched_tokens(request(256), 0) == (128, False)


def test_what_vllm_holds_is_not_promised(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    assert dense.half.matched_tokens(request(300), 128) == (128, False)
    assert dense.half.matched_tokens(request(300), 256) == (0, False)


def test_a_table_with_states_loads_asynchronously(hybrid: Engine) -> None:
    offers = {"writer": [(group, 7 + group, 256) for group in range(3)]}
    store_prompt(hybrid, 300, ([0, 1], [0, 2], [0, 3], [4, 5, 6]), offers=offers)
    assert hybrid.half.matched_tokens(request(300), 0) == (256, True)


def test_a_request_whose_answer_is_discarded_is_not_looked_up(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    asked.skip_reading_prefix_cache = True
    assert dense.half.matched_tokens(asked, 0) == (0, False)


def test_nothing_is_promised_before_the_worker_is_ready(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    dense.tell(namespace=None)
    assert dense.half.matched_tokens(request(300), 0) == (0, False)


def test_nothing_is_promised_or_saved_before_the_weights_are_known(dense: Engine) -> None:
    known, dense.cache.current = dense.cache.current, None
    asked = request(300)
    assert dense.half.matched_tokens(asked, 0) == (0, False)
    assert dense.step((asked, 0, 300, ([1, 2, 3],))).saves == ()
    dense.cache.current = known
    asked.append_output_token_ids([9] * 20)
    assert saved(dense.step((asked, 300, 20, ([1, 2, 3],)))) == [(0, p, 64) for p in (1, 1, 2, 2, 3)]


@pytest.mark.parametrize(("role", "hit", "saves"), [("loads", 0, 4), ("saves", 256, 0)])
def test_a_role_that_only_loads_or_saves_does_only_that(role: str, hit: int, saves: int) -> None:
    engine = Engine(spec_of(families.DENSE))
    store_prompt(engine, 300, ([1, 2, 3],))
    half = Engine(spec_of(families.DENSE), **{role: False})
    half.cache.current = engine.cache.current if role == "saves" else half.cache.current
    asked = request(300)
    assert half.half.matched_tokens(asked, 0)[0] == hit
    assert len(saved(half.step((asked, 0, 300, ([1, 2, 3],))))) == saves


# -- loads


def test_a_load_covers_exactly_what_was_allocated(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    dense.half.matched_tokens(asked, 128)
    dense.half.allocated(asked, ([7, 8, 9],), external_tokens=128)
    (load,) = dense.step((asked, 256, 44, ([7, 8, 9],))).loads
    (transfer,) = load.rows
    ((group, pieces),) = transfer.pieces
    assert (group, load.asynchronous, load.possible) == (0, False, True)
    assert pieces.tolist() == [[0, 0, 8, 0, 64], [1, 0, 8, 64, 64]]


def test_a_smaller_allocation_than_promised_loads_less(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    dense.half.matched_tokens(asked, 0)
    dense.half.allocated(asked, ([7],), external_tokens=128)
    (load,) = dense.step().loads
    assert load.possible
    assert load.rows[0].pages(np.ones(2, dtype=bool)) == {7}


def test_blocks_that_vanished_since_the_promise_are_reported_as_failed(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    dense.half.matched_tokens(asked, 0)
    dense.keys.present["full"].clear()
    dense.half.allocated(asked, ([7, 8, 9],), external_tokens=256)
    (load,) = dense.step().loads
    assert not load.possible
    assert load.rows[0].pages(np.ones(4, dtype=bool)) == {7, 8}


def test_no_external_tokens_are_no_load(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    dense.half.matched_tokens(asked, 0)
    dense.half.allocated(asked, ([7, 8, 9],), external_tokens=0)
    assert dense.step().loads == ()


def test_a_load_is_planned_once(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    dense.half.matched_tokens(asked, 0)
    dense.half.allocated(asked, ([7, 8, 9],), external_tokens=256)
    assert [len(dense.step().loads) for _ in range(2)] == [1, 0]


def test_a_state_is_loaded_into_the_block_whose_end_is_the_boundary(hybrid: Engine) -> None:
    offers = {"writer": [(group, 7 + group, 256) for group in range(3)]}
    store_prompt(hybrid, 300, ([0, 1], [0, 2], [0, 3], [4, 5, 6]), offers=offers)
    asked = request(300)
    hybrid.half.matched_tokens(asked, 0)
    hybrid.half.allocated(asked, ([0, 11], [0, 12], [0, 13], [14, 15]), external_tokens=256)
    (load,) = hybrid.step().loads
    pages = {transfer.row: transfer.pages(np.ones(len(transfer.keys), dtype=bool)) for transfer in load.rows}
    assert load.asynchronous
    assert pages == {"full": {14, 15}, hybrid.half.state_rows[0]: {11, 12, 13}}


def test_window_rows_load_their_window_only() -> None:
    engine = Engine(spec_of(families.GPT_OSS))
    store_prompt(engine, 700, ([1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]))
    asked = request(700)
    assert engine.half.matched_tokens(asked, 0) == (640, True)
    engine.half.allocated(asked, ([0, 0, 0, 0, 25], [31, 32, 33, 34, 35]), external_tokens=640)
    (load,) = engine.step().loads
    objects = {transfer.row: len(transfer.keys) for transfer in load.rows}
    assert objects == {"window-64": 1, "full": 10}


def stored_hybrid(hybrid: Engine) -> None:
    offers = {"writer": [(group, 7 + group, 256) for group in range(3)]}
    store_prompt(hybrid, 300, ([0, 1], [0, 2], [0, 3], [4, 5, 6]), offers=offers)


def test_two_failed_loads_in_a_row_are_enough(hybrid: Engine) -> None:
    stored_hybrid(hybrid)
    asked, tables = request(300), ([0, 11], [0, 12], [0, 13], [14, 15])
    for _ in range(2):
        assert hybrid.half.matched_tokens(asked, 0) == (256, True)
        hybrid.half.allocated(asked, tables, external_tokens=256)
        hybrid.tell(failed=(FailedLoad("r", "full", hybrid.step().loads[0].rows[0].keys[:0]),))
        assert hybrid.half.matched_tokens(asked, 0) == (None, False), "others come first, once"
    assert hybrid.half.matched_tokens(asked, 0) == (0, False)


def test_a_load_that_came_is_not_held_against_the_request(hybrid: Engine) -> None:
    stored_hybrid(hybrid)
    asked, tables = request(300), ([0, 11], [0, 12], [0, 13], [14, 15])
    for _ in range(4):  # preempted and resumed again and again
        assert hybrid.half.matched_tokens(asked, 0) == (256, True)
        hybrid.half.allocated(asked, tables, external_tokens=256)
        hybrid.half.allocated(asked, tables, external_tokens=0)


# -- after a promise whatever fails is a load that is reported as failed, never no load


def fail(*_: object, **__: object) -> Any:
    raise RuntimeError("a defect")


def test_a_load_for_a_request_that_is_not_known_is_reported_as_failed(dense: Engine) -> None:
    dense.half.allocated(request(300, "stranger"), ([7, 8, 9],), external_tokens=128)
    (load,) = dense.step().loads
    assert not load.possible
    assert load.pages() == {7, 8, 9}


def test_a_load_that_cannot_be_planned_is_reported_as_failed(
    dense: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    dense.half.matched_tokens(asked, 128)
    monkeypatch.setattr("ucm_vllm.transfer_plans.TransferPlanner._pieces", fail)
    dense.half.allocated(asked, ([7, 8, 9],), external_tokens=128)
    (load,) = dense.step().loads
    assert not load.possible
    assert load.pages() == {8}


def test_a_step_that_cannot_be_planned_keeps_its_loads(
    dense: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    dense.half.matched_tokens(asked, 0)
    dense.half.allocated(asked, ([7, 8, 9],), external_tokens=256)
    monkeypatch.setattr("engine_doubles.KeysOnly.namespace", property(fail))
    plan = dense.step((asked, 256, 44, ([7, 8, 9],)))
    assert (plan.namespace, plan.saves) == (None, ())
    assert [load.pages() for load in plan.loads] == [{7, 8}]


def test_a_failure_is_not_taken_for_known_before_its_blocks_are(
    dense: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucm_vllm.broken_pages.BrokenPages.fail", fail)
    with pytest.raises(RuntimeError):
        dense.tell(broken_pages=frozenset({7}), failures=1)
    assert dense.step().failures_seen == 0


# -- saves


def test_only_full_blocks_of_computed_tokens_are_saved(dense: Engine) -> None:
    asked = request(300)
    dense.half.matched_tokens(asked, 0)
    tables = ([7, 8, 9],)
    assert saved(dense.run((asked, 0, 100, tables))) == [(0, 7, 64)]
    assert saved(dense.run((asked, 100, 100, tables))) == [(0, 7, 64), (0, 8, 64)]
    assert saved(dense.run((asked, 200, 100, tables))) == [(0, 8, 64)]
    assert saved(dense.run((asked, 299, 1, tables))) == []


def test_tokens_that_are_not_known_yet_are_not_saved(dense: Engine) -> None:
    asked = request(60)
    dense.half.matched_tokens(asked, 0)
    assert dense.step((asked, 0, 68, ([7],))).saves == ()
    asked.append_output_token_ids([9] * 4)
    assert saved(dense.step((asked, 60, 9, ([7],)))) == [(0, 7, 64)]


def test_what_is_stored_is_not_saved_again(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(400)
    dense.half.matched_tokens(asked, 0)
    assert saved(dense.step((asked, 0, 400, ([7, 8, 9, 10],)))) == [(0, 9, 64), (0, 9, 64)]


def test_a_hole_left_by_eviction_is_filled(dense: Engine) -> None:
    asked = request(400)
    dense.half.matched_tokens(asked, 0)
    plan = dense.run((asked, 0, 400, ([7, 8, 9, 10],)))
    dense.keys.drop("full", plan.saves[0].rows[0].keys[1:2])
    again = request(500, "again")
    dense.half.matched_tokens(again, 384)
    assert saved(dense.step((again, 384, 116, ([7, 8, 9, 12],))))[0] == (0, 7, 64)


def test_null_blocks_are_never_saved() -> None:
    engine = Engine(spec_of(families.GPT_OSS))
    asked = request(300)
    engine.half.matched_tokens(asked, 0)
    plan = engine.step((asked, 0, 300, ([0, 2, 3], [11, 12, 13])))
    assert {page for _, page, _ in saved(plan, "window-64")} == {2}
    assert {page for _, page, _ in saved(plan, "full")} == {11, 12}


def test_a_block_smaller_than_ucms_is_gathered_from_several() -> None:
    engine = Engine(spec_of(families.DEEPSEEK, align=16))
    asked = request(70)
    engine.half.matched_tokens(asked, 0)
    plan = engine.step((asked, 0, 70, ([5, 9, 2, 4, 1],)))
    assert saved(plan, "mla-576") == [(0, page, 16) for page in (5, 9, 2, 4)]


def test_after_a_resume_saves_come_from_the_new_blocks() -> None:
    """C-39: 192 tokens saved, 10 generated, preempted; resumed on new blocks with an external hit."""
    engine = Engine(engine_spec_32())
    asked = request(192)
    engine.half.matched_tokens(asked, 0)
    engine.run((asked, 0, 192, ([1, 2, 3, 4, 5, 6],)))
    asked.append_output_token_ids(list(range(10)))
    assert engine.half.matched_tokens(asked, 0) == (192, False)
    tables = (list(range(40, 49)),)
    engine.half.allocated(asked, tables, external_tokens=192)
    assert saved(engine.run((asked, 192, 10, tables))) == []
    asked.append_output_token_ids(list(range(58)))
    assert saved(engine.run((asked, 202, 58, tables))) == [(0, 46, 32), (0, 47, 32)]


def engine_spec_32() -> EngineSpec:
    table = families.canonical_table(families.DENSE.config, grain_tokens=32, kv_dtype="bfloat16")
    groups = [families.group([families.attention(n) for n in range(4)], families.full(32))]
    return engine_spec(table, groups, spec_kind=kind, engine_align_tokens=32)


# -- states


def state_saves(hybrid: Engine, offers: list[tuple[int, int, int]], tokens: int = 300) -> list[Any]:
    asked = request(tokens)
    hybrid.half.matched_tokens(asked, 0)
    plan = hybrid.step((asked, 0, tokens, ([0, 1], [0, 2], [0, 3], [4, 5, 6])), offers={"r": offers})
    return saved(plan, hybrid.half.state_rows[0])


def test_a_state_is_saved_from_the_offered_blocks(hybrid: Engine) -> None:
    offers = [(0, 7, 256), (1, 8, 256), (2, 9, 256)]
    assert state_saves(hybrid, offers) == [(0, 7, 1), (1, 8, 1), (2, 9, 1)]


@pytest.mark.parametrize(
    "offers",
    [
        [(0, 7, 256), (1, 8, 256)],
        [(0, 7, 256), (1, 8, 256), (2, 9, 128)],
        [(0, 7, 256), (1, 0, 256), (2, 9, 256)],
        [(group, 7 + group, 192) for group in range(3)],
        [(group, 7 + group, 250) for group in range(3)],
        [(group, 7 + group, 384) for group in range(3)],
    ],
    ids=[
        "a group is missing",
        "another position",
        "a null block",
        "not joint",
        "not on the grid",
        "not computed",
    ],
)
def test_a_state_that_nobody_could_resume_from_is_not_saved(
    hybrid: Engine, offers: list[tuple[int, int, int]]
) -> None:
    assert state_saves(hybrid, offers) == []


def test_a_stored_state_is_not_saved_again(hybrid: Engine) -> None:
    offers = [(group, 7 + group, 256) for group in range(3)]
    store_prompt(hybrid, 300, ([0, 1], [0, 2], [0, 3], [4, 5, 6]), offers={"writer": offers})
    assert state_saves(hybrid, offers) == []


# -- failures


def failed_load(engine: Engine, tables: tuple[list[int], ...]) -> Any:
    """A synchronous load of 256 tokens whose third UCM block (engine block 1) failed."""
    store_prompt(engine, 300, ([1, 2, 3],))
    asked = request(500)
    engine.half.matched_tokens(asked, 0)
    engine.half.allocated(asked, tables, external_tokens=256)
    plan = engine.step((asked, 256, 200, tables))
    keys = plan.loads[0].rows[0].keys[2:3]
    engine.keys.drop("full", keys)
    engine.tell(
        failed=(FailedLoad("r", "full", keys),),
        broken_pages=frozenset({tables[0][1]}),
        dropped=frozenset({"r"}),
        failures=1,
    )
    return asked


def test_after_a_failed_load_everything_is_saved_once_it_is_computed_again(dense: Engine) -> None:
    """C-37: nothing is saved before it is computed again, and the failed block is healed."""
    asked = failed_load(dense, tables := ([7, 8, 9, 10],))
    plan = dense.run((asked, 128, 256, tables))
    assert plan.failures_seen == 1
    assert saved(plan) == [(0, page, 64) for page in (8, 9, 9)]
    assert saved(dense.run((asked, 384, 116, tables))) == [(0, 10, 64)]
    assert dense.half.matched_tokens(request(500, "next"), 0) == (384, False)


def test_drafts_that_stay_are_not_taken_for_garbage_of_a_failed_load(dense: Engine) -> None:
    asked = failed_load(dense, ([7, 8, 9, 10],))
    for begin, count, stays in ((128, 372, 1), (500, 4, 4), (504, 4, 0)):
        assert not dense.run((asked, begin, count, ([7, 8, 9, 10],))).broken
        asked.append_output_token_ids([5] * stays)


def test_a_failed_key_is_not_promised_again_before_it_is_saved(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    dense.half.matched_tokens(asked, 0)
    dense.half.allocated(asked, ([7, 8, 9],), external_tokens=256)
    keys = dense.step().loads[0].rows[0].keys
    dense.tell(failed=(FailedLoad("r", "full", keys[2:3]),))
    assert dense.half.matched_tokens(request(300, "other"), 0) == (128, False)
    dense.tell(stored=(("full", keys[2:3]),))
    assert dense.half.matched_tokens(request(300, "third"), 0) == (256, False)


def test_who_borrowed_a_broken_block_is_not_saved(dense: Engine) -> None:
    failed_load(dense, ([7, 8, 9, 10],))
    borrower = request(400, "b")
    dense.half.matched_tokens(borrower, 256)
    assert dense.step((borrower, 256, 144, ([7, 8, 20, 21],))).saves == ()
    borrower.append_output_token_ids([5] * 60)
    assert dense.step((borrower, 400, 60, ([7, 8, 20, 21],))).saves == ()


def test_what_a_borrower_of_a_broken_block_wrote_is_not_saved_by_others_either(dense: Engine) -> None:
    """The owner heals slowly, so the borrower computes on garbage; a third request shares what it wrote."""
    owner = failed_load(dense, ([7, 8, 9, 10],))
    borrower, guest = request(400, "b"), request(600, "c")
    dense.half.matched_tokens(borrower, 256)
    dense.step((owner, 128, 64, ([7, 8, 9, 10],)), (borrower, 256, 144, ([7, 8, 20, 21],)))
    dense.step((owner, 192, 308, ([7, 8, 9, 10],)))
    dense.half.matched_tokens(guest, 384)
    assert dense.step((guest, 384, 216, ([7, 8, 20, 30, 31],))).saves == ()


def test_dropped_saves_are_planned_again(dense: Engine) -> None:
    asked = request(300)
    dense.half.matched_tokens(asked, 0)
    first = saved(dense.step((asked, 0, 200, ([7, 8, 9],))))
    dense.tell(dropped=frozenset({"r"}))
    assert saved(dense.step((asked, 200, 1, ([7, 8, 9],)))) == first


# -- the life of a request


def test_nothing_is_remembered_of_finished_requests(dense: Engine) -> None:
    for name in ("a", "b"):
        dense.half.matched_tokens(request(300, name), 0)
    dense.half.finished("a")
    dense.half.finished("a")
    assert dense.half.request_count == 1
    dense.half.finished("b")
    assert dense.half.request_count == 0


def test_an_id_that_is_used_anew_is_another_request(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    dense.half.matched_tokens(request(300, "r"), 0)
    assert dense.half.matched_tokens(request(300, "r", first=4), 0) == (0, False)


def test_another_salt_finds_nothing(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    asked = request(300)
    asked.cache_salt = "tenant-a"
    assert dense.half.matched_tokens(asked, 0) == (0, False)


def test_changed_weights_hide_what_was_stored_and_what_still_runs(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    running = request(300, "running")
    dense.half.matched_tokens(running, 0)
    before = dense.step((running, 0, 100, ([7, 8, 9],))).namespace
    assert dense.half.reset()
    plan = dense.step((running, 100, 200, ([7, 8, 9],)))
    assert (plan.saves, plan.generation, plan.private_token) == ((), 1, "secret")
    assert plan.namespace != before
    assert dense.half.matched_tokens(request(300, "new"), 0) == (0, False)


@pytest.mark.parametrize(("local_is_empty", "saves"), [(True, 3), (False, 0)])
def test_what_borrows_from_a_local_cache_of_old_weights_is_not_saved(
    dense: Engine, local_is_empty: bool, saves: int
) -> None:
    dense.half.reset(local_is_empty=local_is_empty)
    asked = request(200)
    dense.half.matched_tokens(asked, 128)
    assert len(saved(dense.step((asked, 128, 72, ([7, 8],))))) == saves
    own = request(200, "own")
    dense.half.matched_tokens(own, 0)
    assert len(saved(dense.step((own, 0, 200, ([9, 10],))))) == 3


def test_a_plan_can_be_pickled(hybrid: Engine) -> None:
    asked = request(300)
    hybrid.half.matched_tokens(asked, 0)
    plan = hybrid.step((asked, 0, 300, ([0, 1], [0, 2], [0, 3], [4, 5, 6])))
    again = pickle.loads(pickle.dumps(plan))
    assert (again.saves[0].rows[0].keys == plan.saves[0].rows[0].keys).all()


def test_a_request_that_is_not_known_is_left_alone(dense: Engine) -> None:
    assert dense.step((request(300, "stranger"), 0, 300, ([7, 8, 9],))).saves == ()
    dense.half.allocated(request(300, "stranger"), ([7, 8, 9],), external_tokens=0)
    assert dense.step().loads == ()


# -- the two halves meet


def test_equal_identities_meet(dense: Engine) -> None:
    dense.half.meet([Handshake(IDENTITY)])


def test_a_different_model_is_refused_with_both_digests_and_the_first_difference(dense: Engine) -> None:
    other = replace(IDENTITY, config='{"rope_theta": 5}')
    with pytest.raises(IdentityError, match="config") as error:
        dense.half.meet([Handshake(other)])
    assert IDENTITY.digest.hex() in str(error.value)
    assert other.digest.hex() in str(error.value)


def test_a_worker_that_does_not_know_its_weights_yet_is_not_asked(dense: Engine) -> None:
    store_prompt(dense, 300, ([1, 2, 3],))
    dense.half.meet([Handshake(replace(IDENTITY, weights=None))])
    assert dense.half.matched_tokens(request(300), 0) == (0, False)


def test_a_worker_that_cannot_identify_the_model_is_refused(dense: Engine) -> None:
    with pytest.raises(IdentityError, match="load_format is 'dummy'"):
        dense.half.meet([Handshake(None, "load_format is 'dummy'")])
