"""Keys of a prompt: against a bare loop over hashlib, against themselves at other lengths, against peers.

The bare loop hashes the same bytes in the same order and keeps the digests: nothing that gives the same keys
can do less. Peers get the prompt as the list that engines hold, and hash blocks of the same size.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.frame import Figure, side_by_side, within
from ucm_core.spec.keys import PrefixChain, Tokens, object_keys, row_seed

GRAIN = 128
TOKENS = 1_000_000
ALLOWED_S = 15e-3
SEEDS = tuple(row_seed(bytes(32), name) for name in ("full", "window-128", "mla-576", "state"))


def figures() -> Iterator[Figure]:
    """Yield the first keys of a long prompt, the keys of later tokens, short and long prompts, peers."""
    prompt = np.random.default_rng(0).integers(0, 150_000, TOKENS, dtype=np.uint32)
    yield from first_keys(prompt)
    yield later_keys(prompt)
    yield from lengths()
    yield from peers(prompt.tolist())


def chain_of(tokens: Tokens) -> PrefixChain:
    chain = PrefixChain(grain_tokens=GRAIN)
    chain.extend(tokens)
    return chain


def ids_of_rows(tokens: Tokens) -> list[np.ndarray]:
    digests = chain_of(tokens).block_digests(GRAIN)
    return [object_keys(seed, digests) for seed in SEEDS]


def bare_loop(tokens: np.ndarray) -> list[bytes]:
    body, step, digest, digests = tokens.tobytes(), GRAIN * tokens.itemsize, b"", []
    for begin in range(0, len(body) // step * step, step):
        digest = hashlib.sha256(digest + body[begin : begin + step]).digest()
        digests.append(digest)
    return digests


def first_keys(prompt: np.ndarray) -> Iterator[Figure]:
    """A prompt that nobody has seen, and the ids of its blocks in four rows."""
    assert [row.tobytes() for row in chain_of(prompt).digests] == bare_loop(prompt)
    name, ours = "keys of 1M tokens, ids of 4 rows", partial(ids_of_rows, prompt)
    yield within(name, ours, limit_s=ALLOWED_S)
    yield side_by_side(name, ours, peer="bare hashlib loop", peer_call=partial(bare_loop, prompt), limit=1.4)


def later_keys(prompt: np.ndarray) -> Figure:
    """100 grains, one after the other, behind a long prompt and behind none."""
    grain = prompt[:GRAIN]
    long, short = chain_of(prompt), chain_of(grain)

    def append(chain: PrefixChain) -> None:
        for _ in range(100):
            chain.extend(grain)

    return side_by_side(
        "100 grains behind 1M tokens",
        partial(append, long),
        peer="behind a short prompt",
        peer_call=partial(append, short),
        limit=1.3,
    )


def lengths() -> Iterator[Figure]:
    """As many blocks in one prompt and in prompts of 100 blocks: the cost of a block is the same."""
    for blocks in (1_000, 10_000, 100_000):
        prompt = np.random.default_rng(1).integers(0, 150_000, blocks * GRAIN, dtype=np.uint32)
        parts = np.split(prompt, blocks // 100)
        yield side_by_side(
            f"a prompt of {blocks} blocks",
            partial(ids_of_rows, prompt),
            peer="prompts of 100 blocks",
            peer_call=partial(_ids_of_each, parts),
            limit=1.3,
        )


def _ids_of_each(parts: list[np.ndarray]) -> list[list[np.ndarray]]:
    return [ids_of_rows(part) for part in parts]


def peers(prompt: list[int]) -> Iterator[Figure]:
    """Yield a figure for every peer that is installed; say which one is not."""
    for name, make in (("vLLM", vllm_blocks), ("LMCache", lmcache_chunks)):
        try:
            call = make(prompt)
        except ImportError as error:
            print(f"{name}: not compared, it is not installed here ({error})", flush=True)
            continue
        yield side_by_side(
            "keys of a list of 1M tokens, ids of 4 rows",
            partial(ids_of_rows, prompt),
            peer=f"{name}, its default hash",
            peer_call=call,
            limit=1.0,
            rounds=5,
        )


def vllm_blocks(prompt: list[int]) -> Callable[[], object]:
    """The loop of vLLM over one request, by the function that it names "sha256"."""
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    hash_block = importlib.import_module("vllm.utils.hashing").sha256
    utils.init_none_hash(hash_block)
    return partial(_vllm_hashes, utils.get_request_block_hasher(GRAIN, hash_block), prompt)


def _vllm_hashes(hasher: Callable[[Any], list[bytes]], prompt: list[int]) -> list[bytes]:
    return hasher(RequestDouble(prompt))


class RequestDouble:
    """Stands for a plain vLLM request: what its block hasher reads of one."""

    def __init__(self, prompt: list[int]) -> None:
        self.all_token_ids, self.num_tokens = prompt, len(prompt)
        self.block_hashes: list[bytes] = []
        self.mm_features: list[object] = []
        self.lora_request = self.cache_salt = self.prompt_embeds = None


def lmcache_chunks(prompt: list[int]) -> Callable[[], object]:
    """LMCache's token database with its own default hash, told to use chunks of our size."""
    database = importlib.import_module("lmcache.v1.token_database").ChunkedTokenDatabase()
    database.chunk_size = GRAIN
    return lambda: list(database.process_tokens(tokens=prompt, make_key=False))
