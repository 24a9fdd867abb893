"""Pools hold rows: what fits is mapped, what does not is refused by name, and keys give digests back."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import POOLS, formula, key_of, model_of, pools_of, table_of

from ucm_core.errors import IdentityError, SpecError
from ucm_core.spec.keys import PrefixChain, object_keys
from ucm_core.spec.table import SpecTable
from ucm_core.store.stack import key_seeds
from ucm_position_key import Component, KeyView, ObjectKey, Pool, PoolTable, UnitKey

DIGESTS = formula(list(range(40)), 4)
KV, SWA, MAMBA, INDEXER = POOLS


@pytest.mark.parametrize("row", ["full", "window", "state", "keys"])
def test_keys_are_those_of_the_definition_and_give_the_digests_back(row):
    pools = pools_of(4)
    keys = pools.keys(row, DIGESTS)
    assert [key.tobytes() for key in keys] == [key_of(pools, row, digest) for digest in DIGESTS]
    assert np.array_equal(pools.digests(row, keys), DIGESTS)
    assert np.array_equal(pools.digests(row, keys[:, :16]), DIGESTS[:, :16])


@given(st.integers(0, 2**31), st.integers(0, 40), st.sampled_from(["full", "window", "state", "keys"]))
def test_keys_are_those_of_the_cores_own_chain(generation, tokens, row):
    model = model_of(table := table_of(4)).with_generation(generation)
    pools = PoolTable(table, POOLS, model=model)
    chain = PrefixChain(grain_tokens=4)
    chain.extend(range(tokens))
    seed = key_seeds(table, model.digest)[row]
    assert np.array_equal(pools.keys(row, chain.digests), chain.keys(seed))
    assert np.array_equal(pools.keys(row, chain.digests), object_keys(seed, chain.digests))


def test_a_side_car_has_the_block_ids_of_its_source_and_others_have_their_own():
    pools = pools_of(4)
    names = {row: pools.keys(row, DIGESTS).tobytes() for row in ("full", "keys", "window", "state")}
    assert names["keys"] == names["full"]
    assert len({*names.values()}) == 3


def test_two_namespaces_share_no_key():
    model = model_of(table := table_of(4))
    one, other = (PoolTable(table, POOLS, model=model.with_generation(n)) for n in (0, 1))
    assert not {*map(bytes, one.keys("full", DIGESTS))} & {*map(bytes, other.keys("full", DIGESTS))}


def test_presence_of_a_side_car_is_that_of_its_source():
    pools = pools_of(4)
    assert [pools.pool_of(row) for row in ("full", "window", "state", "keys")] == [KV, SWA, MAMBA, KV]


def test_a_full_pool_may_hold_window_rows_too():
    pools = [replace(KV, rows=("full", "window")), MAMBA, INDEXER]
    table = table_of(4)
    assert PoolTable(table, pools, model=model_of(table)).pool_of("window").name == "kv"


def test_a_side_car_may_ride_on_the_window_pool():
    rows = [replace(row, follows="window") if row.name == "keys" else row for row in table_of(4).rows]
    table = SpecTable(tuple(rows), 4)
    pools = PoolTable(table, [KV, SWA, MAMBA, replace(INDEXER, source="swa")], model=model_of(table))
    assert pools.pool_of("keys") == SWA
    assert np.array_equal(pools.keys("keys", DIGESTS), pools.keys("window", DIGESTS))


@pytest.mark.parametrize("ask", [lambda p: p.pool_of("cross"), lambda p: p.keys("cross", DIGESTS)])
def test_a_row_that_is_never_cached_has_no_keys(ask):
    with pytest.raises(SpecError, match="row 'cross' is never cached"):
        ask(pools_of(4))


def test_a_page_of_pairs_never_has_the_key_of_a_plain_page_of_the_same_ids():
    pairs, plain = pools_of(4, view=KeyView.BIGRAM), pools_of(8)
    paths = pairs.path(), plain.path()
    paths[0].extend([1] * 9)
    paths[1].extend([1] * 16)
    assert np.array_equal(paths[0].digests, paths[1].digests)
    keys = [
        pools.keys("full", path.digests).tobytes() for pools, path in zip((pairs, plain), paths, strict=True)
    ]
    assert keys[0] != keys[1]
    assert pools_of(4).identity.namespace != pairs.identity.namespace


WRONG_MODELS = {
    "weights are unknown": {"weights": None},
    "the identity's table is 5a5a.*, the table's ": {"table": "5a" * 32},
    "the identity's grain_tokens is 8, the table's 4": {"grain_tokens": 8},
}


@pytest.mark.parametrize("message", WRONG_MODELS)
def test_the_identity_of_another_model_is_refused(message):
    table = table_of(4)
    with pytest.raises(IdentityError, match=message):
        PoolTable(table, POOLS, model=replace(model_of(table), **WRONG_MODELS[message]))


def test_units_are_named_by_the_rows_own_layers():
    key = ObjectKey("full", b"k" * 32)
    assert key.name == b"k" * 16
    assert pools_of(4).units(key, "h0-2", layers=[3, 0]) == (UnitKey(key, "h0-2", 1), UnitKey(key, "h0-2", 0))
    with pytest.raises(SpecError, match="row 'full' has no layer 1; it has"):
        pools_of(4).units(key, "h0-2", layers=[0, 1])


BAD_POOLS = {
    "no pool holds row 'window'": [KV, MAMBA, INDEXER],
    "no pool holds row 'full'; the pools hold no row": [],
    "the pools hold the row 'window' twice": [replace(KV, rows=("full", "window")), SWA, MAMBA, INDEXER],
    "the engine has the pool 'kv' twice": [*POOLS, KV],
    "no row 'fool' in the table": [replace(KV, rows=("fool",)), SWA, MAMBA, INDEXER],
    "pool 'kv' holds no row": [replace(KV, rows=()), SWA, MAMBA, INDEXER],
    "pool 'kv' is mamba and cannot hold the chain row 'full'": [replace(KV, component=Component.MAMBA)],
    "pool 'kv' is full and cannot hold the snapshot row 'state'": [replace(KV, rows=("state",))],
    "pool 'kv' is full and cannot hold the none row 'cross'": [replace(KV, rows=("cross",))],
    "pool 'swa' is swa and row 'full' has no window": [replace(SWA, rows=("full",))],
    "pool 'draft_kv' is a draft model's": [*POOLS, Pool("draft_kv", Component.FULL, ("full",))],
    "pool 'kv' is full with source='swa'": [replace(KV, source="swa"), SWA, MAMBA, INDEXER],
    "pool 'indexer' is side-car with source=None": [KV, SWA, MAMBA, replace(INDEXER, source=None)],
    "no pool 'kw' here; the pools are kv, swa": [KV, SWA, MAMBA, replace(INDEXER, source="kw")],
    "row 'keys' follows 'full'": [KV, SWA, MAMBA, replace(INDEXER, source="swa")],
}


@pytest.mark.parametrize("message", BAD_POOLS)
def test_pools_that_do_not_fit_the_table_are_refused_by_name(message):
    with pytest.raises(SpecError, match=message):
        PoolTable(table := table_of(4), BAD_POOLS[message], model=model_of(table))


@pytest.mark.parametrize("values", [DIGESTS[0], DIGESTS[:, :8], DIGESTS.astype(np.int64)])
def test_what_is_no_key_is_refused(values):
    with pytest.raises(SpecError, match=r"names uint8\[n, 16\]; got"):
        pools_of(4).digests("full", values)


def test_a_page_size_other_than_the_grain_is_refused_with_both_numbers_and_the_flag():
    pools_of(64).check_page(64)
    with pytest.raises(SpecError, match=r"page size 16 against a grain of 64 .*--page-size 64"):
        pools_of(64).check_page(16)
    with pytest.raises(SpecError, match=r"page size 64 against a grain of 64 and blocks of 64, 128"):
        pools_of(64, blocks=2).check_page(64)
