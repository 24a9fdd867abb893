"""The core itself, with its store on real files: what it writes bears the names that the bridge gives."""

import numpy as np
import pytest
from worlds import POOLS, model_of, pools_of, table_of

from ucm_core import Cache
from ucm_position_key import KeyView, NodeIndex, PoolTable, digests_of

TOKENS = list(range(100, 126))  # 6 grains of 4, and a tail
NODE_ROWS = ("full", "window", "keys")


def names_on_disk(root, row):
    return {path.name.partition(".")[0] for path in root.rglob(f"{row}/*/*") if path.is_file()}


def save(root, pools, tokens):
    """Save every block of the rows in pages, through the core's own interface."""
    with Cache.open(root, pools.table, identity=pools.identity) as cache:
        chain = cache.chain(tokens)
        rows = {name: pools.table.row(name) for name in NODE_ROWS}
        shapes = {name: (len(chain.digests), len(row.units), row.unit_bytes) for name, row in rows.items()}
        assert cache.save(chain, {n: np.zeros(shapes[n], np.uint8) for n in NODE_ROWS}).wait_durable()
        return chain.digests


@pytest.mark.parametrize("row", NODE_ROWS)
def test_what_the_core_saved_is_what_a_node_of_the_same_tokens_names(tmp_path, row):
    pools = pools_of(4)
    digests = save(tmp_path, pools, TOKENS)
    path, index = pools.path(), NodeIndex(pools)
    path.extend(TOKENS)
    assert np.array_equal(path.digests, digests)
    index.insert("node", digests_of(path.page_hashes), end=24)
    names = {item.name.hex() for item in index.endings("node", row)}
    assert names == names_on_disk(tmp_path, row)
    assert len(names) == 6


def test_what_lies_on_disk_leads_back_to_its_nodes(tmp_path):
    pools = pools_of(4)
    index = NodeIndex(pools)
    index.insert("lower", save(tmp_path, pools, TOKENS), end=24)
    index.split("lower", 12, upper="upper")
    names = b"".join(map(bytes.fromhex, names_on_disk(tmp_path, "full")))
    found = index.locate("full", np.frombuffer(names, np.uint8).reshape(-1, 16))
    spans = sorted((span.begin, span.end, span.node) for (span,) in found)
    assert spans == [(at, at + 4, "upper" if at < 12 else "lower") for at in range(0, 24, 4)]


def test_pairs_lie_in_a_directory_of_their_own(tmp_path):
    model, names = model_of(table := table_of(4)), set()
    for view in KeyView:
        pools = PoolTable(table, POOLS, model=model, view=view)
        keys = pools.keys("full", save(tmp_path, pools, TOKENS))
        names |= {key[:16].tobytes().hex() for key in keys}
    spaces = {path.parents[2].name for path in tmp_path.rglob("full/*/*") if path.is_file()}
    assert len(spaces) == 2
    assert names_on_disk(tmp_path, "full") == names
    assert len(names) == 12
