"""Doubles of what a start has of its engine: weights that need not be read, and who tells of new ones."""

from backend_world import WEIGHTS

from ucm_core.engine_cache import EngineCache
from ucm_sglang.start import Start


class StartDouble(Start):
    """Stands for a start whose weights need not be read."""

    __slots__ = ()

    def open_cache(self):
        return EngineCache(self.model, self.config, digest=lambda _: WEIGHTS)


class UpdatesDouble:
    """Stands for `ucm_sglang.weight_updates`."""

    def __init__(self, *, overtaken=False, stale=False):
        self.callbacks, self.is_overtaken, self.is_stale = [], overtaken, stale

    def installed(self):
        return True

    def subscribe(self, callback):
        self.callbacks.append(callback)
        return self.callbacks.clear

    def overtaken(self):
        return self.is_overtaken

    def stale(self):
        return self.is_stale

    def change(self, *flushed):
        for callback in self.callbacks:
            callback(*flushed)
