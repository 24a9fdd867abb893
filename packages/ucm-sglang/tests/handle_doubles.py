"""Doubles of what a store hands out: tickets that a test settles itself."""

from types import SimpleNamespace

import numpy as np

from ucm_core.coordinator.attempts import Attempt
from ucm_core.flow.step import StepLoad
from ucm_core.flow.ticket import Ticket
from ucm_sglang.layer_loads import LinkedLoad

KEYS = np.arange(2, dtype=np.uint8)[:, None].repeat(32, axis=1)


class HandleDouble:
    """Stands for a `UnitLoad` of two objects: says what is asked of it, brings nothing by itself."""

    together, small = 1, False

    def __init__(self, shards):
        self.ticket = Ticket(len(KEYS), shards, durable=False)
        self.submitted, self.cancelled = [], False

    def submit(self, shards, *, urgency=0, here=False):
        self.submitted.append((shards.start, urgency))

    def cancel(self):
        self.cancelled = True
        self.ticket.abandon()

    def settle(self, code, *shards):
        for shard in shards:
            self.ticket.settle(np.arange(len(KEYS)), code, shards=slice(shard, shard + 1))


class ViewDouble:
    """Stands for a `View`: remembers what a load tells the books of its space."""

    def __init__(self):
        self.failed, self.saved, self.released = [], [], []
        self.space = SimpleNamespace(
            coordinator=SimpleNamespace(
                failed=lambda row, keys, moment: self.failed.append((row, len(keys), moment)),
                saved=lambda row, keys: self.saved.append((row, len(keys))),
            ),
            leases=SimpleNamespace(release=self.released.append),
        )

    def load(self, **handles):
        """The load of a request ``r``."""
        return LinkedLoad(StepLoad("r", handles), dict.fromkeys(handles, KEYS), self, 7)


R = Attempt("r")
