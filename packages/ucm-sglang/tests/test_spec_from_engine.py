"""Which rows of a table SGLang's pools hold, and what is refused before any memory is looked at."""

from __future__ import annotations

from typing import Any

import pytest
from pool_doubles import TokenShape, attention_pool, state_pool

from ucm_core.errors import SpecError
from ucm_core.spec.rows import Part, RowKind, SpecRow
from ucm_core.spec.segments import Parallelism, Rank, Share
from ucm_core.spec.table import SpecTable
from ucm_position_key import Component, Pool
from ucm_sglang.spec_from_engine import map_pools

KV = (Part("k", (2, 8), "float32"), Part("v", (2, 8), "float32"))
FULL = SpecRow("full", RowKind.CHAIN, 4, (1, 3), KV)
WINDOW = SpecRow("window-8", RowKind.CHAIN, 4, (0, 2, 4), KV, window=8)
STATE = SpecRow("mamba2", RowKind.SNAPSHOT, 4, (0, 2, 4), (Part("conv", (3, 10), "bfloat16"),))
CROSS = SpecRow("cross", RowKind.NONE, 0, (5,), ())


def pool(layers: int, **more: Any) -> Any:
    return attention_pool(TokenShape(layers=layers), "page_first", **more)


def states(layers: int = 3, **more: Any) -> Any:
    return state_pool((10, 3), (2, 4, 5), layers=layers, **more)


def mapped(pools: dict[str, Any], *rows: SpecRow, share: Share | None = None) -> Any:
    return map_pools(pools, SpecTable(rows, 4), share=share or Share(rank=Rank()))


def test_windows_and_states_have_pools_of_their_own() -> None:
    held = mapped({"kv": pool(2), "swa": pool(3)}, WINDOW, FULL, CROSS)
    assert [one.pool for one in held] == [
        Pool("kv", Component.FULL, ("full",)), Pool("swa", Component.SWA, ("window-8",)),
    ]  # fmt: skip
    held = mapped({"kv": pool(2), "mamba": states()}, STATE, FULL)
    assert [(one.pool.component, one.layers) for one in held] == [
        (Component.FULL, (1, 3)), (Component.MAMBA, (0, 2, 4)),
    ]  # fmt: skip


def test_without_a_pool_for_windows_they_lie_in_the_full_one_in_the_models_order() -> None:
    (held,) = mapped({"kv": pool(5)}, FULL, WINDOW)
    assert held.pool == Pool("kv", Component.FULL, ("full", "window-8"))
    assert held.layers == (0, 1, 2, 3, 4)


def test_a_stage_without_a_layer_of_a_row_still_names_it() -> None:
    share = Share(Parallelism(1, (1, 4)), Rank(0, 0))
    (held,) = mapped({"kv": pool(1)}, FULL, WINDOW, share=share)
    assert held.pool.rows == ("full", "window-8")
    assert [row.units for row in held.rows] == [(0,)]


@pytest.mark.parametrize(
    ("pools", "rows", "message"),
    [
        ({"indexer": pool(2)}, [FULL], "pool 'indexer' is not known; ucm-sglang knows kv, swa, mamba"),
        ({"kv": pool(2), "draft": pool(1)}, [FULL], "pool 'draft' is a draft model's"),
        ({"kv": pool(2), "draft_swa": pool(1)}, [FULL], "pool 'draft_swa' is a draft model's"),
        ({"kv": pool(2)}, [FULL, STATE], "row 'mamba2' is in no pool: it belongs into 'mamba', SGL.* kv$"),
        ({"swa": pool(3)}, [FULL, WINDOW], "row 'full' is in no pool: it belongs into 'kv'"),
        ({}, [FULL], "SGLang registered none"),
        ({"kv": pool(2), "swa": pool(3)}, [FULL], "pool 'swa' is registered, but no row"),
        ({"kv": pool(2), "mamba": states()}, [FULL], "pool 'mamba' is registered, but no row"),
        ({"kv": pool(3)}, [FULL], "pool 'kv' has 3 layers, the rows full have 2 of .* rank: .1, 3.$"),
        ({"kv": pool(2), "mamba": states(4)}, [FULL, STATE], "'mamba' has 4 layers, the rows mamba2 have 3"),
        ({"kv": pool(2)}, [FULL], "pool 'kv' begins at layer 0, the table at layer .1,.; is"),
        ({"kv": pool(2, start_layer=1, page_size=16)}, [FULL],
         "pages of 16 tokens, its row 'full' blocks of 4; .* --page-size 4, or set"),
        ({"kv": pool(2, target_layer_num=1)}, [FULL], r"has draft layers packed behind the model's \(1\)"),
        ({"kv": pool(2), "mamba": states(mtp_draft_buffer_infos=(1,))}, [FULL, STATE], "has draft layers"),
        ({"kv": pool(2), "mamba": states(slot_state_buffers=[1, 2])}, [FULL, STATE], r"side states .* \(2\)"),
        ({"kv": pool(2, _layer_shard_enabled=True)}, [FULL], "has layers dealt out to other ranks"),
        ({"kv": pool(2, dcp_size=2)}, [FULL], "has tokens dealt out to context ranks"),
        ({"kv": pool(2)}, [FULL, SpecRow("index", RowKind.FOLLOWER, 4, (1,), KV, follows="full")],
         "row 'index' follows 'full': side-car pools are not supported"),
        ({"kv": pool(2), "swa": pool(2)}, [FULL, SpecRow("window-4", RowKind.CHAIN, 4, (0,), KV, window=4),
                                           SpecRow("window-8", RowKind.CHAIN, 4, (2,), KV, window=8)],
         "keeps one window, its rows window-4, window-8 have windows of 4 and 8 tokens"),
        ({"kv": pool(2)}, [FULL, SpecRow("again", RowKind.CHAIN, 4, (3,), KV)], "'kv' has layer 3 twice"),
    ],
)  # fmt: skip
def test_pools_that_do_not_cover_the_table_are_refused(
    pools: dict[str, Any], rows: list[SpecRow], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        mapped(pools, *rows)


def test_pools_are_one_ranks() -> None:
    with pytest.raises(SpecError, match="one rank's: share must say which"):
        mapped({"kv": pool(2)}, FULL, share=Share())
