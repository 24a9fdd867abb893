"""The double that computes new queries only gives what `torch_native` does, which computes all."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import import_doubles
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
import_doubles.install()
import ucm_sglang_new_queries  # noqa: E402 (of the stories; found once the doubles are installed)
from sglang.srt.layers.attention import torch_native_backend  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402

OWN = TorchNativeAttnBackend._run_sdpa_forward_extend
SLOTS = 512
BACKEND = SimpleNamespace(
    use_sliding_window_kv_pool=False,
    token_to_kv_pool=None,
    _make_sliding_window_mask=TorchNativeAttnBackend._make_sliding_window_mask,
)


@dataclass(frozen=True)
class Shape:
    """Heads and elements of a model."""

    heads: int
    cached_heads: int
    key_elements: int
    value_elements: int


SHAPES = {
    "heads": Shape(4, 4, 16, 16),
    "grouped": Shape(8, 2, 16, 16),
    "latents": Shape(4, 1, 72, 64),
}
BATCHES = {
    "one token behind a prefix": [(64, 1)],
    "a page behind a prefix": [(64, 16)],
    "more than the prefix": [(16, 48)],
    "several": [(64, 16), (0, 32), (48, 5), (1, 1)],
    "no prefix": [(0, 40)],
}


def attended(attend: Any, shape: Shape, batch: list[tuple[int, int]], **named: Any) -> Any:
    """What an attention makes of the new tokens of a batch, of (prefix, new) each."""
    random = torch.Generator().manual_seed(7)
    prefixes, new = (torch.tensor(column) for column in zip(*batch, strict=True))
    query = torch.randn(int(new.sum()), shape.heads, shape.key_elements, generator=random)
    key = torch.randn(SLOTS, shape.cached_heads, shape.key_elements, generator=random)
    value = key[..., : shape.value_elements] if shape.cached_heads == 1 else torch.randn_like(key)
    slots = torch.randperm(SLOTS, generator=random)[: len(batch) * 96].reshape(len(batch), 96)
    output = torch.empty(len(query), shape.heads, shape.value_elements)
    rows, lengths = torch.arange(len(batch)), (prefixes + new, prefixes, new)
    grouped = shape.heads != shape.cached_heads
    options = {"scaling": 0.2, "enable_gqa": grouped, "causal": True} | named
    attend(BACKEND, query, output, key, value, slots, rows, *lengths, **options)
    return output


@pytest.mark.parametrize("window", [None, 20], ids=["whole", "window"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_gives_what_torch_native_gives(
    shape: Shape, batch: list[tuple[int, int]], window: int | None
) -> None:
    torch.manual_seed(1)
    expected = attended(OWN, shape, batch, sliding_window_size=window)
    torch.manual_seed(1)
    ours = attended(ucm_sglang_new_queries.new_queries(OWN), shape, batch, sliding_window_size=window)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def queries(attend: Any, batch: list[tuple[int, int]]) -> int:
    """How many rows of queries an attention computes of one head."""
    real = torch.nn.functional.scaled_dot_product_attention
    counted = mock.Mock(side_effect=real)
    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", counted),
        mock.patch.object(torch_native_backend, "scaled_dot_product_attention", counted),
    ):
        attended(attend, SHAPES["heads"], batch)
    return sum(call.args[0].shape[-2] for call in counted.call_args_list)


def test_it_computes_no_query_of_a_prefix() -> None:
    assert queries(OWN, BATCHES["several"]) == 80 + 32 + 53 + 2
    assert queries(ucm_sglang_new_queries.new_queries(OWN), BATCHES["several"]) == 16 + 32 + 5 + 1


def test_what_is_not_causal_is_left_to_torch_native() -> None:
    theirs = mock.Mock()
    attended(ucm_sglang_new_queries.new_queries(theirs), SHAPES["heads"], [(64, 16)], causal=False)
    assert theirs.call_args.kwargs["causal"] is False


def test_it_is_put_in_place_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchNativeAttnBackend, "_run_sdpa_forward_extend", OWN)
    monkeypatch.delenv(ucm_sglang_new_queries.VARIABLE, raising=False)
    ucm_sglang_new_queries.install()
    assert TorchNativeAttnBackend._run_sdpa_forward_extend is OWN
    monkeypatch.setenv(ucm_sglang_new_queries.VARIABLE, "1")
    ucm_sglang_new_queries.install()
    assert TorchNativeAttnBackend._run_sdpa_forward_extend.__wrapped__ is OWN
