"""Doubles of what a step of SGLang's is: its batch of requests, and what the forward is given of it."""

from array import array
from types import SimpleNamespace

import numpy as np
from backend_world import GRAIN

from ucm_sglang.prefills import SPECIAL

EXTEND = SimpleNamespace(name="EXTEND", is_extend=lambda: True)
MIXED = SimpleNamespace(name="MIXED", is_extend=lambda: True)
DECODE = SimpleNamespace(name="DECODE", is_extend=lambda: False)
PLAIN = SimpleNamespace(is_none=lambda: True)
EAGLE = SimpleNamespace(is_none=lambda: False)


class TensorDouble:
    """Stands for a tensor of the host."""

    def __init__(self, values):
        self.values = np.asarray(values, np.int64)

    def __getitem__(self, at):
        return TensorDouble(self.values[at])

    def cpu(self):
        return self

    def numpy(self):
        return self.values


def prompt(count, seed=0):
    """Tokens of some prompt."""
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


def request(tokens, pages, *, page=GRAIN, begin=0, end=None, row=0, name="r", salt=None, key=None, **special):
    """A request whose tokens lie in these pages of the pool, of which a step computes ``[begin, end)``."""
    slots = (np.asarray(pages, np.int64)[:, None] * page + np.arange(page)).ravel()
    fields = dict.fromkeys(SPECIAL) | {"skip_radix_cache_insert": False} | special
    return SimpleNamespace(
        rid=name,
        prefix_len=begin,
        extend_end=len(tokens) if end is None else end,
        full_untruncated_fill_ids=array("q", tokens),
        kv=SimpleNamespace(req_pool_idx=row),
        slots=slots,
        cache_salt=salt,
        extra_key=key,
        **fields,
    )


def batch_of(*requests, mode=EXTEND, drafts=PLAIN):
    """A ``ScheduleBatch``; each request has the row of its place."""
    rows = np.zeros((len(requests), 4096), np.int64)
    for row, each in enumerate(requests):
        each.kv.req_pool_idx = row
        rows[row, : len(each.slots)] = each.slots
    pool = SimpleNamespace(req_to_token=TensorDouble(rows))
    return SimpleNamespace(
        reqs=list(requests), forward_mode=mode, spec_algorithm=drafts, req_to_token_pool=pool
    )


def forward_of(batch, **changed):
    """The ``ForwardBatch`` of a batch."""
    parts = [(each, slice(each.prefix_len, each.extend_end)) for each in batch.reqs]
    given = {
        "input_ids": [np.asarray(each.full_untruncated_fill_ids)[part] for each, part in parts],
        "positions": [np.arange(part.start, part.stop) for _, part in parts],
        "out_cache_loc": [each.slots[part] for each, part in parts],
    }
    fields = {name: TensorDouble(np.concatenate(values)) for name, values in given.items()}
    return SimpleNamespace(**({"forward_mode": batch.forward_mode} | fields | changed))
