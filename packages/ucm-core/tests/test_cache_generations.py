"""A reset reaches every tier and every save under way; one that a tier refuses is a failure (case C-17)."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from models import DENSE, identity_of, payloads_of
from test_cache import TOKENS, WAIT_S, fill, object_files, open_cache, raising, resume

from ucm_core.cache import Cache
from ucm_core.coordinator.coordinator import Verdict
from ucm_core.errors import StoreError
from ucm_core.flow.copy import BlockTarget
from ucm_core.flow.ticket import TicketGroup
from ucm_core.store.files import FileTier
from ucm_core.store.ring import Ring
from ucm_core.store.root import Namespace

RENEWALS: list[Callable[[Cache], None]] = [Cache.reset, Cache.weights_changed]
each_renewal = pytest.mark.parametrize("renew", RENEWALS, ids=["reset", "weights_changed"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(root: Path) -> Iterator[Cache]:
    with open_cache(root) as cache:
        yield cache
        cache.check_integrity()


class HeldWrites:
    """A double in front of `FileTier.write`: no write ends before `let_go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._go = threading.Event(), threading.Event()
        write = FileTier.write

        def held(*arguments: object, **named: object) -> object:
            self.begun.set()
            assert self._go.wait(WAIT_S)
            return write(*arguments, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(FileTier, "write", held)

    def let_go(self) -> None:
        self._go.set()


@each_renewal
def test_what_was_stored_is_found_by_nobody_any_more(
    cache: Cache, root: Path, renew: Callable[[Cache], None]
) -> None:
    fill(cache)
    renew(cache)
    assert resume(cache) == 0
    cache.close()
    with open_cache(root) as later:
        assert later.identity.generation == 1
        assert resume(later) == 0


@each_renewal
def test_a_save_under_way_resurrects_nothing(
    cache: Cache, root: Path, renew: Callable[[Cache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, before = HeldWrites(monkeypatch), cache.namespace
    tickets = cache.save(cache.chain(TOKENS), payloads_of(DENSE, 8))
    assert held.begun.wait(WAIT_S)
    assert resume(cache) > 0  # in the ring already
    renewal = threading.Thread(target=renew, args=(cache,))
    renewal.start()  # ends only after the save
    while cache.namespace == before:
        assert renewal.is_alive()
    assert resume(cache) == 0
    held.let_go()
    assert tickets.wait_durable(WAIT_S)
    renewal.join()
    assert {path.parts[-4] for path in object_files(root)} == {before}
    assert resume(cache) == 0
    cache.close()
    with open_cache(root) as later:
        assert resume(later) == 0


def test_after_a_reset_all_share_again(cache: Cache, root: Path) -> None:
    cache.reset()
    assert cache.identity.private_token == ""
    fill(cache)
    cache.close()
    with open_cache(root) as later:
        assert later.namespace == cache.namespace
        assert resume(later) > 0


def test_after_a_change_of_weights_nobody_shares_not_even_after_a_reset(cache: Cache, root: Path) -> None:
    cache.weights_changed()
    token = cache.identity.private_token
    cache.reset()
    assert (cache.identity.generation, cache.identity.private_token) == (2, token)
    fill(cache)
    with open_cache(root) as other:
        assert other.identity.generation == 2
        assert resume(other) == 0


@each_renewal
def test_a_refusing_file_tier_is_a_failure_that_names_it(
    cache: Cache, root: Path, renew: Callable[[Cache], None]
) -> None:
    fill(cache)
    (root / ".generations").write_text("not a directory")
    with pytest.raises(
        StoreError, match=r"tier 'file' was not reset: generation counter .* others still may"
    ):
        renew(cache)
    assert resume(cache) == 0
    assert not cache.save(cache.chain(TOKENS), payloads_of(DENSE, 8)).ok
    assert resume(cache) == 0


def test_a_failed_reset_can_be_repeated(cache: Cache, root: Path) -> None:
    fill(cache)
    (root / ".generations").write_text("not a directory")
    with pytest.raises(StoreError):
        cache.reset()
    cache.close()
    (root / ".generations").unlink()
    with open_cache(root) as again:
        assert resume(again) > 0  # as the failure said
        again.reset()
        assert resume(again) == 0


def test_a_reset_says_nothing_about_other_models(cache: Cache, root: Path) -> None:
    with open_cache(root, identity=identity_of(DENSE, compute_dtype="float32")) as other:
        fill(other)
        cache.reset()
        assert resume(other) > 0
        assert other.identity.generation == 0
    with open_cache(root, identity=other.identity) as again:
        assert resume(again) > 0


@each_renewal
@pytest.mark.parametrize(
    "error", [OSError(12, "ENOMEM"), RuntimeError("mapping the ring"), StoreError("a link")]
)
def test_nothing_is_found_even_when_nothing_can_be_opened(
    cache: Cache, error: Exception, renew: Callable[[Cache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache)
    where = "row_directory" if isinstance(error, StoreError) else "open"
    holder = Namespace if isinstance(error, StoreError) else Ring
    monkeypatch.setattr(holder, where, raising(error))
    renew(cache)
    assert resume(cache) == 0
    assert not cache.save(cache.chain(TOKENS), payloads_of(DENSE, 8)).ok
    monkeypatch.undo()
    renew(cache)
    assert resume(cache) == 0


@each_renewal
@pytest.mark.parametrize("before", [True, False], ids=["before it is read", "after it was read"])
def test_a_load_during_which_the_weights_change_brings_nothing(
    cache: Cache, renew: Callable[[Cache], None], before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache)
    load_into, renewals = Cache.load_into, []

    def changing(self: Cache, verdict: Verdict, targets: Mapping[str, BlockTarget]) -> TicketGroup:
        if before:
            renew(self)
        tickets = load_into(self, verdict, targets)
        tickets.wait(WAIT_S)
        if not before:
            renew(self)
        renewals.append(self.namespace)
        monkeypatch.undo()
        return tickets

    chain = cache.chain(TOKENS)
    verdict = cache.resolve(chain)
    monkeypatch.setattr(Cache, "load_into", changing)
    loaded = cache.load(chain, verdict)
    assert (loaded.resume_tokens, len(renewals)) == (0, 1)
    assert all(len(blocks) == 0 for blocks in loaded.payloads.values())


# -- a counter that was deleted


def delete_counter(root: Path) -> None:
    shutil.rmtree(root / ".generations")


@pytest.mark.parametrize("resets", [1, 3])
def test_a_deleted_counter_brings_no_old_generation_back(cache: Cache, root: Path, resets: int) -> None:
    for generation in range(resets):
        fill(cache, seed=generation)
        cache.reset()
    cache.close()
    delete_counter(root)
    with open_cache(root) as later:
        assert later.namespace == cache.namespace
        assert resume(later) == 0


def test_what_was_stored_since_the_last_reset_is_found_without_the_counter(cache: Cache, root: Path) -> None:
    cache.reset()
    fill(cache)
    cache.close()
    delete_counter(root)
    with open_cache(root) as later:
        assert resume(later) > 0


def test_a_counter_that_began_anew_passes_over_what_is_there(cache: Cache, root: Path) -> None:
    """Two resets, a third generation with objects; then an engine that knows of nothing resets again."""
    cache.reset()
    cache.reset()
    fill(cache)
    cache.close()
    for marks in root.glob("*/.left"):
        marks.unlink()
    delete_counter(root)
    with open_cache(root) as later:
        for _ in range(3):
            later.reset()
            assert resume(later) == 0


def test_a_generation_that_was_deleted_may_be_named_again(cache: Cache, root: Path) -> None:
    fill(cache)
    cache.reset()
    cache.close()
    shutil.rmtree(root)
    with open_cache(root) as later:
        assert later.identity.generation == 0
        assert resume(later) == 0
