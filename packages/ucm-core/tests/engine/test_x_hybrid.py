"""X-Hybrid-96 end to end: 96 layers, 8 rows, TP 8 x PP 2 as 16 threads; the worked examples, each number.

Units are small so that it is quick; kinds, blocks, layers, windows and rank rules are those of the preset.
One prompt of 5,000 tokens is computed and saved; each example then opens a copy of its files with new caches.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from models import identity_of
from openings import engine, object_files

from ucm_core.cache import Cache
from ucm_core.coordinator.coordinator import Verdict
from ucm_core.coordinator.coverage import coverage
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.presets.stress import x_hybrid_96
from ucm_core.spec.segments import Parallelism, Share
from ucm_core.spec.table import Part, RowKind, SpecTable
from ucm_core.testing.engine.engine import EngineShape
from ucm_core.testing.engine.scheduler import Feed
from ucm_core.testing.engine.work import Copy

PARTS = {
    "mla": (Part("latent", (6,), "bfloat16"), Part("rope", (2,), "bfloat16")),
    "csa_c16": (Part("entry", (32,), "float8_e4m3fn", tokens_per_entry=16),),
    "swa": (Part("k", (8, 1), "bfloat16"), Part("v", (8, 1), "bfloat16")),
    "indexer": (Part("key", (4,), "bfloat16"),),
    "scale": (Part("scale", (2,), "float32", tokens_per_entry=16),),
    "mamba2": (Part("conv", (3, 16), "bfloat16"), Part("ssm", (8, 2, 3), "float32")),
    "kda_perslot": (Part("state", (8, 3, 3), "float32"),),
    "cross": (),
}


def small(table: SpecTable) -> SpecTable:
    """The same rows with few bytes."""
    return SpecTable(tuple(replace(row, parts=PARTS[row.name]) for row in table.rows), table.grain_tokens)


TABLE = small(x_hybrid_96())
CUT = Parallelism(tensor=8, partition=(48, 48))
SHAPE = EngineShape(CUT, Feed(batch=1, chunk_tokens=256), pages=48)
PROMPT = np.random.default_rng(96).integers(0, 1000, 5000).tolist()
RING_BYTES = 16 << 20
UNITS = {"mla": 8, "csa_c16": 8, "swa": 12, "indexer": 2, "scale": 8, "mamba2": 10, "kda_perslot": 4}
"""Of each row on each stage: half of 16, 16, 24, 4, 16, 20 and 8."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with everything of the prompt."""
    root = tmp_path_factory.mktemp("x-hybrid") / "cache"
    with engine(root, TABLE, SHAPE, ring_bytes=RING_BYTES) as engine_:
        engine_.submit("r", PROMPT)
        engine_.run()
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "cache", ignore=shutil.ignore_patterns(".writers"))
    return tmp_path / "cache"


