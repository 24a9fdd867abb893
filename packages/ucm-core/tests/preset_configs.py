"""One configuration per known family, as its ``config.json`` says it, and what each layer of it holds.

Numbers are the defaults of the families' configuration classes (transformers, vLLM's own) cut down to a few
layers; the first tests of each family (`test_presets.py`) use other, tiny ones.
"""

from __future__ import annotations

from typing import Any

STATE_DTYPES = {"conv": "bfloat16", "ssm": "float32", "index": "float8_e4m3fn"}

FULL, SLIDING, LINEAR, CHUNKED = (
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "chunked_attention",
)
HEADS = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
LATENT = {"num_attention_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
INDEXED = LATENT | {"index_head_dim": 128, "index_topk": 2048, "num_hidden_layers": 4}
DELTA = HEADS | {
    "num_hidden_layers": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MAMBA2 = HEADS | {
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
SPARSE = {
    "sparse_index_dim": 128,
    "sparse_attention_freq": [0, 1, 1],
    "sparse_disable_index_value": [0, 1, 1],
}

# model_type: (configuration, row name up to its geometry -> layers)
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "llama": (HEADS | {"num_hidden_layers": 2}, {"full": (0, 1)}),
    "mistral": (HEADS | {"num_hidden_layers": 2, "sliding_window": 4096}, {"window-4096": (0, 1)}),
    "qwen2": (HEADS | {"num_hidden_layers": 2}, {"full": (0, 1)}),
    "qwen3": (HEADS | {"num_hidden_layers": 2}, {"full": (0, 1)}),
    "gemma3_text": (
        HEADS | {"num_hidden_layers": 7, "sliding_window": 1024},
        {"window-1024": (0, 1, 2, 3, 4, 6), "full": (5,)},
    ),
    "gpt_oss": (HEADS | {"num_hidden_layers": 4}, {"window-128": (0, 2), "full": (1, 3)}),
    "gemma3n_text": (
        HEADS | {"num_hidden_layers": 15, "num_kv_shared_layers": 5},
        {"window-512": (0, 1, 2, 3, 5, 6, 7, 8), "full": (4, 9)},
    ),
    "llama4_text": (HEADS | {"num_hidden_layers": 5}, {"chunk-8192": (0, 1, 2, 4), "full": (3,)}),
    "mllama_text_model": (
        HEADS | {"num_hidden_layers": 5, "cross_attention_layers": [3]},
        {"full": (0, 1, 2, 4), "cross": (3,)},
    ),
    "deepseek_v2": (LATENT | {"num_hidden_layers": 3}, {"mla-576": (0, 1, 2)}),
    "deepseek_v3": (
        LATENT | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1},
        {"mla-576": (0, 1, 2)},
    ),
    "deepseek_v32": (
        INDEXED | {"num_nextn_predict_layers": 1},
        {"mla-576": (0, 1, 2, 3), "indexer-128": (0, 1, 2, 3)},
    ),
    "glm_moe_dsa": (
        INDEXED | {"indexer_types": ["full", "shared", "full", "shared"], "num_nextn_predict_layers": 1},
        {"mla-576": (0, 1, 2, 3), "indexer-128": (0, 2)},
    ),
    "deepseek_v4": (
        {"num_hidden_layers": 4, "compress_ratios": [0, 128, 4, 128, 0], "num_nextn_predict_layers": 1},
        {
            "mla-512-window-128": (0, 1, 2, 3),
            "mla-512-c128": (1, 3),
            "compressor-128": (1, 3),
            "mla-512-c4": (2,),
            "indexer-128-c4": (2,),
            "compressor-4": (2,),
        },
    ),
    "kimi_linear": (
        LATENT
        | {
            "num_hidden_layers": 4,
            "linear_attn_config": {
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
            },
        },
        {"kda": (0, 1, 2), "mla-576": (3,)},
    ),
    "minimax": (HEADS | {"num_hidden_layers": 3}, {"full": (0, 2), "lightning": (1,)}),
    "minimax_text_01": (
        HEADS | {"num_hidden_layers": 3, "head_dim": 128, "attn_type_list": [0, 0, 1]},
        {"lightning": (0, 1), "full": (2,)},
    ),
    "minimax_m1": (
        HEADS | {"num_hidden_layers": 3, "head_dim": 128, "attn_type_list": [0, 1, 0]},
        {"lightning": (0, 2), "full": (1,)},
    ),
    "minimax_m3_text": (
        HEADS | {"num_hidden_layers": 3, "head_dim": 128, "sparse_attention_config": SPARSE},
        {"full": (0, 1, 2), "indexer-128": (1, 2)},
    ),
    "minimax_m3_vl_text": (
        HEADS
        | {
            "num_hidden_layers": 3,
            "index_head_dim": 128,
            "layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
        },
        {"full": (0, 1, 2), "indexer-128": (1, 2)},
    ),
    "granitemoehybrid": (
        MAMBA2 | {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
        {"mamba2": (0, 2), "full": (1,)},
    ),
    "bamba": (MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [1]}, {"mamba2": (0, 2), "full": (1,)}),
    "falcon_h1": (MAMBA2 | {"num_hidden_layers": 2}, {"full": (0, 1), "mamba2": (0, 1)}),
    "nemotron_h": (
        HEADS
        | {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M-*M",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
        },
        {"mamba2": (0, 3), "full": (2,)},
    ),
    "qwen3_next": (
        DELTA | {"num_nextn_predict_layers": 1},
        {"gdn": (0, 1, 2, 4, 5, 6), "full": (3, 7)},
    ),
    "qwen3_5_text": (DELTA | {"mtp_num_hidden_layers": 1}, {"gdn": (0, 1, 2, 4, 5, 6), "full": (3, 7)}),
    "qwen3_5_moe_text": (
        DELTA | {"mtp_num_hidden_layers": 1},
        {"gdn": (0, 1, 2, 4, 5, 6), "full": (3, 7)},
    ),
}

HOLDS_NOTHING = {("nemotron_h", 1)}
"""(family, layer): a layer that is only a perceptron."""


def config_of(model_type: str, **fields: Any) -> dict[str, Any]:
    """The configuration of a family, some of its keys replaced."""
    return {"model_type": model_type} | FAMILIES[model_type][0] | fields
