"""The facade over real files and rings: what is saved is found again, by the same computation only."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from models import DENSE, FULL, GRAIN, HYBRID, RING_BYTES, STATE, blocks_of, identity_of, payloads_of

from ucm_core.cache import Cache
from ucm_core.errors import ClosedError, ConfigError, LayoutError, SpecError, StoreError
from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode
from ucm_core.ops import metrics
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.keys import PrefixChain, RequestIdentity
from ucm_core.spec.table import SpecTable
from ucm_core.store.ring import Ring

WAIT_S = 60.0
TOKENS = list(range(8 * GRAIN))


def open_cache(
    root: Path, table: SpecTable = DENSE, identity: ModelIdentity | None = None, **settings: object
) -> Cache:
    config = CacheConfig(**{"root": root, "ring_bytes": RING_BYTES, "disk_bytes": 1 << 30, **settings})
    return Cache.open(config, table, identity=identity or identity_of(table))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(root: Path) -> Iterator[Cache]:
    with open_cache(root) as cache:
        yield cache
        cache.check_integrity()


def raising(error: Exception) -> Callable[..., None]:
    def call(*arguments: object, **named: object) -> None:
        raise error

    return call


def fill(cache: Cache, *, blocks: int = 8, seed: int = 0) -> None:
    tickets = cache.save(cache.chain(TOKENS), payloads_of(cache.table, blocks, seed=seed))
    assert tickets.wait_durable(WAIT_S)


def resume(cache: Cache, tokens: list[int] = TOKENS, identity: RequestIdentity | None = None) -> int:
    return cache.resolve(cache.chain(tokens, identity)).hit.resume_tokens


def object_files(root: Path) -> list[Path]:
    return [path for path in root.glob("*/*/???/*") if path.name.endswith(".c0-1")]


def test_what_is_saved_is_resolved_and_loaded(cache: Cache) -> None:
    fill(cache)
    chain = cache.chain(TOKENS)
    verdict = cache.resolve(chain)
    assert verdict.hit.resume_tokens == 7 * GRAIN
    loaded = cache.load(chain, verdict)
    assert loaded.resume_tokens == 7 * GRAIN
    assert np.array_equal(loaded.payloads["full"], blocks_of(FULL, 8)[:7])


def test_the_verdict_of_another_prompt_loads_only_what_both_share(cache: Cache) -> None:
    fill(cache)
    other = cache.chain(TOKENS[: 2 * GRAIN] + [7] * (6 * GRAIN))
    loaded = cache.load(other, cache.resolve(cache.chain(TOKENS)))
    assert loaded.resume_tokens == 2 * GRAIN
    assert np.array_equal(loaded.payloads["full"], blocks_of(FULL, 8)[:2])


def test_a_verdict_from_before_the_weights_changed_loads_nothing(cache: Cache) -> None:
    fill(cache)
    chain = cache.chain(TOKENS)
    verdict = cache.resolve(chain)
    cache.weights_changed()
    assert cache.load(chain, verdict).resume_tokens == 0


def test_another_cache_finds_it(cache: Cache, root: Path) -> None:
    fill(cache)
    cache.close()
    with open_cache(root) as other:
        chain = other.chain([*TOKENS, 7])
        loaded = other.load(chain, other.resolve(chain))
        assert loaded.resume_tokens == 8 * GRAIN
        assert np.array_equal(loaded.payloads["full"], blocks_of(FULL, 8))


def test_every_row_comes_back(root: Path) -> None:
    with open_cache(root, HYBRID) as cache:
        fill(cache)
        chain = cache.chain([*TOKENS, 7])
        verdict = cache.resolve(chain)
        loaded = cache.load(chain, verdict)
        assert loaded.resume_tokens == 8 * GRAIN
        everything = payloads_of(HYBRID, 8)
        for row, blocks in loaded.verdict.blocks.items():
            assert np.array_equal(loaded.payloads[row], everything[row][blocks.start : blocks.stop])
        assert loaded.verdict.blocks["state"] == range(7, 8)


def test_only_equal_computations_share(cache: Cache, root: Path) -> None:
    fill(cache)
    for change in (
        {"weights": "5b" * 32},
        {"kv_dtype": "float32"},
        {"compute_dtype": "float32"},
        {"config": "{}"},
    ):
        with open_cache(root, identity=identity_of(DENSE, **change)) as other:
            assert resume(other) == 0
    assert resume(cache, identity=RequestIdentity(cache_salt="tenant")) == 0
    assert resume(cache, [1, *TOKENS[1:]]) == 0
    assert resume(cache) == 7 * GRAIN


def test_an_unknown_model_neither_stores_nor_finds(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    unknown = identity_of(DENSE, weights=None)
    with open_cache(root, identity=unknown) as cache:
        tickets = cache.save(cache.chain(TOKENS), payloads_of(DENSE, 8))
        assert tickets.wait(0)
        assert not tickets.ok
        assert tickets.rows["full"].object_results.tolist() == [ResultCode.UNAVAILABLE] * 8
        assert resume(cache) == 0
        assert cache.namespace is None
    assert object_files(root) == []
    assert "weights are unknown" in caplog.text


def test_a_gone_block_shortens_the_load_and_the_next_verdict(root: Path) -> None:
    with open_cache(root) as writer:
        fill(writer)
    with open_cache(root) as cache:
        chain = cache.chain(TOKENS)
        verdict = cache.resolve(chain)
        for block in (4, 6):
            name = verdict.keys["full"][block].tobytes()[:16].hex()
            next(path for path in object_files(root) if path.name.startswith(name)).unlink()
        loaded = cache.load(chain, verdict)
        assert loaded.resume_tokens == 4 * GRAIN
        assert np.array_equal(loaded.payloads["full"], blocks_of(FULL, 8)[:4])
        assert resume(cache) == 4 * GRAIN
        fill(cache)
        assert resume(cache) == 7 * GRAIN


def test_a_damaged_block_is_promised_once_and_healed_by_the_next_save(root: Path) -> None:  # case C-34
    with open_cache(root) as writer:
        fill(writer)
    with open_cache(root) as cache:
        chain = cache.chain([*TOKENS, 7])
        verdict = cache.resolve(chain)
        name = verdict.keys["full"][4].tobytes()[:16].hex()
        damaged = next(path for path in object_files(root) if path.name.startswith(name))
        data = bytearray(damaged.read_bytes())
        data[5000] ^= 1
        damaged.write_bytes(data)
        promised = [verdict.hit.resume_tokens, cache.load(chain, verdict).resume_tokens, resume(cache)]
        assert promised == [8 * GRAIN, 4 * GRAIN, 4 * GRAIN]
        assert not damaged.exists()
        fill(cache)
        assert damaged.exists()
        assert cache.load(chain, cache.resolve(chain)).resume_tokens == 8 * GRAIN


def test_all_rows_rewind_together(root: Path) -> None:
    with open_cache(root, HYBRID) as writer:
        fill(writer)
    with open_cache(root, HYBRID) as cache:
        chain = cache.chain([*TOKENS, 7])
        verdict = cache.resolve(chain)
        name = verdict.keys["state"][0].tobytes()[:16].hex()
        next(path for path in object_files(root) if path.name.startswith(name)).unlink()
        loaded = cache.load(chain, verdict)
        assert loaded.resume_tokens == 7 * GRAIN
        assert np.array_equal(loaded.payloads["state"], blocks_of(STATE, 8)[6:7])


def test_changed_weights_find_nothing_and_share_nothing(cache: Cache, root: Path) -> None:
    fill(cache)
    before = cache.namespace
    cache.weights_changed()
    assert cache.namespace != before
    assert cache.identity.generation == 1
    assert resume(cache) == 0
    fill(cache, seed=1)
    assert resume(cache) == 7 * GRAIN
    with open_cache(root) as other:
        assert other.identity.generation == 1
        assert resume(other) == 0


@pytest.mark.parametrize("error", [OSError(24, "EMFILE"), RuntimeError("mapping the ring")])
def test_without_any_ring_everything_is_a_miss(
    root: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ring, "open", raising(error))
    with open_cache(root) as cache:
        assert not cache.save(cache.chain(TOKENS), payloads_of(DENSE, 8)).ok
        assert resume(cache) == 0


def test_a_cache_that_is_refused_leaves_nothing_open(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (root / identity_of(DENSE, weights="5b" * 32).namespace).symlink_to(tmp_path)
    gc.collect()  # what others left ends now, not meanwhile
    before = set(Path("/proc/self/fd").iterdir()), threading.active_count()
    with pytest.raises(StoreError, match="outside of the cache root"):
        open_cache(root, identity=identity_of(DENSE, weights="5b" * 32))
    assert (set(Path("/proc/self/fd").iterdir()), threading.active_count()) == before


def test_the_other_half_follows_by_generation(cache: Cache, root: Path) -> None:
    cache.weights_changed()
    fill(cache)
    with open_cache(root, identity=cache.identity) as other:
        assert other.namespace == cache.namespace
        assert resume(other) == 7 * GRAIN


def test_two_caches_of_one_process_share_the_ring(cache: Cache, root: Path) -> None:
    fill(cache)
    with open_cache(root) as other:
        before = metrics.OBJECTS_LOADED.labels(row="full", tier="ring")._value.get()
        chain = other.chain([*TOKENS, 7])
        assert other.load(chain, other.resolve(chain)).resume_tokens == 8 * GRAIN
        assert metrics.OBJECTS_LOADED.labels(row="full", tier="ring")._value.get() == before + 8


def test_blocks_may_begin_anywhere(cache: Cache) -> None:
    chain = cache.chain(TOKENS)
    blocks = blocks_of(FULL, 8)
    assert cache.save(chain, {"full": blocks[3:]}, first_block=3).wait_durable(WAIT_S)
    assert resume(cache) == 0
    assert cache.save(chain, {"full": blocks[:3]}, first_block={"full": 0}).wait_durable(WAIT_S)
    assert np.array_equal(cache.load(chain, cache.resolve(chain)).payloads["full"], blocks[:7])


def test_payloads_of_another_type_are_refused_by_row(cache: Cache) -> None:
    with pytest.raises(LayoutError, match=r"row 'full': blocks are float32.*need uint8\[blocks, 2, 1024\]"):
        cache.save(cache.chain(TOKENS), {"full": blocks_of(FULL, 2).astype(np.float32)})


def test_settings_as_a_mapping_are_refused_with_the_way(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"config is a dict; .*CacheConfig\.load"):
        Cache.open({"root": str(root)}, DENSE, identity=identity_of(DENSE))  # type: ignore[arg-type]
    assert not root.exists()


def test_a_verdict_is_shown_in_tokens_not_in_keys(cache: Cache) -> None:
    fill(cache)
    text = repr(cache.resolve(cache.chain(TOKENS)))
    assert "resume_tokens" in text
    assert "array" not in text


@pytest.mark.parametrize("shape", [(2, 1, 1024), (2, 2, 1023), (2, 2048)])
def test_payloads_of_another_shape_are_refused(cache: Cache, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"row 'full': blocks are uint8.*need uint8\[blocks, 2, 1024\]"):
        cache.save(cache.chain(TOKENS), {"full": np.zeros(shape, dtype=np.uint8)})


def test_an_unknown_row_is_refused(cache: Cache) -> None:
    with pytest.raises(SpecError, match="row 'half' in the table"):
        cache.save(cache.chain(TOKENS), {"half": blocks_of(FULL, 1)})


def test_a_chain_shorter_than_its_blocks_is_refused(cache: Cache) -> None:
    with pytest.raises(SpecError, match="the chain has"):
        cache.save(cache.chain(TOKENS), {"full": blocks_of(FULL, 9)})


@pytest.mark.parametrize("first", [-1, 2**62, 2**63, 2**70, 1.5, float("nan"), "1", None])
def test_a_first_block_that_is_no_index_is_refused(cache: Cache, first: object) -> None:
    with pytest.raises(SpecError, match="row 'full'"):
        cache.save(cache.chain(TOKENS), {"full": blocks_of(FULL, 1)}, first_block=first)  # type: ignore[arg-type]
    assert object_files(cache.config.root) == []


def test_a_first_block_may_be_a_number_of_numpy(cache: Cache) -> None:
    tickets = cache.save(
        cache.chain(TOKENS),
        {"full": blocks_of(FULL, 8)[:3]},
        first_block=np.int64(0),  # type: ignore[arg-type]
    )
    assert tickets.wait_durable(WAIT_S)
    assert resume(cache) == 3 * GRAIN


@pytest.mark.parametrize("blocks", [[[[0]]], None, 5, np.uint8(5)])
def test_what_is_no_array_is_refused(cache: Cache, blocks: object) -> None:
    with pytest.raises(LayoutError, match="row 'full': blocks are a"):
        cache.save(cache.chain(TOKENS), {"full": blocks})  # type: ignore[dict-item]


def test_a_chain_of_another_grain_is_not_saved(cache: Cache) -> None:
    chain = PrefixChain(grain_tokens=4)
    chain.extend(TOKENS)
    with pytest.raises(SpecError, match="4 tokens per grain, the table 16"):
        cache.save(chain, payloads_of(DENSE, 8))


def test_a_load_without_a_target_for_every_row_begins_none(root: Path) -> None:
    with open_cache(root, HYBRID) as cache:
        fill(cache)
        verdict = cache.resolve(cache.chain([*TOKENS, 7]))
        while cache.statistics().rows["full"].working:  # the files' times are set in the background
            pass
        with pytest.raises(LayoutError, match="without a target: window-40, state"):
            cache.load_into(verdict, {"full": BufferBlocks(blocks_of(FULL, 8))})
        assert cache.statistics().rows["full"].working == 0


def test_keys_of_an_unknown_row(cache: Cache) -> None:
    with pytest.raises(SpecError, match="no cached row 'half'"):
        cache.keys("half", np.zeros((1, 32), dtype=np.uint8))


def test_a_closed_cache_says_so(root: Path) -> None:
    cache = open_cache(root)
    chain = cache.chain(TOKENS)
    cache.close()
    cache.close()
    for call in (cache.weights_changed, lambda: cache.resolve(chain), lambda: cache.save(chain, {})):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_statistics_show_every_row(root: Path) -> None:
    with open_cache(root, HYBRID) as cache:
        fill(cache)
        statistics = cache.statistics()
        assert statistics.namespace == cache.namespace
        assert set(statistics.rows) == {"full", "window-40", "state"}
        assert statistics.root.used_bytes == sum(path.stat().st_size for path in object_files(root))


def test_a_root_that_is_a_file_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="is a file"):
        open_cache(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_ring_too_small_is_refused_before_any_file(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"ring_bytes = 4096 is too small: 4 objects of each row need \d+"):
        open_cache(root, ring_bytes=4096)
    assert not root.exists()


def test_a_grain_that_contradicts_the_table_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="'grain_tokens' = 64, but the table has 16"):
        open_cache(root, grain_tokens=64)
    assert not root.exists()


def test_an_identity_for_another_table_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="made for the table"):
        open_cache(root, DENSE, identity_of(HYBRID))
    with pytest.raises(ConfigError, match="16 tokens per grain, the identity 32"):
        open_cache(root, DENSE, identity_of(DENSE, grain_tokens=32))
    assert not root.exists()


def test_the_bound_holds_and_the_most_recent_is_kept(root: Path) -> None:
    object_bytes = 4096 + 2 * 4096
    with open_cache(root, disk_bytes=20 * object_bytes) as cache:
        for seed in range(10):
            chain = cache.chain([seed, *TOKENS[1:]])
            assert cache.save(chain, payloads_of(DENSE, 8, seed=seed)).wait_durable(WAIT_S)
            assert len(object_files(root)) <= 20
        assert cache.resolve(chain).hit.resume_tokens == 7 * GRAIN


def test_usage_is_recovered_after_a_restart(root: Path) -> None:
    with open_cache(root) as cache:
        fill(cache)
        used = cache.statistics().root.used_bytes
    (root / ".usage").unlink()
    with open_cache(root) as cache:
        assert cache.statistics().root.used_bytes == used > 0


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


WRITER = """
import sys
from pathlib import Path
from test_cache import TOKENS, open_cache
from models import HYBRID, payloads_of
from ucm_core.errors import StoreError