class Asker:
    """The scheduler's cache, and what it is to forget."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.chain = cache, cache.chain(PROMPT)

    def keep(self, row: str, *, blocks: int | None = None, states: Sequence[int] | None = None) -> None:
        """Keep the first blocks of a row, or the states at these positions; drop everything else."""
        step = TABLE.row(row).block_tokens
        ends = range(step, len(PROMPT) + 1, step)
        gone = [end for end in ends if (end > (blocks or 0) * step if states is None else end not in states)]
        digests = self.chain.digests[[end // 64 - 1 for end in gone]]
        self.cache.stores[row].drop(self.cache.keys(row, digests))

    def resolve(self, tokens: int) -> Verdict:
        return self.cache.resolve(self.cache.chain(PROMPT[:tokens]))


@pytest.fixture
def asker(root: Path) -> Iterator[Asker]:
    config = CacheConfig(root=root, ring_bytes=RING_BYTES, disk_bytes=1 << 30, io_threads=2)
    with Cache.open(config, TABLE, identity=identity_of(TABLE), share=Share(CUT)) as cache:
        yield Asker(cache)


def tokens_of(verdict: Verdict) -> tuple[int, int]:
    return verdict.hit.hit_tokens, verdict.hit.resume_tokens


def test_every_row_is_saved_once_in_every_segment(saved: Path) -> None:
    """39 blocks and 20 states; replicated rows lie in 2 segments (stages), sliced ones in 16."""
    files = Counter(path.parts[-3] for path in object_files(saved))
    chains = dict.fromkeys(("mla", "csa_c16", "indexer", "scale"), 39 * 2)
    states = dict.fromkeys(("mamba2", "kda_perslot"), 20 * 16)
    assert files == chains | states | {"swa": 39 * 16}
    segments = {path.name.split(".", 1)[1] for path in object_files(saved) if path.parts[-3] == "swa"}
    assert len(segments) == 16
    assert {"h0-1.u0-12.c0-1", "h7-8.u12-24.c0-1"} <= segments


def stored_of_example_1(asker: Asker) -> None:
    asker.keep("mla", blocks=20)
    asker.keep("indexer", blocks=20)
    asker.keep("csa_c16", blocks=19)
    asker.keep("scale", blocks=19)
    asker.keep("swa", blocks=23)
    asker.keep("mamba2", states=[1280, 2304])


def test_example_1_a_state_that_lags(asker: Asker) -> None:
    stored_of_example_1(asker)
    assert tokens_of(asker.resolve(3000)) == (2432, 2304)


def test_example_1_on_the_engine_unit_for_unit(asker: Asker, root: Path) -> None:
    """2304 tokens are 18 blocks; the window of 512 sees [1793, 2304), blocks [14, 18)."""
    stored_of_example_1(asker)
    asker.cache.close()
    objects = {"mla": 18, "csa_c16": 18, "swa": 4, "indexer": 18, "scale": 18, "mamba2": 1, "kda_perslot": 1}
    with engine(root, TABLE, SHAPE, ring_bytes=RING_BYTES) as engine_:
        loads: list[dict[str, tuple[int, ...]]] = []
        for rank in engine_.ranks:
            rank.begin_load = partial(noted, rank.begin_load, rank._loads, loads)
        request = engine_.submit("r", PROMPT[:3000])
        counts = engine_.run()
        assert (counts.resumed_tokens, counts.rewound, request.computed) == (2304, 0, 3000)
    assert len(loads) == 16
    assert all(load == {row: (objects[row], UNITS[row]) for row in UNITS} for load in loads)


def noted(
    begin: Callable[[Copy], None], running: dict, loads: list[dict[str, tuple[int, ...]]], load: Copy
) -> None:
    """Begin a load, and note objects and units of every row."""
    begin(load)
    handles = running[load.request].rows
    loads.append({row: handle.ticket.results.shape for row, handle in handles.items()})


def test_example_1_a_state_of_another_prefix_is_invisible(asker: Asker) -> None:
    stored_of_example_1(asker)
    other = asker.cache.chain([*PROMPT[:1], 7, *PROMPT[2:3000]])
    assert asker.cache.resolve(other).hit.resume_tokens == 0


def test_example_2_states_do_not_vote_and_a_follower_clamps(asker: Asker) -> None:
    asker.keep("csa_c16", blocks=38)
    asker.keep("mamba2", states=[1024, 2048, 3072, 4096])
    verdict = asker.resolve(5000)
    assert tokens_of(verdict) == (4864, 4096)
    assert [coverage(TABLE.row("swa"), at) for at in (4096, 4864)] == [range(28, 32), range(34, 38)]
    asker.keep("indexer", blocks=31)
    assert asker.cache.coordinator.clamp(asker.chain, verdict).hit.resume_tokens == 3072


def test_example_2_the_engine_loads_no_further_than_its_followers(asker: Asker, root: Path) -> None:
    asker.keep("mamba2", states=[1024, 2048, 3072, 4096])
    asker.keep("indexer", blocks=31)
    asker.cache.close()
    with engine(root, TABLE, SHAPE, ring_bytes=RING_BYTES) as engine_:
        engine_.submit("r", PROMPT[:4200])
        counts = engine_.run()
        assert (counts.resumed_tokens, counts.rewound) == (3072, 0)


def test_example_3_the_minimum_of_two_maxima_is_no_joint_point(asker: Asker) -> None:
    asker.keep("csa_c16", blocks=38)
    asker.keep("mamba2", states=[1024, 2048, 4096])
    asker.keep("kda_perslot", states=[256, 2048, 3840])
    assert tokens_of(asker.resolve(5000)) == (4864, 2048)


def test_example_4_the_last_token(asker: Asker) -> None:
    asker.keep("mamba2", states=[3072, 4096])
    assert tokens_of(asker.resolve(4096)) == (3968, 3072)


def test_example_7_shared_tensors_under_a_real_partition(tmp_path: Path) -> None:
    """Layers 0 to 3 share a tensor: brought before layer 0, saved after layer 3."""
    shared = (("mla", (0, 1, 2, 3)), ("swa", (8, 9, 10)))
    shape = replace(SHAPE, parallel=Parallelism(partition=(50, 46)), shared=shared)
    with engine(tmp_path, TABLE, shape, ring_bytes=RING_BYTES) as engine_:
        for _ in range(2):
            engine_.submit("r", PROMPT[:700])
            counts = engine_.run()
        assert counts.resumed_tokens == 640
        assert [rank.memories["mla"].slice.segment.units for rank in engine_.ranks] == [(0, 10), (10, 16)]


def test_every_row_of_the_design_is_there() -> None:
    assert [row.name for row in TABLE.rows] == list(PARTS)
    assert sum(len(row.units) for row in TABLE.rows if row.name != "scale") == 96
    assert {row.name: len(row.units) // 2 for row in TABLE.rows if row.kind is not RowKind.NONE} == UNITS
