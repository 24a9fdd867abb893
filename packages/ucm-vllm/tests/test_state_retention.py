"""What becomes of vLLM's offers: the triggers, the budget, and that nothing needed is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import families
from engine_doubles import Engine, request
from halves import kind

from ucm_core.coordinator.retention import Progress, RetentionPolicy
from ucm_vllm.metadata import FailedLoad
from ucm_vllm.spec_from_engine import EngineSpec, engine_spec
from ucm_vllm.state_retention import StateRetention

BLOCK = 128
SPARSE = RetentionPolicy(interval_tokens=512)
STEP = 128


@pytest.fixture
def spec() -> EngineSpec:
    return engine_spec(
        families.GRANITE.table, families.GRANITE.groups, spec_kind=kind, engine_align_tokens=BLOCK
    )


def row_of(spec: EngineSpec) -> Any:
    return spec.table.snapshot_rows[0]


def offers(*positions: int) -> list[tuple[int, int, int]]:
    """What vLLM offers when all three groups hold a state at these positions."""
    return [(group, 100 + group + 10 * at // BLOCK, at) for at in positions for group in range(3)]


def serve(engine: Engine, asked: Any, *, output: int = 0, chunk: int = BLOCK) -> list[int]:
    """Run a request as an engine that offers a state at each block boundary; returns what is saved."""
    half = engine.half
    served, _ = half.matched_tokens(asked, 0)
    prompt, saved = asked.num_prompt_tokens, []
    asked.append_output_token_ids([7] * output)
    tables = tuple([9] * (prompt // BLOCK + 2 + output // BLOCK) for _ in range(4))
    if served:
        half.allocated(asked, tables, external_tokens=served)
        engine.step()
        half.allocated(asked, tables, external_tokens=0)
    for begin in range(served, prompt + output, chunk):
        end = min(begin + chunk, prompt + output)
        offered = offers(end) if end % BLOCK == 0 else []
        plan = engine.run((asked, begin, end - begin, tables), offers={asked.request_id: offered})
        rows = [transfer for save in plan.saves for transfer in save.rows]
        saved += [end for transfer in rows if transfer.row == half.state_rows[0]]
    half.finished(asked.request_id)
    return saved


def shared(common: int, total: int, name: str) -> Any:
    """A prompt of which the first ``common`` tokens are everybody's."""
    made = request(common, name)
    return type(made)(
        name,
        [*made.prompt_token_ids, *([100 + len(name)] * (total - common))],
        made.sampling_params,
        None,
    )


def test_by_default_all_that_is_offered_is_kept(spec: EngineSpec) -> None:
    assert serve(Engine(spec), request(600)) == [128, 256, 384, 512]


def test_with_an_interval_what_a_trigger_asks_for(spec: EngineSpec) -> None:
    """Interval 512; 1152 for the same prompt again; past the prompt the answer may end anywhere."""
    assert serve(Engine(spec, SPARSE), request(1200), output=200) == [512, 1024, 1152, 1280]


@pytest.mark.parametrize("prompt", [300, 384, 385, 900])
@pytest.mark.parametrize("output", [0, 100, 300])
def test_the_same_prompt_and_the_next_turn_find_a_state(spec: EngineSpec, prompt: int, output: int) -> None:
    """C-23, with everything that is not needed for it dropped."""
    engine = Engine(spec, RetentionPolicy(second_sight=False, interval_tokens=0))
    serve(engine, request(prompt, "first"), output=output)
    again = engine.half.matched_tokens(request(prompt, "again"), 0)[0]
    longer = request(prompt, "longer")
    longer.append_output_token_ids([7] * output + [5])
    assert again == (prompt - 1) // STEP * STEP
    assert engine.half.matched_tokens(longer, 0)[0] == (prompt + output) // STEP * STEP


def test_a_second_sight_is_kept_at_the_common_boundary(spec: EngineSpec) -> None:
    engine = Engine(spec, RetentionPolicy(interval_tokens=0))
    assert serve(engine, shared(700, 1100, "a")) == [1024]
    assert serve(engine, shared(700, 1100, "bb")) == [640, 1024]
    assert engine.half.matched_tokens(shared(700, 1100, "ccc"), 0)[0] == 640


def test_asking_for_one_request_again_is_no_second_sight(spec: EngineSpec) -> None:
    engine = Engine(spec, RetentionPolicy(interval_tokens=0))
    asked = shared(700, 1100, "a")
    for _ in range(3):
        engine.half.matched_tokens(asked, 0)
    assert serve(engine, asked) == [1024]


def test_what_vllm_holds_itself_was_served(spec: EngineSpec) -> None:
    engine = Engine(spec, RetentionPolicy(interval_tokens=0))
    engine.half.matched_tokens(shared(700, 1100, "a"), 640)
    assert serve(engine, shared(700, 1100, "bb")) == [1024]


# -- budgets


def budget(spec: EngineSpec, states: int) -> RetentionPolicy:
    return RetentionPolicy(budget_bytes=states * row_of(spec).block_bytes)


def test_over_the_budget_the_least_valuable_is_dropped(spec: EngineSpec) -> None:
    engine = Engine(spec, budget(spec, 2))
    assert serve(engine, request(600)) == [128, 256, 384, 512]
    assert len(engine.keys.present[engine.half.state_rows[0]]) == 2
    assert engine.half.matched_tokens(request(600, "again"), 0)[0] == 512
    assert engine.half.matched_tokens(request(300, "short"), 0)[0] == 0


def test_what_is_used_again_stays(spec: EngineSpec) -> None:
    engine = Engine(spec, budget(spec, 1))
    serve(engine, request(200, "first"))
    for turn in range(3):
        serve(engine, request(200, f"turn {turn}"))
    assert serve(engine, shared(0, 200, "other")) == []
    assert engine.half.matched_tokens(request(200, "last"), 0)[0] == 128


def test_a_state_that_is_being_loaded_is_not_dropped_for_want_of_room(spec: EngineSpec) -> None:
    engine = Engine(spec, budget(spec, 1))
    serve(engine, request(200, "first"))
    for turn in range(3):
        serve(engine, request(200, f"turn {turn}"))
    neighbour = Engine(spec)  # another process keeps a state in the same store
    neighbour.cache.current = engine.keys
    assert serve(neighbour, shared(0, 200, "other")) == [128]
    for _ in range(2):
        assert engine.half.matched_tokens(shared(0, 200, "other"), 0)[0] == 128
        serve(engine, shared(0, 200, "other"))


def test_a_failed_state_gives_its_room_back(spec: EngineSpec) -> None:
    engine = Engine(spec, budget(spec, 1))
    for turn in range(4):
        serve(engine, request(200, f"turn {turn}"))
    row = engine.half.state_rows[0]
    (name,) = engine.keys.present[row]
    key = np.frombuffer(name, dtype=np.uint8).reshape(1, 32)
    engine.keys.drop(row, key)
    engine.tell(failed=(FailedLoad("nobody", row, key),))
    assert serve(engine, shared(0, 200, "other")) == [128]


def test_statistics_and_integrity(spec: EngineSpec) -> None:
    row = row_of(spec)
    policy = RetentionPolicy(interval_tokens=512, budget_bytes=3 * row.block_bytes)
    retention = StateRetention(spec, {row.name: policy})
    by_position = {512: {0: 7, 1: 8, 2: 9}, 640: {0: 7, 1: 8, 2: 9}}
    assert retention.kept(row, by_position, progress=Progress(900, 640)) == (512,)
    retention.check_integrity()
    counts = retention.statistics()
    assert (counts.sightings.prompts, counts.budgets[row.name].capacity) == (0, 3)
