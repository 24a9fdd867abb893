"""Several workers: how vLLM's settings cut the table, and what each worker takes out of a plan."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import families
from engine_doubles import IDENTITY, Engine, request
from halves import kind

from ucm_core.errors import ConfigError
from ucm_core.spec.segments import Parallelism, Rank
from ucm_core.spec.table import Part, RankRule, RowKind, SpecRow, SpecTable
from ucm_vllm.metadata import Handshake, LoadPlan, RowTransfer, SavePlan, StepPlan
from ucm_vllm.ranks_from_engine import RankPart, RankView, parallelism_of, rank_view
from ucm_vllm.spec_from_engine import engine_spec

HEADS = (Part("k", (2, 4), "bfloat16"), Part("v", (2, 4), "bfloat16"))
FULL = SpecRow("full", RowKind.CHAIN, 64, (0, 2), HEADS)
LATENT = SpecRow(
    "latent", RowKind.CHAIN, 64, (1, 3), (Part("c", (8,), "bfloat16"),), rank_rule=RankRule.ALL_UNION
)
WINDOW = SpecRow("window-8", RowKind.CHAIN, 64, (1,), HEADS, window=8)
TABLE = SpecTable((FULL, LATENT, WINDOW), 64)


def engine(rank: int = 0, layers: int = 4, **sizes: int) -> Any:
    """A double of VllmConfig: the fields that are read, with vLLM's defaults."""
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    one |= {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**one | sizes, rank=rank),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers),
    )


