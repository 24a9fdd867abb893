"""Test double of an attention that computes new queries only, as SGLang's backends on a GPU do.

`torch_native` fills a query for every token of a sequence, also of a prefix that is there already, computes
all of them and keeps those of the new tokens. This one computes only those, with the mask that they have in
the whole. A sequence without a prefix is computed by `torch_native` itself. It is put in place where the
variable `UCM_DOUBLE_NEW_QUERIES` is set, for what is measured of a prefix that is loaded.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "UCM_DOUBLE_NEW_QUERIES"

Tensor = Any
Attend = Callable[..., Tensor]


def install() -> None:
    """Where it is asked for; before other doubles wrap what it replaces."""
    if VARIABLE in os.environ:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

        Backend._run_sdpa_forward_extend = new_queries(Backend._run_sdpa_forward_extend)


def new_queries(attend: Attend) -> Attend:
    """`_run_sdpa_forward_extend` of `torch_native`; ``attend`` is its own."""

    @functools.wraps(attend)
    def extend(
        self: Any,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        *,
        causal: bool = False,
        **named: Any,
    ) -> Tensor:
        lengths = (seq_lens, extend_prefix_lens, extend_seq_lens)
        if encoder_lens is not None or not causal or not extend_prefix_lens.any():
            rest = (req_to_token, req_pool_indices, *lengths, encoder_lens)
            return attend(self, query, output, k_cache, v_cache, *rest, causal=causal, **named)
        begin = 0
        for row, length, prefix, new in zip(req_pool_indices, *map(_numbers, lengths), strict=True):
            slots = req_to_token[row, :length]
            mask = _mask(self, query, length=length, prefix=prefix, window=named.get("sliding_window_size"))
            end = begin + new
            output[begin:end] = _attended(
                query[begin:end], k_cache[slots], v_cache[slots], mask=mask, scale=named.get("scaling")
            )
            begin = end
        return output

    return extend


def _numbers(lengths: Tensor) -> list[int]:
    numbers: list[int] = lengths.tolist()
    return numbers


def _mask(backend: Any, query: Tensor, *, length: int, prefix: int, window: int | None) -> Tensor:
    """Which tokens each new one sees: itself, and those before it that its window has."""
    size = length if window is None or window < 0 else window
    return backend._make_sliding_window_mask(
        q_len=length - prefix,
        kv_len=length,
        sliding_window_size=size,
        device=query.device,
        query_offset=prefix,
    )


def _attended(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, scale: float | None) -> Tensor:
    """`[token, head, element]`; the heads that read one head of the cache stand one below the other."""
    from torch.nn.functional import scaled_dot_product_attention

    tokens, heads, elements = query.shape
    group = heads // key.shape[1]
    stacked = query.movedim(0, 1).reshape(key.shape[1], group * tokens, elements)
    attended = scaled_dot_product_attention(
        stacked.unsqueeze(0),
        key.to(query.dtype).movedim(0, 1).unsqueeze(0),
        value.to(query.dtype).movedim(0, 1).unsqueeze(0),
        attn_mask=mask.repeat(group, 1),
        scale=scale,
    )
    return attended.reshape(heads, tokens, value.shape[2]).movedim(0, 1)
