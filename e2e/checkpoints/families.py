"""The families the stories run on, in the smallest sizes that real engines accept, or larger for benchmarks.

Names and shapes are those of published checkpoints.

| family | cache semantics | architecture |
| --- | --- | --- |
| dense | full attention, grouped queries | Llama |
| window | full attention and a sliding window of 64, alternating | gpt-oss |
| sliding | full attention and a sliding window of 48, alternating | Gemma 3, renamed |
| mla | multi-head latent attention | DeepSeek-V3 without experts and without a compressed query |
| mamba | Mamba2 state and full attention | Granite hybrid |
| gdn | gated delta net state and full attention | Qwen3-Next |
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
YARN: dict[str, object] = {"rope_type": "yarn", "type": "yarn", "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}


@dataclass(frozen=True, slots=True)
class Size:
    """How large a family is."""

    hidden: int = HIDDEN
    inner: int = 256
    """Width of its MLPs; experts have a part of it."""
    periods: int = 1
    """How often its pattern of layers comes."""
    positions: int = 4096

    @property
    def settings(self) -> dict[str, object]:
        """What it says in `config.json`."""
        return {"hidden_size": self.hidden, "max_position_embeddings": self.positions}


TINY = Size()
BENCH = Size(hidden=512, inner=1408, periods=2, positions=8192)
"""Where computing a prompt takes much longer than stepping the engine."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor, drawn from a normal distribution."""

    name: str
    shape: tuple[int, ...]
    scale: float = 0.12
    """Standard deviation; large enough that logits are not degenerate."""
    mean: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    """A checkpoint to write: its `config.json` and its tensors."""

    config: dict[str, object]
    weights: tuple[Weight, ...]
    dtype: str = "BF16"
    """How the tensors are stored: `BF16` or `F32`."""


def _common(architecture: str, model_type: str, **more: object) -> dict[str, object]:
    config: dict[str, object] = {"architectures": [architecture], "model_type": model_type}
    config |= {"dtype": "bfloat16"}
    config |= {"vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": 256, "hidden_act": "silu"}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    config |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "attention_bias": False}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    config |= {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return config | more


def _ones(name: str, length: int) -> Weight:
    return Weight(name, (length,), scale=0.0, mean=1.0)


def _zeros(name: str, length: int) -> Weight:
    return Weight(name, (length,), scale=0.0)


def _linear(
    name: str, rows: int, columns: int, *, bias: bool = False, scale: float = 0.12
) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (rows, columns), scale)
    if bias:
        yield Weight(f"{name}.bias", (rows,), scale)


def _ends(vocabulary: int, hidden: int, *, norm_mean: float = 1.0) -> Iterator[Weight]:
    yield Weight("model.embed_tokens.weight", (vocabulary, hidden))
    yield Weight("lm_head.weight", (vocabulary, hidden))
    yield Weight("model.norm.weight", (hidden,), scale=0.0, mean=norm_mean)


def _norms(layer: str, hidden: int, *, mean: float = 1.0) -> Iterator[Weight]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Weight(f"{layer}.{name}.weight", (hidden,), scale=0.0, mean=mean)


def _attention(
    layer: str, hidden: int = HIDDEN, *, bias: bool = False, gated: bool = False, head_dim: int = HEAD_DIM
) -> Iterator[Weight]:
    prefix = f"{layer}.self_attn"
    yield from _linear(f"{prefix}.q_proj", (1 + gated) * HEADS * head_dim, hidden, bias=bias)
    yield from _linear(f"{prefix}.k_proj", KV_HEADS * head_dim, hidden, bias=bias)
    yield from _linear(f"{prefix}.v_proj", KV_HEADS * head_dim, hidden, bias=bias)
    yield from _linear(f"{prefix}.o_proj", hidden, HEADS * head_dim, bias=bias)


def _gated_mlp(prefix: str, hidden: int, inner: int, *, scale: float = 0.12) -> Iterator[Weight]:
    yield from _linear(f"{prefix}.gate_proj", inner, hidden, scale=scale)
    yield from _linear(f"{prefix}.up_proj", inner, hidden, scale=scale)
    yield from _linear(f"{prefix}.down_proj", hidden, inner, scale=scale)


