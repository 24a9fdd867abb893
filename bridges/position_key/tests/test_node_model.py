"""Random trees against a model that knows every position by itself: inserts, splits, evictions, removals.

Tokens are few, so that siblings share their first grains, as where a page has several.
"""

from itertools import groupby, pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from worlds import formula, index_of, key_of

from ucm_core.spec.keys import RequestIdentity
from ucm_position_key import KeyView, NodeSpan, Span

IDENTITIES = [
    RequestIdentity(),
    RequestIdentity(cache_salt="t1"),
    RequestIdentity(cache_salt="t2", extra_key="x"),
]
ROWS = ("full", "window", "state", "keys")


class Trees(RuleBasedStateMachine):
    """The model: per node its whole token path, its edges and, position by position, what it holds."""

    @initialize(
        grain=st.integers(1, 4),
        blocks=st.integers(1, 3),
        grid=st.integers(1, 3),
        view=st.sampled_from(KeyView),
    )
    def begin(self, grain, blocks, grid, view):
        self.index = index_of(grain, blocks=blocks, grid=grid, view=view)
        self.grain, self.block, self.grid, self.view = grain, grain * blocks, grain * grid, view
        self.nodes, self.gone, self.names = {}, [], 0

    def name(self):
        self.names += 1
        return self.names

    def pick(self, data, names):
        return data.draw(st.sampled_from(sorted(names)))

    def digests(self, node):
        """Of all grains of a node's path, by the contract's formula."""
        ids = node["tokens"]
        if self.view is KeyView.BIGRAM:
            ids = [token for pair in pairwise(ids) for token in pair]
        return formula(ids, self.grain * self.view.ids_per_position, node["identity"].seed)

    def own_digests(self, node):
        return self.digests(node)[node["begin"] // self.grain :]

    def holders(self, digest):
        return [name for name, node in self.nodes.items() if digest in map(bytes, self.own_digests(node))]

    def owner(self, name, position):
        while position < self.nodes[name]["begin"]:
            name = self.nodes[name]["parent"]
        return name

    def leaves(self):
        return self.nodes.keys() - {node["parent"] for node in self.nodes.values()}

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def insert(self, data, tokens):
        identity = data.draw(st.sampled_from(IDENTITIES))
        parent = data.draw(st.sampled_from([None, *self.nodes]))
        above = self.nodes.get(parent, {"end": 0, "identity": identity, "tokens": []})
        name, begin, end = self.name(), above["end"], above["end"] + len(tokens)
        first = [0] * (self.view.ids_per_position - 1) if parent is None else []
        node = {"parent": parent, "begin": begin, "end": end, "tokens": above["tokens"] + first + tokens}
        node |= {"identity": above["identity"], "kv": {*range(begin, end)}, "swa": set()}
        self.nodes[name] = node | {"mamba": False}
        digests = self.digests(node)[begin // self.grain :]
        self.index.insert(name, digests, end=node["end"], parent=parent)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), pool=st.sampled_from(["kv", "swa"]))
    def hold(self, data, pool):
        name = self.pick(data, self.nodes)
        node = self.nodes[name]
        edges = st.integers(node["begin"], node["end"])
        begin, end = sorted([data.draw(edges), data.draw(edges)])
        self.index.hold(name, pool, span=Span(begin, end))
        node[pool] = {*range(begin, end)}

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def keep_a_state(self, data):
        name = self.pick(data, self.nodes)
        node = self.nodes[name]
        self.index.hold(name, "mamba", span=Span(node["begin"], node["end"]))
        node["mamba"] = True

    @precondition(lambda self: any(node["end"] - node["begin"] > 1 for node in self.nodes.values()))
    @rule(data=st.data())
    def split(self, data):
        long = [name for name, node in self.nodes.items() if node["end"] - node["begin"] > 1]
        name, upper = self.pick(data, long), self.name()
        node = self.nodes[name]
        at = data.draw(st.integers(node["begin"] + 1, node["end"] - 1))
        self.index.split(name, at, upper=upper)
        tokens = node["tokens"][: at + self.view.ids_per_position - 1]
        self.nodes[upper] = node | {"end": at, "tokens": tokens, "mamba": False}
        for pool in ("kv", "swa"):
            self.nodes[upper][pool] = {p for p in node[pool] if p < at}
            node[pool] = {p for p in node[pool] if p >= at}
        node |= {"begin": at, "parent": upper}

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def remove(self, data):
        name = self.pick(data, self.leaves())
        node = self.nodes.pop(name)
        self.index.remove(name)
        self.gone += map(bytes, self.own_digests(node))

    def fits(self, name, row, end):
        if row == "state":
            return end % self.grid == 0 and end == self.nodes[name]["end"]
        return end % self.block == 0

    def has(self, name, row, end):
        if row == "state":
            return self.fits(name, row, end) and self.nodes[name]["mamba"]
        pool = "swa" if row == "window" else "kv"
        block = range(end - self.block, end)
        return self.fits(name, row, end) and all(p in self.nodes[self.owner(name, p)][pool] for p in block)

    def where(self, name, row, end):
        if row == "state":
            return (NodeSpan(name, self.nodes[name]["begin"], end),) if end % self.grid == 0 else ()
        runs = groupby(range(end - self.block, end), lambda p: self.owner(name, p))
        spans = tuple((owner, list(run)) for owner, run in runs) if end % self.block == 0 else ()
        return tuple(NodeSpan(owner, run[0], run[-1] + 1) for owner, run in spans)

    @invariant()
    def every_node_gives_its_keys(self):
        for name, node in getattr(self, "nodes", {}).items():
            ends = [end for end in range(node["begin"] + 1, node["end"] + 1) if end % self.grain == 0]
            digests = dict(zip(ends, self.own_digests(node), strict=True))
            for row in ROWS:
                keys = {end: key_of(self.index.pools, row, digest) for end, digest in digests.items()}
                there = [keys[end] for end in ends if self.has(name, row, end)]
                assert [item.key for item in self.index.objects(name, row)] == there
                ending = [keys[end] for end in ends if self.fits(name, row, end)]
                assert [item.key for item in self.index.endings(name, row)] == ending

    @invariant()
    def every_key_gives_its_nodes(self):
        for name, node in getattr(self, "nodes", {}).items():
            for number, digest in enumerate(self.own_digests(node), node["begin"] // self.grain + 1):
                end, names = number * self.grain, self.holders(bytes(digest))
                assert name in names
                for row in ROWS:
                    best = [other for other in names if self.has(other, row, end)] or names
                    (found,) = self.index.locate(row, self.index.pools.keys(row, digest[None]))
                    assert found in {self.where(other, row, end) for other in best}

    @invariant()
    def what_left_is_not_found_and_nothing_else_is_kept(self):
        if not hasattr(self, "nodes"):
            return
        self.index.check_integrity()
        kept = {bytes(digest) for node in self.nodes.values() for digest in self.own_digests(node)}
        statistics = self.index.statistics()
        assert (statistics.nodes, statistics.grains) == (len(self.nodes), len(kept))
        gone = np.frombuffer(b"".join({*self.gone} - kept), np.uint8).reshape(-1, 32)
        assert set(self.index.locate("full", self.index.pools.keys("full", gone))) <= {()}


TestTrees = Trees.TestCase
TestTrees.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
