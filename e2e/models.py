"""The models of the stories: how vLLM runs each, what is asked of it, and what the design lets it compute."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from e2e.harness import Prompt

GRAIN_TOKENS = 64
MAX_TOKENS = 16
RING_BYTES = 64 << 20
GDN = {"mamba_ssm_cache_dtype": "bfloat16"}
MLA = {"dtype": "float32", "num_gpu_blocks_override": 256, "max_num_batched_tokens": 8192}


@dataclass(frozen=True, slots=True)
class Model:
    """One family on vLLM."""

    family: str
    engine_block_tokens: int
    """What vLLM makes its blocks of this model on a CPU."""
    lengths: tuple[int, int] = (300, 505)
    """Prompt tokens. With its answer the second crosses a block boundary: decoded tokens are saved too."""
    has_state: bool = False
    """Whether it resumes from recurrent states; vLLM offers one at the last block boundary of a prompt."""
    partly_loaded: tuple[str, ...] = ()
    """How names of layers begin whose window ends inside an engine block: not all of it is loaded."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM` beyond the common ones."""

    @property
    def alignment_tokens(self) -> int:
        """Resume positions are multiples of this."""
        return math.lcm(self.engine_block_tokens, GRAIN_TOKENS)

    def served_again(self, prompt_tokens: int) -> int:
        """Tokens of a whole prompt that must come from the cache: all but less than a block and the tail."""
        return (prompt_tokens - 1) // self.alignment_tokens * self.alignment_tokens

    def served_longer(self, prompt_tokens: int) -> int:
        """Tokens of a prompt and its answer that must come from the cache when a longer prompt begins so."""
        if self.has_state:
            return self.served_again(prompt_tokens)
        # The last token of an answer is never computed.
        saved = (prompt_tokens + MAX_TOKENS - 1) // GRAIN_TOKENS * GRAIN_TOKENS
        return saved // self.alignment_tokens * self.alignment_tokens


MODELS = {
    model.family: model
    for model in (
        Model("dense", 128),
        Model("window", 128, partly_loaded=("model.layers.0.", "model.layers.2.")),
        # vLLM's prefix cache and chunked prefill are off for MLA on a CPU without AMX: a step takes whole
        # prompts. Its blocks are small.
        Model("mla", 16, arguments=MLA),
        # vLLM's Mamba2 on CPU fails when one chunk of a prefill is larger than the state's block.
        Model("mamba", 128, has_state=True, arguments={"dtype": "float32", "max_num_batched_tokens": 128}),
        # The attention block is raised until its page covers one state, of a type that processors choose.
        Model("gdn", 384, lengths=(505, 900), has_state=True, arguments=GDN),
    )
}


BENCH_MODELS = MODELS | {
    "dense": replace(MODELS["dense"], arguments={"dtype": "float32"}),
    "window": replace(MODELS["window"], arguments={"dtype": "float32"}),
}
"""The models of `bench_family`."""


def llm_arguments(model: Model, checkpoint: Path, **more: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: token ids in and out, nothing downloaded, a small pool."""
    common: dict[str, Any] = {"model": str(checkpoint), "skip_tokenizer_init": True, "enforce_eager": True}
    common |= {"max_model_len": 2048, "max_num_seqs": 4, "max_num_batched_tokens": 2048, "dtype": "bfloat16"}
    common |= {"enable_prefix_caching": True, "seed": 0, "disable_log_stats": False}
    return common | {"num_gpu_blocks_override": 64} | dict(model.arguments) | more


def connector(
    root: Path, *, role: str = "kv_both", policy: str = "recompute", **settings: Any
) -> dict[str, Any]:
    """`kv_transfer_config` for UCM with its cache at `root`; its ring is small unless `settings` say more."""
    transfer = default_connector() | {"kv_role": role, "kv_load_failure_policy": policy}
    return transfer | {"kv_connector_extra_config": {"root": str(root), "ring_bytes": RING_BYTES} | settings}


def default_connector() -> dict[str, Any]:
    """`kv_transfer_config` for UCM without any setting of its own."""
    named = {"kv_connector": "UCMConnector", "kv_connector_module_path": "ucm_vllm"}
    return named | {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def tokens(count: int, *, seed: int) -> tuple[int, ...]:
    """`count` token ids in [3, 503); of one seed, a shorter prompt is the beginning of a longer one."""
    return tuple(np.random.default_rng(seed).integers(3, 503, count).tolist())


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the stories ask of one model."""

    first: tuple[Prompt, ...]
    """Served and saved by the first process."""
    other: tuple[Prompt, ...]
    """Of nothing that was saved."""

    def longer(self, answers: tuple[tuple[int, ...], ...]) -> tuple[Prompt, ...]:
        """The next turn of each first prompt: the prompt, its answer, and 60 tokens more."""
        more = tokens(60, seed=7)
        return tuple(Prompt(p.tokens + answer + more) for p, answer in zip(self.first, answers, strict=True))


def prompts_of(model: Model) -> Prompts:
    """The prompts for `model`."""
    first = tuple(Prompt(tokens(length, seed=seed)) for seed, length in enumerate(model.lengths, 1))
    return Prompts(first, other=(Prompt(tokens(model.lengths[0], seed=5)),))
