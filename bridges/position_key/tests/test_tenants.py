"""C-02 through the bridge: a salt that is honoured in the tree is honoured on every way out of it."""

import pytest
from worlds import as_keys, pools_of

from ucm_core.spec.keys import PrefixChain, RequestIdentity, row_seed
from ucm_position_key import NodeIndex, PositionPath, SaveLedger

TENANTS = ["t1", "t2", None]
TOKENS = list(range(128))  # 4 blocks of 32


def path_of(tenant):
    path = PositionPath(RequestIdentity(cache_salt=tenant), grain_tokens=32)
    path.extend(TOKENS)
    return path


@pytest.fixture
def index():
    return NodeIndex(pools_of(32))


def units_of(index, tenant):
    return [
        unit for item in index.objects(tenant, "full") for unit in index.pools.units(item, "s", layers=[0, 3])
    ]


@pytest.mark.parametrize("acting", TENANTS)
@pytest.mark.parametrize("storing", TENANTS)
def test_a_tenant_sees_its_own_blocks_only(index, storing, acting):
    index.insert(("tree", storing), path_of(storing).digests, end=128)
    seen = index.locate("full", index.pools.keys("full", path_of(acting).digests))
    assert sum(map(bool, seen)) == (4 if storing == acting else 0)


@pytest.mark.parametrize("tenant", TENANTS)
def test_the_bridge_and_the_core_name_the_same_objects(index, tenant):
    index.insert(tenant or "none", path_of(tenant).digests, end=128)
    chain = PrefixChain(RequestIdentity(cache_salt=tenant), grain_tokens=32)
    chain.extend(TOKENS)
    found = as_keys(index.objects(tenant or "none", "full"))
    assert found.tolist() == chain.keys(row_seed(index.pools.identity.digest, "full")).tolist()


def test_what_one_tenant_saves_and_releases_leaves_the_others_as_it_was(index):
    ledger = SaveLedger()
    for tenant in ("t1", "t2"):
        index.insert(tenant, path_of(tenant).digests, end=128)
    first, second = (ledger.begin(units_of(index, tenant)) for tenant in ("t1", "t2"))
    for unit in first.units:
        ledger.acknowledge(first, unit)
        ledger.acknowledge(second, unit)
    objects = {tenant: index.objects(tenant, "full") for tenant in ("t1", "t2")}
    assert ledger.saved(objects["t1"]) == (True,) * 4
    assert ledger.saved(objects["t2"]) == (False,) * 4
    ledger.abort(second)
    ledger.forget(objects["t2"])
    index.remove("t2")
    assert ledger.saved(objects["t1"]) == (True,) * 4
    assert index.objects("t1", "full") == objects["t1"]
