"""What cannot be saved layer by layer is refused at the start, with the reason."""

import pytest
from backend_world import DENSE, GRAIN, HYBRID, WINDOW, config_of, model_of
from start_doubles import StartDouble, UpdatesDouble

from ucm_core import Share, SpecTable
from ucm_core.errors import ConfigError
from ucm_core.spec.segments import Parallelism, Rank
from ucm_position_key import KeyView
from ucm_sglang.start import refuse_layerwise

ALONE = Share(Parallelism(), Rank())


def start(root, table=DENSE, *, share=ALONE, view=KeyView.PLAIN):
    return StartDouble(
        model_of(table),
        config_of(root),
        share,
        UpdatesDouble(),
        lambda *_: None,
        view=view,
        layerwise_save=True,
    )


@pytest.mark.parametrize("table", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_one_rank_with_a_row_that_keeps_the_prefix_may(tmp_path, table):
    refuse_layerwise(start(tmp_path, table), compiles=False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"share": Share(Parallelism(tensor=2), Rank(1))}, "the model runs on several ranks"),
        ({"share": Share(Parallelism(partition=(1, 2)), Rank(0, 1))}, "the model runs on several ranks"),
        ({"view": KeyView.BIGRAM}, "EAGLE's keys are pairs of tokens"),
        ({"table": SpecTable((WINDOW,), GRAIN)}, "no row keeps the whole prefix"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, changes, reason):
    with pytest.raises(ConfigError, match=f"layerwise_save is set, but {reason}: leave it out"):
        refuse_layerwise(start(tmp_path, **changes), compiles=False)


def test_a_compiled_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"compiled model calls no hooks \(--enable-torch-compile\): leave"):
        refuse_layerwise(start(tmp_path), compiles=True)
