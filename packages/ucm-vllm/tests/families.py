"""Tiny models of five families: ``config.json`` as data, and the groups that vLLM 0.32 makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from ucm_core.spec.presets import canonical_table
from ucm_core.spec.table import SpecTable

COMMON = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One family as the checkpoint says it and as vLLM groups it."""

    config: Mapping[str, Any]
    groups: tuple[KVCacheGroupSpec, ...]
    dtype: str = "bfloat16"
    states: tuple[tuple[str, str], ...] = ()

    @property
    def table(self) -> SpecTable:
        return canonical_table(
            self.config, grain_tokens=64, kv_dtype=self.dtype, state_dtypes=dict(self.states)
        )


def full(block: int = 128, dtype: torch.dtype = BF16, **changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": block, "num_kv_heads": 2, "head_size": 32, "dtype": dtype} | changes
    )


def window(block: int = 128, **changes: Any) -> SlidingWindowSpec:
    fields = {"block_size": block, "num_kv_heads": 2, "head_size": 32, "dtype": BF16, "sliding_window": 64}
    return SlidingWindowSpec(**fields | changes)


def latent(block: int = 16) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=F32)


def state(shapes: tuple[tuple[int, ...], ...], block: int, **changes: Any) -> MambaSpec:
    fields = {"block_size": block, "shapes": shapes, "dtypes": (F32, F32), "mamba_cache_mode": "align"}
    return MambaSpec(**fields | changes)


def group(layers: list[str], spec: KVCacheSpec, **changes: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(layers, spec, **changes)


def attention(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


MAMBA_SHAPES = ((3, 320), (8, 32, 32))
GDN_SHAPES = ((3, 512), (2, 128, 128))
F32_STATES = (("conv", "float32"), ("ssm", "float32"))

DENSE = TinyModel(
    {**COMMON, "model_type": "llama", "num_hidden_layers": 4},
    (group([attention(n) for n in range(4)], full()),),
)
GPT_OSS = TinyModel(
    {
        **COMMON,
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    (
        group([f"model.layers.{n}.attn.attn" for n in (0, 2)], window()),
        group([f"model.layers.{n}.attn.attn" for n in (1, 3)], full()),
    ),
)
DEEPSEEK = TinyModel(
    {
        **COMMON,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    (group([attention(n) for n in range(3)], latent()),),
    dtype="float32",
)
GRANITE = TinyModel(
    {
        **COMMON,
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    (
        *(group([f"model.layers.{n}.mixer"], state(MAMBA_SHAPES, 128)) for n in (0, 1, 3)),
        group([attention(2)], full(dtype=F32)),
    ),
    dtype="float32",
    states=F32_STATES,
)
QWEN3_NEXT = TinyModel(
    {
        **COMMON,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    (
        *(group([f"model.layers.{n}.linear_attn"], state(GDN_SHAPES, 384)) for n in range(3)),
        group([attention(3)], full(384)),
    ),
    states=F32_STATES,
)

ALL = {"llama": DENSE, "gpt_oss": GPT_OSS, "deepseek": DEEPSEEK, "granite": GRANITE, "qwen3_next": QWEN3_NEXT}
