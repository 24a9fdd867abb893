"""Opens reference engines, with a small model, and sends them requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from models import RING_BYTES, identity_of

from ucm_core.ops.config import CacheConfig
from ucm_core.spec.rows import Part, RankRule, RowKind, SpecRow
from ucm_core.spec.table import SpecTable
from ucm_core.testing.engine.engine import EngineShape, ReferenceEngine
from ucm_core.testing.engine.request import Request

GRAIN = 16
HEADS = (2, 4)


def row(name: str, kind: RowKind, units: tuple[int, ...], **more: object) -> SpecRow:
    parts = (Part("k", HEADS, "bfloat16"), Part("v", HEADS, "bfloat16"))
    return SpecRow(name, kind, GRAIN, units, more.pop("parts", parts), **more)


SMALL = SpecTable(
    (
        row("full", RowKind.CHAIN, (0, 4)),
        row(
            "latent",
            RowKind.CHAIN,
            (1, 5),
            parts=(Part("c", (9,), "bfloat16"),),
            rank_rule=RankRule.ALL_UNION,
        ),
        row("window-20", RowKind.CHAIN, (2, 6), window=20),
        row(
            "key",
            RowKind.FOLLOWER,
            (1, 5),
            parts=(Part("key", (5,), "bfloat16", tokens_per_entry=4),),
            rank_rule=RankRule.ALL_UNION,
            follows="latent",
        ),
        row(
            "state",
            RowKind.SNAPSHOT,
            (3, 7),
            parts=(Part("conv", (3, 6), "bfloat16"), Part("ssm", (2, 5), "float32")),
        ),
    ),
    GRAIN,
)
"""Eight layers: full, latent with a compressed follower, window and state, twice."""


@contextmanager
def engine(
    root: Path, table: SpecTable = SMALL, shape: EngineShape | None = None, **settings: object
) -> Iterator[ReferenceEngine]:
    """An engine whose books must balance in the end."""
    config = CacheConfig(
        **{"root": root, "ring_bytes": RING_BYTES, "disk_bytes": 1 << 30, "io_threads": 2, **settings}
    )
    with ReferenceEngine.open(config, table, identity=identity_of(table), shape=shape) as made:
        yield made
        made.settle()
    check_balance(made)


def check_balance(engine: ReferenceEngine) -> None:
    """Nothing is held, referenced or under way in an engine that is closed."""
    assert engine.scheduler.tables.held_count == 0 or not engine.scheduler.idle
    for cache in (engine.cache, *engine.workers):
        cache.check_integrity()
        for row in cache.statistics().rows.values():
            assert (row.working, row.pending_writes, row.pins) == (0, 0, 0)
            assert row.ring is None or row.ring.own_references == 0


class Crowd:
    """Requests that share prefixes: conversations over a few documents."""

    def __init__(self, *, seed: int = 0, documents: int = 12, tokens: int = 48) -> None:
        self.luck = Random(seed)
        self.documents = [[self.luck.randrange(1000) for _ in range(tokens)] for _ in range(documents)]

    def prompt(self, *, question_tokens: int = 12) -> list[int]:
        """A piece of a document and a question of its own."""
        document = self.luck.choice(self.documents)
        question = [self.luck.randrange(1000) for _ in range(self.luck.randrange(1, question_tokens))]
        return document[: self.luck.randrange(8, len(document) + 1)] + question

    def submit(self, engine: ReferenceEngine, count: int, *, output_tokens: int = 5) -> list[Request]:
        """Queue ``count`` of them."""
        return [
            engine.submit(f"r{n}", self.prompt(), output_tokens=self.luck.randrange(1, output_tokens))
            for n in range(count)
        ]


def object_files(root: Path) -> list[Path]:
    """Every object on the medium: ``<root>/<namespace>/<row>/<3 hex>/<32 hex>.<segment>``."""
    return [path for path in root.glob("*/*/???/*") if ".u" in path.name]