cache = open_cache(Path(sys.argv[1]), HYBRID)
cache.save(cache.chain(TOKENS), payloads_of(HYBRID, 8))
"""


def test_a_process_that_only_saves_and_exits_loses_nothing(root: Path) -> None:
    ended = run_python(WRITER, root)
    assert ended.returncode == 0, ended.stderr
    with open_cache(root, HYBRID) as cache:
        chain = cache.chain([*TOKENS, 7])
        loaded = cache.load(chain, cache.resolve(chain))
        assert loaded.resume_tokens == 8 * GRAIN
        assert np.array_equal(loaded.payloads["full"], blocks_of(FULL, 8))


UNAVAILABLE = """
import sys
from pathlib import Path
from test_cache import TOKENS, open_cache, resume
from models import HYBRID, payloads_of
from ucm_core.errors import StoreError

cache = open_cache(Path(sys.argv[1]), HYBRID)
tickets = cache.save(cache.chain(TOKENS), payloads_of(HYBRID, 8))
assert tickets.wait(60)
assert not tickets.ok
assert resume(cache) == 0
try:
    cache.weights_changed()
except StoreError as error:
    assert "tier 'file' was not reset" in str(error)
assert resume(cache) == 0
cache.close()
print("served")
"""


@pytest.mark.parametrize(
    "mount",
    ["mount -t tmpfs -o ro tmpfs {root}", "mount -t tmpfs -o size=4096,nr_inodes=1 tmpfs {root}"],
    ids=["read-only", "full"],
)
def test_a_root_that_cannot_be_used_is_a_miss(root: Path, mount: str) -> None:
    root.mkdir()
    program = (
        f"import subprocess; subprocess.run({mount.format(root=root).split()!r}, check=True)\n" + UNAVAILABLE
    )
    command = ["unshare", "-m", sys.executable, "-c", program, str(root)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.stdout == "served\n", ended.stderr
    assert ended.stderr.count("is not available, everything is a miss") == 1


def test_a_root_without_a_parent_that_can_be_made_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_cache(Path("/proc/none/cache")) as cache:
        assert resume(cache) == 0
    assert caplog.text.count("is not available, everything is a miss") == 1


def test_a_first_block_of_no_row_is_refused_and_nothing_is_saved(root: Path) -> None:
    with open_cache(root) as cache:
        chain = cache.chain(TOKENS)
        with pytest.raises(SpecError, match=r"first_block names 'fulll'.*rows are full"):
            cache.save(chain, {"full": blocks_of(FULL, 2)}, first_block={"fulll": 1})
        assert cache.resolve(chain).hit.resume_tokens == 0