def dense_family() -> Family:
    """Llama, 4 layers, 2 KV heads of 32."""
    weights = [*_ends(512, HIDDEN)]
    for layer in (f"model.layers.{index}" for index in range(4)):
        weights += [*_norms(layer, HIDDEN), *_attention(layer), *_gated_mlp(f"{layer}.mlp", HIDDEN, 256)]
    return Family(_common("LlamaForCausalLM", "llama", num_hidden_layers=4), tuple(weights))


def demo_family(*, layers: int, hidden: int, inner: int) -> Family:
    """Llama with 8192 positions, for long conversations; heads of 64, 4 queries to a KV head."""
    heads, kv_heads = hidden // 64, hidden // 256
    scale = 1.4 / hidden**0.5
    weights = [*_ends(512, hidden)]
    for layer in (f"model.layers.{index}" for index in range(layers)):
        weights += [*_norms(layer, hidden), *_gated_mlp(f"{layer}.mlp", hidden, inner, scale=scale)]
        for name, rows in (("q", hidden), ("k", kv_heads * 64), ("v", kv_heads * 64), ("o", hidden)):
            weights += _linear(f"{layer}.self_attn.{name}_proj", rows, hidden, scale=scale)
    config = _common("LlamaForCausalLM", "llama", num_hidden_layers=layers, max_position_embeddings=8192)
    config |= {"hidden_size": hidden, "intermediate_size": inner, "head_dim": 64}
    return Family(config | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}, tuple(weights))