def halves(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """A double of vLLM's ``get_pp_indices``; the first stage has one layer more."""
    ends = [0, *(layers * (each + 1) // stages + (each + 1 < stages) for each in range(stages))]
    return list(pairwise(ends))[stage]


def view(table: SpecTable = TABLE, rank: int | None = None, **sizes: int) -> RankView:
    return rank_view(table, engine(rank or 0, **sizes), stage_layers=halves, is_worker=rank is not None)


def test_one_worker_holds_the_table_as_it_is() -> None:
    alone = view(rank=0)
    assert (alone.table, alone.workers, alone.worker) == (TABLE, 1, 0)
    assert alone.share.rank == Rank()


def test_stages_are_the_ranges_that_vllm_says() -> None:
    cut = parallelism_of(engine(tensor_parallel_size=2, pipeline_parallel_size=2), stage_layers=halves)
    assert cut == Parallelism(2, (3, 1))


@pytest.mark.parametrize(
    ("rank", "expected", "rows"),
    [
        (0, Rank(0, 0), {"full": (0, 2), "latent": (1,), "window-8": (1,)}),
        (1, Rank(1, 0), {"full": (0, 2), "latent": (1,), "window-8": (1,)}),
        (2, Rank(0, 1), {"latent": (3,)}),
        (3, Rank(1, 1), {"latent": (3,)}),
    ],
)
def test_a_worker_holds_the_layers_of_its_stage_and_its_heads(
    rank: int, expected: Rank, rows: dict[str, tuple[int, ...]]
) -> None:
    mine = view(rank=rank, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert mine.share.rank == expected
    assert {row.name: row.units for row in mine.table.rows} == rows
    assert {row.parts[0].shape for row in mine.table.rows if row.name != "latent"} <= {(1, 4)}
    assert (mine.worker, mine.workers) == (rank, 4)


def test_the_schedulers_half_asks_for_all_segments() -> None:
    scheduler = view(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert scheduler.share.rank is None
    assert scheduler.table == view(rank=0, tensor_parallel_size=2, pipeline_parallel_size=2).table


def test_a_row_that_the_first_stage_has_no_layer_of_is_refused() -> None:
    table = SpecTable((FULL, SpecRow("late", RowKind.CHAIN, 64, (3,), HEADS, window=8)), 64)
    with pytest.raises(ConfigError, match="pipeline stage 0 has no layer of the rows late"):
        view(table, rank=3, tensor_parallel_size=2, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    "setting", ["data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_what_was_never_run_is_refused_by_name(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = 2: ucm-vllm supports 1"):
        parallelism_of(engine(**{setting: 2}), stage_layers=halves)


def transfer(row: str, count: int = 6) -> RowTransfer:
    keys = np.zeros((count, 32), dtype=np.uint8)
    keys[:, 8] = np.arange(count)  # the id by which writers take turns
    pieces = np.array([[index, 0, 10 + index, 0, 64] for index in range(count)], dtype=np.int64)
    return RowTransfer(row, keys, ((0, pieces),), parents=keys + 100)


def plan(failed: int = 0) -> StepPlan:
    rows = (transfer("full"), transfer("latent"), transfer("window-8"))
    load = LoadPlan("r", rows, asynchronous=True)
    return StepPlan("n", loads=(load,), saves=(SavePlan("r", rows, failed=failed),))


def pages(part: StepPlan) -> dict[str, list[int]]:
    return {each.row: each.pieces[0][1][:, 2].tolist() for each in part.saves[0].rows}


def test_of_equal_holders_one_writes_and_the_next_after_a_failure() -> None:
    workers = [RankPart(view(rank=rank, tensor_parallel_size=2)) for rank in range(2)]
    for failed in range(3):
        turns = [pages(worker.of(plan(failed)))["latent"] for worker in workers]
        assert turns[failed % 2] == [10, 12, 14]
        assert turns[1 - failed % 2] == [11, 13, 15]


def test_what_is_not_written_is_taken_out_with_its_keys_and_parents() -> None:
    part = RankPart(view(rank=1, tensor_parallel_size=2)).of(plan()).saves[0].rows[1]
    assert part.keys[:, 8].tolist() == [1, 3, 5]
    assert part.parents is not None
    assert part.parents[:, 8].tolist() == [101, 103, 105]
    assert part.pieces[0][1][:, 0].tolist() == [0, 1, 2]


def test_every_holder_writes_its_own_slice_and_loads_all_that_it_holds() -> None:
    part = RankPart(view(rank=1, tensor_parallel_size=2)).of(plan())
    assert len(pages(part)["full"]) == len(pages(part)["window-8"]) == 6
    assert [len(each.keys) for each in part.loads[0].rows] == [6, 6, 6]


def test_rows_of_other_stages_are_left_out() -> None:
    part = RankPart(view(rank=1, pipeline_parallel_size=2)).of(plan())
    assert [each.row for each in part.loads[0].rows] == ["latent"]
    assert [each.row for each in part.saves[0].rows] == ["latent"]


def test_the_part_of_a_plan_is_made_once_and_one_worker_takes_all() -> None:
    part, given = RankPart(view(rank=0, tensor_parallel_size=2)), plan()
    assert part.of(given) is part.of(given) is not given
    assert RankPart(view(rank=0)).of(given) is given


@pytest.fixture
def dense() -> Engine:
    """A scheduler half of the tiny dense model, whose one row lies in group 0."""
    table, groups = families.DENSE.table, families.DENSE.groups
    return Engine(engine_spec(table, groups, spec_kind=kind, engine_align_tokens=128))


def test_workers_that_hold_a_row_in_other_groups_are_refused(dense: Engine) -> None:
    dense.half.meet([Handshake(IDENTITY, groups={"full": (0,)}), Handshake(IDENTITY, groups={})], workers=2)
    with pytest.raises(ConfigError, match=r"row 'full' lies in vLLM's groups \(0,\) on the first worker and"):
        dense.half.meet([Handshake(IDENTITY, groups={"full": (0, 1)})])


def test_a_worker_that_dropped_saves_leaves_them_to_the_next_holder(dense: Engine) -> None:
    asked, tables = request(300), ([1, 2, 3],)
    dense.half.matched_tokens(asked, 0)
    dense.half.allocated(asked, tables, external_tokens=0)
    (first,) = dense.step((asked, 0, 300, tables)).saves
    dense.tell(dropped=frozenset({"r"}))
    (again,) = dense.step((asked, 299, 1, tables)).saves
    assert (first.failed, again.failed) == (0, 1)
    assert (first.rows[0].keys == again.rows[0].keys).all()
