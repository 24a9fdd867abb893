"""A double of vLLM over both halves that does at random what vLLM may do, and checks every byte.

It has a pool of blocks that is too small, a prefix cache of its own, preemption and aborts; blocks that it
gives to somebody are filled with garbage at once. What a token's bytes are follows from the whole prefix and
the layer, so that bytes of another request, of another layer or of a token too early show.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import torch
from halves import Halves
from test_round_trip import objects
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from ucm_vllm.worker_half import WorkerHalf

TOKENS, POOL, MOST = 64, 14, 5
"""Of a block; blocks; requests that run at a time."""
LAYERS = [families.attention(number) for number in range(4)]
MODEL = families.TinyModel(
    {**families.COMMON, "model_type": "llama", "num_hidden_layers": 4},
    (families.group(LAYERS, families.full(TOKENS)),),
)
GARBAGE = 0x5555
_WORD = (1 << 64) - 1
_FACTORS = np.arange(1, 129, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def prefixes(tokens: list[int]) -> np.ndarray:
    """A number for the prefix that ends with each token."""
    found, number = [], 12345
    for token in tokens:
        number = (number * 6364136223846793005 + token + 1) & _WORD
        found.append(number)
    return np.array(found, dtype=np.uint64)


def contents(prefix: np.ndarray, layer: int) -> np.ndarray:
    """``int16[tokens, 2 heads, 64]``: K and V of each token."""
    words = (prefix[:, None] ^ np.uint64(layer * 7919 + 1)) * _FACTORS
    return (words >> np.uint64(40)).astype(np.int16).reshape(len(prefix), 2, 64)


def prompt(choice: random.Random) -> list[int]:
    """One of a few prompts, which share beginnings."""
    family, cut = choice.randrange(3), choice.choice([128, 200, 420])
    head, tail = random.Random(family), random.Random(17 * family + choice.randrange(2))
    every = [head.randrange(3, 500) for _ in range(cut)] + [tail.randrange(3, 500) for _ in range(420 - cut)]
    return every[: choice.randrange(40, 420)]


class Running:
    """A request."""

    def __init__(self, request_id: str, tokens: list[int], *, outputs: int) -> None:
        self.id, self.most = request_id, len(tokens) + outputs
        self.request = Request(request_id, tokens, SamplingParams(max_tokens=999), None)
        self.prefix = prefixes(tokens)
        self.pages: list[int] = []
        self.computed = self.local = 0

    @property
    def left(self) -> int:
        return len(self.request.all_token_ids) - self.computed

    def append(self) -> None:
        self.request.append_output_token_ids(int(self.prefix[-1] % 497) + 3)
        self.prefix = prefixes(list(self.request.all_token_ids))


class Pages:
    """The pool, and which of its blocks hold which prefix."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice
        self.free = list(range(1, POOL))
        self.fresh: list[int] = []
        self._users = [0] * POOL
        self._of: dict[int, int] = {}
        self._by_prefix: dict[int, int] = {}

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop(self._choice.choice([0, -1])) for _ in range(count)]
        for page in taken:
            self.forget(page)
            self._users[page] = 1
        self.fresh += taken
        return taken

    def give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self.free.append(page)

    def share(self, asked: Running) -> list[int]:
        """Blocks that hold the beginning of the request, but not its last token."""
        found = []
        for end in range(TOKENS, len(asked.prefix), TOKENS):
            page = self._by_prefix.get(int(asked.prefix[end - 1]))
            if page is None:
                break
            if not self._users[page]:
                self.free.remove(page)
            self._users[page] += 1
            found.append(page)
        return found

    def note(self, asked: Running) -> None:
        for index in range(asked.computed // TOKENS):
            page, prefix = asked.pages[index], int(asked.prefix[(index + 1) * TOKENS - 1])
            if prefix not in self._by_prefix and page not in self._of:
                self._by_prefix[prefix], self._of[page] = page, prefix

    def forget(self, page: int) -> None:
        prefix = self._of.pop(page, None)
        if prefix is not None:
            del self._by_prefix[prefix]


class Memory:
    """Tensors of all layers; K of a block is transposed, as the CPU backend has it."""

    def __init__(self, engine: Halves) -> None:
        self._layers = [
            engine.memory[layer].view(torch.int16).numpy().reshape(-1, 2, 4096) for layer in LAYERS
        ]

    def spoil(self, pages: list[int]) -> None:
        for layer in self._layers:
            layer[pages] = GARBAGE

    def write(self, layer: int, asked: Running, begin: int, end: int) -> None:
        for _, k, v, right in self._each(layer, asked, begin, end):
            k[:], v[:] = right[:, :, :32], right[:, :, 32:]

    def wrong(self, layer: int, asked: Running, begin: int, end: int) -> set[int]:
        """Blocks in which ``[begin, end)`` of the request is not what it should be."""
        return {
            page
            for page, k, v, right in self._each(layer, asked, begin, end)
            if not (np.array_equal(k, right[:, :, :32]) and np.array_equal(v, right[:, :, 32:]))
        }

    def _each(self, layer: int, asked: Running, begin: int, end: int) -> Iterator[tuple[int, Any, Any, Any]]:
        for index in range(begin // TOKENS, -(-end // TOKENS)):
            first, last = max(begin, index * TOKENS), min(end, (index + 1) * TOKENS)
            block, part = (
                self._layers[layer][asked.pages[index]],
                slice(first % TOKENS, (last - 1) % TOKENS + 1),
            )
            k = block[:, :2048].reshape(2, 32, TOKENS).transpose(2, 0, 1)[part]
            v = block[:, 2048:].reshape(2, TOKENS, 32).transpose(1, 0, 2)[part]
            yield asked.pages[index], k, v, contents(asked.prefix[first:last], layer)


Scheduled = list[tuple[Running, int, int]]
"""(request, tokens that were computed before the step, tokens that it computes)."""


class RandomEngine:
    """Steps, aborts and damage, in any order."""

    def __init__(self, root: Path, seed: int, **settings: Any) -> None:
        self.choice = random.Random(seed)
        self.halves = Halves(MODEL, root, fill="zero", align=TOKENS, ring_bytes="2MiB", **settings)
        self.memory, self.pages, self._root = Memory(self.halves), Pages(self.choice), root
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.loading: dict[str, Running] = {}
        self.held: dict[str, list[int]] = {}
        """Blocks of finished requests, until the worker says that nothing reads them."""
        self.seen: list[Running] = []
        self.wrong: list[str] = []
        self.loads = 0
        self._scheduled: Scheduled = []
        self._used: list[tuple[Running, set[int]]] = []
        self.halves.worker.before_step = self._before_step  # type: ignore[method-assign]
        self.halves.forward = self._forward  # type: ignore[method-assign]

    def arrive(self) -> None:
        asked = Running(f"r{len(self.seen)}", prompt(self.choice), outputs=self.choice.randrange(1, 90))
        self.waiting.append(asked)
        self.seen.append(asked)

    def abort(self) -> None:
        every = [*self.running, *self.waiting, *self.loading.values()]
        if every:
            self.end(self.choice.choice(every))

    def end(self, asked: Running) -> None:
        """The request is over: its blocks are free, unless somebody reads or writes them."""
        kept = self.halves.scheduler.finished(asked.id) or asked.id in self.loading
        self.running = [other for other in self.running if other is not asked]
        self.waiting = [other for other in self.waiting if other is not asked]
        self.loading.pop(asked.id, None)
        if kept:
            self.held[asked.id] = asked.pages
        else:
            self.pages.give_back(asked.pages)

    def forget(self) -> None:
        """Nothing that is free can be shared any more."""
        for page in self.pages.free:
            self.pages.forget(page)

    def damage(self) -> None:
        """A file is gone, cut, flipped, or that of another key."""
        files = objects(self._root)
        if len(files) < 2:
            return
        one, other = self.choice.sample(files, 2)
        how = self.choice.randrange(4)
        if how == 0:
            one.unlink()
        elif how == 1:
            os.truncate(one, self.choice.randrange(9000))
        else:
            new = bytearray(one.read_bytes())
            new[self.choice.randrange(len(new))] ^= 8
            copy = one.with_name("copy")
            copy.write_bytes(new)
            if how == 2:
                shutil.copy(other, copy)
            copy.replace(one)

    # -- the step

    def step(self) -> None:
        preempted: set[str] = set()
        self.pages.fresh = []
        scheduled = self._schedule_running(preempted)
        if not preempted:
            scheduled += self._schedule_waiting()
        plan = self.halves.plan(
            *((asked.request, computed, count, (list(asked.pages),)) for asked, computed, count in scheduled),
            preempted=preempted,
        )
        self._scheduled = scheduled
        broken = self._execute(plan)
        for page in broken:
            self.pages.forget(page)
        for asked, computed, count in scheduled:
            self._compute(asked, computed + count, broken)

    def _schedule_running(self, preempted: set[str]) -> Scheduled:
        scheduled: Scheduled = []
        for asked in list(self.running):
            count = min(self.choice.choice([30, 64, 250]), asked.left)
            more = -(-(asked.computed + count) // TOKENS) - len(asked.pages)
            while asked in self.running and more > len(self.pages.free):
                self._preempt(self.running.pop(), preempted)
            if asked in self.running:
                asked.pages += self.pages.take(max(0, more))
                scheduled.append((asked, asked.computed, count))
        return [entry for entry in scheduled if entry[0] in self.running]

    def _preempt(self, asked: Running, preempted: set[str]) -> None:
        self.pages.give_back(asked.pages)
        asked.pages, asked.computed = [], 0
        preempted.add(asked.id)
        self.waiting.insert(0, asked)

    def _schedule_waiting(self) -> Scheduled:
        scheduled: Scheduled = []
        for asked in list(self.waiting)[: MOST - len(self.running)]:
            shared = self.pages.share(asked)
            local = len(shared) * TOKENS
            external, later = self.halves.scheduler.matched_tokens(asked.request, local)
            asked.local, asked.computed = local, local + external
            count = 0 if later and external else min(200, asked.left)
            more = -(-(asked.computed + count) // TOKENS) - len(shared)
            if more > len(self.pages.free):
                self.pages.give_back(shared)
                break
            asked.pages = shared + self.pages.take(more)
            self.halves.scheduler.allocated(asked.request, (list(asked.pages),), external_tokens=external)
            self.waiting.remove(asked)
            self.loads += external > 0
            if count:
                self.running.append(asked)
                scheduled.append((asked, asked.computed, count))
            else:
                self.loading[asked.id] = asked
        return scheduled

    def _execute(self, plan: Any) -> set[int]:
        """All hooks of the step; the blocks that could not be filled."""
        self._used = []
        step = self.halves.execute(plan)
        wrong = ((asked.id, pages - step.broken) for asked, pages in self._used)
        self.wrong += [f"{request_id}: {pages}" for request_id, pages in wrong if pages]
        for request_id in step.sent:
            self.pages.give_back(self.held.pop(request_id))
        for request_id in step.received:
            self._receive(request_id, failed=request_id in step.failed)
        return step.broken

    def _before_step(self, plan: Any) -> None:
        """From here on a step may write the blocks that it was given."""
        WorkerHalf.before_step(self.halves.worker, plan)
        self.memory.spoil(self.pages.fresh)

    def _forward(self, plan: Any) -> None:
        """Compute all layers, some hooks twice or not at all; note what was wrong when it was needed."""
        loads = {load.request_id for load in plan.loads if not load.asynchronous}
        skips = self.choice.random() < 0.1
        for layer, name in enumerate(LAYERS):
            for _ in range(self.choice.choice([0, 1] if skips else [1, 1, 1, 2])):
                self.halves.worker.before_layer(plan, name)
            for asked, computed, _ in self._scheduled:
                if asked.id in loads:
                    self._used.append((asked, self.memory.wrong(layer, asked, asked.local, computed)))
            for asked, computed, count in self._scheduled:
                self.memory.write(layer, asked, computed, computed + count)
            for _ in range(self.choice.choice([0, 1] if skips else [1, 1, 1, 2])):
                self.halves.worker.after_layer(plan, name)

    def _receive(self, request_id: str, *, failed: bool) -> None:
        """An asynchronous load has ended."""
        asked = self.loading.pop(request_id, None)
        if asked is None:
            self.pages.give_back(self.held.pop(request_id))
        elif failed:
            self._preempt(asked, set())
        else:
            pages = set().union(
                *(self.memory.wrong(layer, asked, asked.local, asked.computed) for layer in range(4))
            )
            self.wrong += [f"{request_id}: {pages}"] if pages else []
            self.halves.scheduler.allocated(asked.request, (list(asked.pages),), external_tokens=0)
            self.pages.note(asked)
            self.running.append(asked)

    def _compute(self, asked: Running, computed: int, broken: set[int]) -> None:
        """A step has computed the request up to here, or up to the first block that could not be filled."""
        good = [index * TOKENS for index, page in enumerate(asked.pages) if page in broken]
        asked.computed = min([computed, *good])
        if not good:
            self.pages.note(asked)
        if not asked.left:
            asked.append()
            if len(asked.prefix) >= asked.most:
                self.end(asked)
