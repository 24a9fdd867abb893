"""C-67 for long lives: a hundred thousand operations need no more memory than a few."""

import gc
import random
import sys
from itertools import count

import numpy as np
from worlds import pools_of

from ucm_position_key import NodeIndex, NodeIndexStatistics, SaveLedger, SaveStatistics, Span

OPERATIONS = 100_000
ROOTS = 30
MARGIN_BLOCKS = 1000  # one lost object in a hundred operations


class Life:
    """Grows, saves, splits, empties and fells at most `ROOTS` trees, each of one node or of two."""

    def __init__(self):
        self.random = random.Random(5)
        self.index, self.ledger = NodeIndex(pools_of(1)), SaveLedger()
        self.names, self.trees = count(1), []

    def grow(self):
        name, length = next(self.names), self.random.randrange(2, 8)
        large = np.frombuffer(self.random.randbytes(32 * 64), np.uint8).reshape(-1, 32)
        self.index.insert(name, large[:length], end=length)
        self.trees.append([name])

    def save(self, tree):
        objects = self.index.objects(tree[-1], "full")
        job = self.ledger.begin(
            unit for item in objects for unit in self.index.pools.units(item, "s", layers=(0, 3))
        )
        for unit in job.units[:: self.random.choice([1, 1, 2])]:
            self.ledger.acknowledge(job, unit)
        self.ledger.abort(job)

    def split(self, tree):
        if len(tree) == 1 and self.index.span(tree[0]).end > 1:
            tree.insert(0, next(self.names))
            self.index.split(tree[1], 1, upper=tree[0])

    def lose(self, tree):
        self.index.hold(tree[0], "kv", span=Span(0, 0))

    def fell(self):
        for name in reversed(self.trees.pop(self.random.randrange(len(self.trees)))):
            self.ledger.forget(self.index.endings(name, "full"))
            self.index.remove(name)

    def step(self):
        if len(self.trees) < ROOTS:
            self.grow()
        else:
            move = self.random.choice([self.save, self.split, self.lose, None])
            move(self.random.choice(self.trees)) if move else self.fell()


def in_use(life, operations):
    """Blocks of memory in use after ``operations`` more, with everything felled that grew."""
    for _ in range(operations):
        life.step()
    while life.trees:
        life.fell()
    gc.collect()
    return sys.getallocatedblocks()


def test_a_hundred_thousand_operations_are_flat_in_memory():
    life = Life()
    early = in_use(life, OPERATIONS // 20)
    assert abs(in_use(life, OPERATIONS) - early) < MARGIN_BLOCKS
    assert life.index.statistics() == NodeIndexStatistics(0, 0)
    assert life.ledger.statistics() == SaveStatistics(0, 0, 0)
