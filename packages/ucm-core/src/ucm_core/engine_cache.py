"""An adapter's cache: opened once the weights are known; until then everything is a miss."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ucm_core.cache import Cache
from ucm_core.errors import ConfigError, IdentityError, StoreError
from ucm_core.opening import retention_policies
from ucm_core.ops import border, metrics
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.checkpoint import WeightDigester
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.model import Model
from ucm_core.spec.segments import Share
from ucm_core.store.stack import plan_rows

_log = logging.getLogger(__name__)

START_WAIT_S = 10.0
"""How long the engine's start may wait for the weights' digest; it goes on beside the start then."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Which weights the engine runs with, beyond what their files say."""

    number: int
    """Counts "weights changed" for this model, across restarts."""
    private_token: str
    """Not empty while the weights exist only in this engine's memory."""


class EngineCache:
    """Opens the cache of the engine's model in the background; thread-safe."""

    def __init__(
        self,
        model: Model,
        config: CacheConfig,
        *,
        start_wait_s: float = START_WAIT_S,
        share: Share | None = None,
        digest: Callable[[Path], str] | None = None,
    ) -> None:
        refuse_root(config.root)
        # Raises here, on the engine's thread, for sizes that hold nothing.
        plan_rows(model.table, config.ring_bytes, disk_bytes=config.disk_bytes, share=share)
        self.retention = retention_policies(config, model.table)
        """Per row of states which of them are kept."""
        self.config = config
        """The settings."""
        self._model = model
        self._share = share
        self._digest = digest or _digester(config).digest
        self._lock = threading.Lock()
        self._cache: Cache | None = None
        self._closed = False
        self._changed_early = False
        self._opener = threading.Thread(target=self._open, name="ucm-weights", daemon=True)
        self._opener.start()
        self._opener.join(start_wait_s)

    @property
    def current(self) -> Cache | None:
        """The open cache, or None while the weights are not known (and after `close`)."""
        with self._lock:
            return self._cache

    @property
    def identity(self) -> ModelIdentity:
        """The identity as far as it is known; its weights are None until they are digested."""
        cache = self.current
        return self._model.identity if cache is None else cache.identity

    def wait(self, timeout_s: float) -> Cache | None:
        """`current`, after waiting for the weights' digest at most ``timeout_s``."""
        self._opener.join(timeout_s)
        return self.current

    def weights_changed(self) -> bool:
        """This engine finds nothing stored so far, and nobody else finds what it stores from now on.

        False where a tier refused, so that others may still find what was stored, and where it could not be
        done at all: then the engine is without a cache from now on.
        """
        with self._lock:
            cache = self._cache
            self._changed_early = cache is None
        try:
            return cache is None or _changed(cache)
        except Exception as error:  # noqa: BLE001 (the border: going on would find what old weights computed)
            border.failed("weights_changed", error)
            self.close()
            return False

    def follow(self, namespace: str | None, generation: Generation) -> Cache | None:
        """The cache of ``namespace``, opened anew if it moved on elsewhere; None where that is not ours."""
        cache = self.current
        if cache is None or namespace is None:
            return None
        if cache.namespace == namespace:
            return cache
        wanted = cache.identity.with_generation(generation.number, generation.private_token)
        if wanted.namespace != namespace:
            border.complaints.say(
                "namespace",
                f"namespace {namespace} (elsewhere) is not {wanted.namespace} (here): not cached",
            )
            return None
        return self._replace(self._cache_of(wanted))

    def close(self) -> None:
        """Let go of the cache; waits a bounded time for what is being written. Idempotent."""
        with self._lock:
            self._closed = True
        self._replace(None)

    def _open(self) -> None:
        try:
            weights = self._digest(self._model.directory)
            cache = self._cache_of(replace(self._model.identity, weights=weights))
            _introduce(cache)
            self._replace(cache)
        except IdentityError as error:
            border.complaints.say(
                "identity", f"the weights cannot be identified, so nothing is cached: {error}"
            )
        except Exception as error:  # noqa: BLE001 (the border: nothing is cached, the engine goes on)
            border.failed("open", error)

    def _cache_of(self, identity: ModelIdentity) -> Cache:
        return Cache.open(self.config, self._model.table, identity=identity, share=self._share)

    def _replace(self, cache: Cache | None) -> Cache | None:
        with self._lock:
            if cache is not None and self._changed_early:
                _changed(cache)  # what the checkpoint says was overtaken before it was read
                self._changed_early = False
            late = cache if self._closed else None
            stale, self._cache = self._cache, None if self._closed else cache
        for old in (stale, late):
            if old is not None:
                old.close()
        return self.current


def _digester(config: CacheConfig) -> WeightDigester:
    return WeightDigester(config.root / ".digests", sampled=config.weight_digest == "sampled")


def _changed(cache: Cache) -> bool:
    """Tell the cache that its weights changed; False, with a log line, where a tier refused."""
    try:
        cache.weights_changed()
    except StoreError as error:
        _log.error("UCM: the weights changed, but %s", error)
        metrics.ERRORS.labels(where="weights_changed").inc()
        return False
    return True


def _introduce(cache: Cache) -> None:
    """One log line: where the cache is and how full; a root that cannot be used has said so itself."""
    root, rows = cache.statistics().root, ", ".join(cache.stores)
    if root.available:
        _log.info(
            "UCM: cache %s, namespace %s, rows %s; the files of all models hold %.1f of at most %.1f GB",
            *(cache.config.root, cache.namespace, rows, root.used_bytes / 1e9, root.capacity_bytes / 1e9),
        )


def refuse_root(root: Path) -> None:
    """ConfigError when the root, or what leads to it, is no directory; before any file is touched."""
    for path in (root, *root.parents):
        if path.exists():
            if not path.is_dir():
                raise ConfigError(f"root = {str(root)!r}: {str(path)!r} is not a directory; name a directory")
            return