def window_family(size: Size = TINY) -> Family:
    """gpt-oss, 4 layers a period: sliding window of 64 and full attention in turn, 4 experts."""
    hidden, layers = size.hidden, 4 * size.periods
    weights = [*_ends(512, hidden)]
    for layer in (f"model.layers.{index}" for index in range(layers)):
        experts = f"{layer}.mlp.experts"
        weights += [*_norms(layer, hidden), *_attention(layer, hidden, bias=True)]
        weights += [
            Weight(f"{layer}.self_attn.sinks", (HEADS,)),
            *_linear(f"{layer}.mlp.router", 4, hidden, bias=True),
        ]
        weights += [
            Weight(f"{experts}.gate_up_proj", (4, hidden, size.inner)),
            Weight(f"{experts}.gate_up_proj_bias", (4, size.inner)),
        ]
        weights += [
            Weight(f"{experts}.down_proj", (4, size.inner // 2, hidden)),
            Weight(f"{experts}.down_proj_bias", (4, hidden)),
        ]
    config = _common(
        "GptOssForCausalLM", "gpt_oss", num_hidden_layers=layers, sliding_window=64, attention_bias=True
    )
    config |= {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    config |= {"intermediate_size": size.inner // 2}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0, "rope_theta": 150000.0}
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {"original_max_position_embeddings": 4096, "truncate": False}
    return Family(config | size.settings | {"rope_parameters": rope}, tuple(weights))


def sliding_family() -> Family:
    """Gemma 3, 4 layers: sliding window of 48 and full attention in turn, float32.

    Under its own name SGLang keeps its windows in the pool of full attention. Under another one it has a pool
    for them when the config says which layers have one, in words of SGLang's.
    """
    scale, kinds = 0.08, ["sliding_attention", "full_attention"] * 2
    # this architecture's RMS norms store the difference from one, and it scales embeddings up
    weights = [Weight("model.embed_tokens.weight", (512, HIDDEN), 0.02), _zeros("model.norm.weight", HIDDEN)]
    for layer in (f"model.layers.{index}" for index in range(len(kinds))):
        weights += [*_attention(layer), *_gated_mlp(f"{layer}.mlp", HIDDEN, 256, scale=scale)]
        weights += [_zeros(f"{layer}.self_attn.{name}_norm.weight", HEAD_DIM) for name in ("q", "k")]
        weights += _norms(layer, HIDDEN, mean=0.0)
        weights += [
            _zeros(f"{layer}.{name}_feedforward_layernorm.weight", HIDDEN) for name in ("pre", "post")
        ]
    config = _common("SlidingForCausalLM", "gemma3_text", num_hidden_layers=len(kinds), layer_types=kinds)
    config |= {"sliding_window": 48, "query_pre_attn_scalar": HEAD_DIM, "rope_local_base_freq": 10000.0}
    config |= {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    config |= {"is_hybrid_swa": True, "hybrid_layer_pattern": [int(kind == kinds[0]) for kind in kinds]}
    del config["rope_parameters"], config["hidden_act"]
    return Family(config, tuple(weights), dtype="F32")


def mla_family(size: Size = TINY) -> Family:
    """DeepSeek-V3, 3 layers a period with dense MLPs, no query compression, YaRN rotary scaling, float32.

    Only in this shape do CPU prefill and decode kernels agree, so that tokens are an oracle for MLA.
    """
    heads, latent, rope, nope, value, scale = 2, 512, 64, 32, 32, 0.08
    hidden, layers = size.hidden, 3 * size.periods
    weights = [
        Weight("model.embed_tokens.weight", (512, hidden), 0.4),
        Weight("lm_head.weight", (512, hidden), scale),
    ]
    weights.append(_ones("model.norm.weight", hidden))
    for layer in (f"model.layers.{index}" for index in range(layers)):
        attention = f"{layer}.self_attn"
        weights += [*_norms(layer, hidden), *_gated_mlp(f"{layer}.mlp", hidden, size.inner, scale=scale)]
        weights += _linear(f"{attention}.q_proj", heads * (nope + rope), hidden, scale=scale)
        weights += _linear(f"{attention}.kv_a_proj_with_mqa", latent + rope, hidden, scale=scale)
        weights.append(_ones(f"{attention}.kv_a_layernorm.weight", latent))
        weights += _linear(f"{attention}.kv_b_proj", heads * (nope + value), latent, scale=2 * scale)
        weights += _linear(f"{attention}.o_proj", hidden, heads * value, scale=2 * scale)
    config = _mla_config(heads, latent, rope, nope) | size.settings
    config |= {"intermediate_size": size.inner, "num_hidden_layers": layers, "first_k_dense_replace": layers}
    scaling = {"factor": size.positions / 1024, "original_max_position_embeddings": 1024}
    config["rope_scaling"] = YARN | scaling
    return Family(config, tuple(weights), dtype="F32")


def _mla_config(heads: int, latent: int, rope: int, nope: int) -> dict[str, object]:
    config = _common("DeepseekV3ForCausalLM", "deepseek_v3", dtype="float32")
    config |= {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": latent,
        "q_lora_rank": None,
    }
    config |= {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": nope,
        "moe_intermediate_size": 64,
    }
    config |= {"moe_layer_freq": 1, "n_routed_experts": 4, "n_shared_experts": 1}
    config |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    config |= {
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    del config["head_dim"], config["rope_parameters"]
    return config


def mamba_family(size: Size = TINY) -> Family:
    """Granite hybrid, a period mamba, mamba, attention, mamba: states of 32 by 32, convolution of 4."""
    hidden, kinds = size.hidden, ["mamba", "mamba", "attention", "mamba"] * size.periods
    head_dim = hidden // HEADS  # whatever its `config.json` says
    weights = [*_ends(512, hidden)]
    for index, kind in enumerate(kinds):
        layer = f"model.layers.{index}"
        weights += [
            *_norms(layer, hidden),
            *(
                _attention(layer, hidden, head_dim=head_dim)
                if kind == "attention"
                else _mamba2(f"{layer}.mamba", hidden)
            ),
        ]
        weights += _linear(f"{layer}.shared_mlp.input_linear", size.inner, hidden)
        weights += _linear(f"{layer}.shared_mlp.output_linear", hidden, size.inner // 2)
    config = _common(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", num_hidden_layers=len(kinds), layer_types=kinds
    )
    config |= {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": size.inner // 2}
    config |= {"head_dim": head_dim}
    config |= {
        "mamba_n_heads": hidden // 16,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
    }
    config |= {"mamba_expand": 2, "mamba_chunk_size": 64, "mamba_conv_bias": True, "mamba_proj_bias": False}
    config |= {"attention_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0}
    config |= {"residual_multiplier": 1.0, "position_embedding_type": None}
    return Family(config | size.settings, tuple(weights))


def _mamba2(prefix: str, hidden: int, *, state: int = 32) -> Iterator[Weight]:
    inner, heads = 2 * hidden, hidden // 16
    channels = inner + 2 * state
    yield from _linear(f"{prefix}.in_proj", inner + channels + heads, hidden)
    yield Weight(f"{prefix}.conv1d.weight", (channels, 1, 4))
    yield Weight(f"{prefix}.conv1d.bias", (channels,))
    yield Weight(f"{prefix}.A_log", (heads,), scale=0.5, mean=1.0)
    yield _ones(f"{prefix}.D", heads)
    yield Weight(f"{prefix}.dt_bias", (heads,), scale=0.5)
    yield _ones(f"{prefix}.norm.weight", inner)
    yield from _linear(f"{prefix}.out_proj", hidden, inner)


def gdn_family(size: Size = TINY) -> Family:
    """Qwen3-Next, a period three gated-delta-net layers and one of gated full attention, 4 + 1 experts."""
    hidden, kinds = size.hidden, (["linear_attention"] * 3 + ["full_attention"]) * size.periods
    # This architecture's RMS norms store the difference from one.
    weights = [*_ends(512, hidden, norm_mean=0.0)]
    for index, kind in enumerate(kinds):
        layer = f"model.layers.{index}"
        mixer = _gated_attention if kind == "full_attention" else _delta_net
        weights += [*_norms(layer, hidden, mean=0.0), *mixer(layer, hidden)]
        weights += _experts(f"{layer}.mlp", hidden, size.inner // 4)
    config = _common("Qwen3NextForCausalLM", "qwen3_next", num_hidden_layers=len(kinds), layer_types=kinds)
    config |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    config |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "partial_rotary_factor": 0.25}
    config |= {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.inner // 4,
        "norm_topk_prob": True,
    }
    config |= {
        "shared_expert_intermediate_size": size.inner // 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return Family(config | size.settings | {"rope_parameters": rope}, tuple(weights))


def _gated_attention(layer: str, hidden: int) -> Iterator[Weight]:
    yield from _attention(layer, hidden, gated=True)
    yield Weight(f"{layer}.self_attn.q_norm.weight", (HEAD_DIM,), scale=0.0)
    yield Weight(f"{layer}.self_attn.k_norm.weight", (HEAD_DIM,), scale=0.0)


def _delta_net(
    layer: str, hidden: int, *, key: int = 128, value: int = 256, heads: int = 2
) -> Iterator[Weight]:
    prefix = f"{layer}.linear_attn"
    yield from _linear(f"{prefix}.in_proj_qkvz", 2 * key + 2 * value, hidden)
    yield from _linear(f"{prefix}.in_proj_ba", 2 * heads, hidden)
    yield Weight(f"{prefix}.conv1d.weight", (2 * key + value, 1, 4))
    yield Weight(f"{prefix}.A_log", (heads,), scale=0.5, mean=1.0)
    yield Weight(f"{prefix}.dt_bias", (heads,), scale=0.5, mean=1.0)
    yield _ones(f"{prefix}.norm.weight", 128)
    yield from _linear(f"{prefix}.out_proj", hidden, value)


def _experts(prefix: str, hidden: int, inner: int) -> Iterator[Weight]:
    yield from _linear(f"{prefix}.gate", 4, hidden)
    yield from _linear(f"{prefix}.shared_expert_gate", 1, hidden)
    for expert in ("shared_expert", *(f"experts.{index}" for index in range(4))):
        yield from _gated_mlp(f"{prefix}.{expert}", hidden, inner)


FAMILIES = {
    "dense": dense_family,
    "window": window_family,
    "sliding": sliding_family,
    "mla": mla_family,
    "mamba": mamba_family,
    "gdn": gdn_family,
}
"""Name -> function that describes the checkpoint."""


def bench_family(name: str) -> Family:
    """The family in a size for benchmarks: 8 layers (MLA: 9), 50 to 100 MB."""
    if name == "dense":
        return demo_family(layers=8, hidden=BENCH.hidden, inner=BENCH.inner)
    sized = {"window": window_family, "mla": mla_family, "mamba": mamba_family, "gdn": gdn_family}
    return sized[name](replace(BENCH, periods=3) if name == "mla" else BENCH)
