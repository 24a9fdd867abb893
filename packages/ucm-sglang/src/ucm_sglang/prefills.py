"""What a batch of SGLang's computes of its requests' prefixes: tokens, positions and slots, or why not. Pure.

Only a plain prefill is understood, of requests whose keys and values follow from their tokens, their salt
and their extra key alone. Everything is read from the batch before the forward, and compared with what the
forward was given: a batch that was padded, split, or computes anything else does not agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm_core.spec.keys import RequestIdentity
from ucm_position_key import PositionPath
from ucm_sglang.page_cache import KV_POOL, Pages

__all__ = ["Prefill", "agrees", "is_prefill", "prefills_of", "special", "whole_pages"]

Int64s = npt.NDArray[np.int64]

MODE = "EXTEND"
"""SGLang's name of the mode in which a forward computes nothing but prompts."""

SPECIAL = (
    *("lora_id", "session", "multimodal_inputs", "input_embeds", "positional_embed_overrides"),
    *("token_type_ids", "multi_item_delimiter_indices", "token_indices_to_pool", "decision_layout"),
    *("dllm_config", "skip_radix_cache_insert"),
)
"""What a request may have that its keys and values depend on too, or that keeps it out of SGLang's tree."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What a step computes of one request: tokens ``[begin, len(tokens))`` of its prefix."""

    identity: RequestIdentity
    """What separates its tokens from equal ones."""
    tokens: Int64s
    """From its first token on, ``int64[end]``."""
    begin: int
    """Tokens that were there before the step."""
    slots: Int64s
    """Where what the step computes goes in the pool, ``int64[end - begin]``."""
    is_plain: bool
    """Whether its keys and values follow from identity and tokens."""

    def pages(self, page_tokens: int) -> range:
        """Numbers of the pages all of whose tokens the step computes."""
        return range(-(-self.begin // page_tokens), len(self.tokens) // page_tokens)

    @property
    def computed(self) -> tuple[Int64s, Int64s, Int64s]:
        """Tokens, positions and slots of what the step computes, ``int64[end - begin]`` each."""
        end = len(self.tokens)
        return self.tokens[self.begin :], np.arange(self.begin, end, dtype=np.int64), self.slots


def is_prefill(batch: Any) -> bool:
    """Whether a ``ScheduleBatch`` computes prompts and nothing else, without a draft model."""
    drafts = batch.spec_algorithm
    return bool(batch.forward_mode.name == MODE and (drafts is None or drafts.is_none()))


def prefills_of(batch: Any) -> tuple[Prefill, ...]:
    """The requests of a batch that `is_prefill`, in its order."""
    slots = batch.req_to_token_pool.req_to_token
    return tuple(_prefill(request, slots[request.kv.req_pool_idx]) for request in batch.reqs)


def _prefill(request: Any, slots: Any) -> Prefill:
    begin, end = int(request.prefix_len), int(request.extend_end)
    return Prefill(
        identity=RequestIdentity(cache_salt=request.cache_salt, extra_key=request.extra_key),
        tokens=np.array(request.full_untruncated_fill_ids[:end], dtype=np.int64),
        begin=begin,
        slots=_int64s(slots[begin:end]),
        is_plain=not any(_is_set(getattr(request, name)) for name in SPECIAL),
    )


def agrees(prefills: Sequence[Prefill], forward_batch: Any) -> bool:
    """Whether a ``ForwardBatch`` computes just these tokens, at these positions, into these slots."""
    given = forward_batch.input_ids, forward_batch.positions, forward_batch.out_cache_loc
    read = zip(*(each.computed for each in prefills), strict=True)
    pairs = zip(read, given, strict=True)
    return forward_batch.forward_mode.name == MODE and all(
        np.array_equal(np.concatenate(mine), _int64s(theirs)) for mine, theirs in pairs
    )


def special(prefills: Sequence[Prefill], page_tokens: int) -> int:
    """How many that fill whole pages are not plain."""
    return sum(1 for each in prefills if each.pages(page_tokens) and not each.is_plain)


def whole_pages(prefills: Sequence[Prefill], page_tokens: int) -> list[Pages]:
    """`Prefill.pages` of those that are plain, with names and slots: each page once, of whom has any left."""
    found, named = list[Pages](), set[str]()
    for each in filter(lambda each: each.is_plain, prefills):
        pages = _pages(each, page_tokens, named)
        named.update(pages.hashes)
        found += [pages] if pages.hashes else []
    return found


def _pages(prefill: Prefill, page_tokens: int, named: set[str]) -> Pages:
    """Its whole pages that are not ``named``; two prefixes share pages up to where they part."""
    numbers = prefill.pages(page_tokens)
    path = PositionPath(prefill.identity, grain_tokens=page_tokens)
    path.extend(prefill.tokens[: numbers.stop * page_tokens] if numbers else ())
    hashes = path.page_hashes
    begin = next((page for page in numbers if hashes[page] not in named), numbers.stop)
    slots = prefill.slots[begin * page_tokens - prefill.begin : numbers.stop * page_tokens - prefill.begin]
    before = hashes[begin - 1] if numbers and begin else None
    return Pages(KV_POOL, hashes[begin:], slots, before)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _int64s(tensor: Any) -> Int64s:
    """A tensor of SGLang's as an array of the host; always a copy, since SGLang goes on writing to it."""
    return np.array(tensor.cpu().numpy(), dtype=np.int64)
