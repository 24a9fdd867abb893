"""X-Hybrid-96: the table of the design and the worked examples 7 and 8, number for number."""

import pytest

from ucm_core.spec.presets.stress import X_HYBRID_LAYERS, X_HYBRID_PERIOD, x_hybrid_96
from ucm_core.spec.table import RankRule, RowKind
from ucm_core.spec.units import UnitMap, stage_ranges, stage_units

TABLE = x_hybrid_96()

# name: (kind, block or grid, units, rank rule, follows)
ROWS = {
    "mla": (RowKind.CHAIN, 128, 16, RankRule.ALL_UNION, None),
    "csa_c16": (RowKind.CHAIN, 128, 16, RankRule.ALL_UNION, None),
    "swa": (RowKind.CHAIN, 128, 24, RankRule.INTERSECTION, None),
    "indexer": (RowKind.FOLLOWER, 128, 4, RankRule.ALL_UNION, "mla"),
    "scale": (RowKind.FOLLOWER, 128, 16, RankRule.ALL_UNION, "csa_c16"),
    "mamba2": (RowKind.SNAPSHOT, 64, 20, RankRule.INTERSECTION, None),
    "kda_perslot": (RowKind.SNAPSHOT, 64, 8, RankRule.INTERSECTION, None),
    "cross": (RowKind.NONE, 0, 8, RankRule.INTERSECTION, None),
}


def test_the_table_has_the_eight_rows_of_the_design():
    made = {
        row.name: (row.kind, row.block_tokens, len(row.units), row.rank_rule, row.follows)
        for row in TABLE.rows
    }
    assert made == ROWS
    assert TABLE.alignment_tokens == 128


def test_every_layer_is_claimed_once_besides_the_scales_of_the_compressed_ones():
    claimed = [layer for row in TABLE.rows if row.name != "scale" for layer in row.units]
    assert len(claimed) == 16 + 16 + 24 + 20 + 8 + 8 + 4 == X_HYBRID_LAYERS
    assert sorted(claimed) == list(range(X_HYBRID_LAYERS))
    assert TABLE.row("scale").units == TABLE.row("csa_c16").units


def test_layers_come_in_four_periods_of_24():
    assert sum(count for _, count in X_HYBRID_PERIOD) == 24
    assert TABLE.row("mla").units[:8] == (0, 1, 2, 3, 24, 25, 26, 27)
    assert TABLE.row("indexer").units == (23, 47, 71, 95)


def test_the_interval_and_the_window_are_knobs():
    assert TABLE.row("kda_perslot").interval == 256
    assert x_hybrid_96(kda_interval=1024).row("kda_perslot").interval == 1024
    assert x_hybrid_96(kda_interval=1024).digest == TABLE.digest
    assert x_hybrid_96(window=5000).row("swa").window == 5000
    assert x_hybrid_96(window=5000).digest != TABLE.digest


def test_example_8_geometry_of_the_latent_row():
    mla = TABLE.row("mla")
    stages = stage_units(mla.units, [48, 48])
    assert [stage.unit_count for stage in stages] == [8, 8]
    assert mla.unit_bytes == 65_536
    assert stages[0].unit_count * mla.unit_bytes == 524_288
    assert 4_096 + 8 * 65_536 == 528_384
    assert mla.block_bytes * 1_000_000 // mla.block_tokens == 8_192_000_000


@pytest.mark.parametrize(
    ("name", "unit_bytes"), [("csa_c16", 8 * 512), ("scale", 8 * 4 * 4), ("swa", 128 * 2 * 8 * 128 * 2)]
)
def test_bytes_per_unit_are_exact(name, unit_bytes):
    assert TABLE.row(name).unit_bytes == unit_bytes


def test_example_7_stages_are_the_real_partition():
    assert stage_ranges([48, 48]) == ((0, 48), (48, 96))
    assert [stage.first_unit for stage in stage_units(range(96), [50, 46])] == [0, 50]


def test_example_7_a_layer_without_a_unit_waits_for_the_one_it_follows():
    units = UnitMap(TABLE, follows={96: 20, 97: 20})
    assert units.units_of(96) == ()
    assert units.await_before(96) == units.units_of(20) != ()


def test_the_table_reads_back_from_plain_data():
    assert type(TABLE).from_mapping(TABLE.to_mapping()) == TABLE
