"""A real LoRA adapter for the dense family: low-rank updates of the four attention projections."""

import json
from pathlib import Path

import numpy as np

from e2e.checkpoints.families import Family
from e2e.checkpoints.safetensors import write_tensors

RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(directory: Path, family: Family, *, seed: int) -> Path:
    """Write an adapter for `family` to `directory` and return it; seeds differ, adapters differ."""
    directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, object] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "bias": "none"}
    settings |= {"lora_alpha": 2 * RANK, "lora_dropout": 0.0, "target_modules": list(TARGETS)}
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    generator = np.random.default_rng(seed)
    tensors = {}
    for weight in family.weights:
        layer = weight.name.removesuffix(".weight")
        if layer.rsplit(".", 1)[-1] in TARGETS:
            rows, columns = weight.shape
            prefix = f"base_model.model.{layer}"
            tensors[f"{prefix}.lora_A.weight"] = generator.normal(0, 0.1, (RANK, columns)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = generator.normal(0, 0.1, (rows, RANK)).astype(np.float32)
    write_tensors(directory / "adapter_model.safetensors", tensors, dtype="F32")
    return directory
