"""Which part of the model a rank has, by SGLang's configuration."""

from types import SimpleNamespace

import pytest
from backend_world import DENSE, HYBRID

from ucm_core import ConfigError, Parallelism, Part, Rank, RankRule, RowKind, SpecRow, SpecTable
from ucm_sglang.ranks_from_engine import partition_of, share_of

LATENT = SpecRow(
    "mla", RowKind.CHAIN, 16, (0,), (Part("latent", (32,), "float32"),), rank_rule=RankRule.ALL_UNION
)
STATE = SpecRow("state", RowKind.SNAPSHOT, 16, (1,), (Part("ssm", (4, 4), "float32"),))


def config(**fields):
    return SimpleNamespace(**({"tp_rank": 0, "tp_size": 1, "is_mla_model": False} | fields))


def test_alone_it_has_everything():
    share = share_of(config(), DENSE)
    assert (share.parallel, share.rank) == (Parallelism(), Rank())
    assert partition_of(config(), DENSE) is None


def test_tensor_ranks_have_their_heads():
    share = share_of(config(tp_rank=1, tp_size=2), DENSE)
    (held,) = share.slices(DENSE.row("full"))
    assert held.segment.heads == (1, 2)


def test_what_is_equal_on_all_ranks_is_one_segment_and_states_are_not():
    table = SpecTable((LATENT, STATE), 16)
    shares = [share_of(config(tp_rank=rank, tp_size=2, is_mla_model=True), table) for rank in (0, 1)]
    assert len({share.slices(LATENT)[0].segment for share in shares}) == 1
    assert len({share.slices(STATE)[0].segment for share in shares}) == 2


def test_stages_have_their_layers():
    share = share_of(config(pp_rank=1, pp_size=2), HYBRID, partition=(3, 2))
    assert share.rank == Rank(0, 1)
    assert share.slices(HYBRID.row("full")) == ()  # of layers 0 and 2
    assert share.slices(HYBRID.row("state"))[0].row.units == (4,)


def test_one_rank_may_not_write_for_others_that_hold_other_bytes():
    with pytest.raises(ConfigError, match="one of 2 tensor ranks write for all of them, but rows full"):
        share_of(config(tp_size=2, is_mla_model=True), DENSE)


@pytest.mark.parametrize("name", ["attn_cp_size", "dcp_size"])
def test_context_parallel_ranks_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} = 2"):
        share_of(config(**{name: 2}), DENSE)


def test_the_partition_must_be_that_of_the_stages():
    with pytest.raises(ConfigError, match="2 pipeline stages"):
        share_of(config(pp_size=2), DENSE)


def test_replicas_share():
    assert share_of(config(dp_rank=3), DENSE) == share_of(config(), DENSE)
