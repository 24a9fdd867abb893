"""What a Mamba2 state is, by its definition, for the first layer of a checkpoint: no engine, no cache.

A convolution over the last inputs of each channel, then per head the recurrence
`h = exp(dt * A) * h + dt * (x outer B)` over all tokens. An oracle for what engines keep of that layer.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from e2e.checkpoints.safetensors import read_tensors
from e2e.checkpoints.write import WEIGHTS_FILE

Floats = NDArray[np.float32]

LAYER = "model.layers.0"


def first_state(checkpoint: Path, tokens: Sequence[int]) -> dict[str, Floats]:
    """The state of the first layer behind `tokens`.

    `conv` `[channel, input]`, the latest last, and `ssm` `[head, element, element of the state]`.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    weights = read_tensors(checkpoint / WEIGHTS_FILE)
    mixer = {
        name.removeprefix(f"{LAYER}.mamba."): value
        for name, value in weights.items()
        if name.startswith(f"{LAYER}.mamba.")
    }
    embedded = weights["model.embed_tokens.weight"][list(tokens)] * config["embedding_multiplier"]
    hidden = _normed(embedded, weights[f"{LAYER}.input_layernorm.weight"], config["rms_norm_eps"])
    heads, width, size = (config[f"mamba_{name}"] for name in ("n_heads", "d_head", "d_state"))
    _, inputs, steps = np.split(hidden @ mixer["in_proj.weight"].T, [heads * width, -heads], axis=1)
    x, entries, _ = np.split(_convolved(inputs, mixer), [heads * width, heads * width + size], axis=1)
    state = _recurrence(x.reshape(-1, heads, width), entries, steps=steps, mixer=mixer)
    return {"conv": inputs[1 - config["mamba_d_conv"] :].T, "ssm": state}


def _normed(hidden: Floats, weight: Floats, epsilon: float) -> Floats:
    scaled: Floats = hidden / np.sqrt(np.square(hidden).mean(axis=1, keepdims=True) + epsilon)
    return scaled * weight


def _convolved(inputs: Floats, mixer: dict[str, Floats]) -> Floats:
    """Each channel's weighted sum of its last inputs, through SiLU."""
    kernel = mixer["conv1d.weight"][:, 0]
    before = np.zeros((kernel.shape[1] - 1, inputs.shape[1]), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(
        np.concatenate([before, inputs]), kernel.shape[1], axis=0
    )
    summed = (windows * kernel).sum(axis=2) + mixer["conv1d.bias"]
    convolved: Floats = summed / (1 + np.exp(-summed))
    return convolved


def _recurrence(x: Floats, entries: Floats, *, steps: Floats, mixer: dict[str, Floats]) -> Floats:
    """`x` `[token, head, element]`, B as `entries` `[token, entry of the state]`, `steps` `[token, head]`."""
    dt = np.log1p(np.exp(steps + mixer["dt_bias"]))
    decays = np.exp(-dt * np.exp(mixer["A_log"]))
    state = np.zeros((*x.shape[1:], entries.shape[1]), np.float32)
    for element, entry, step, decay in zip(x, entries, dt, decays, strict=True):
        state = decay[:, None, None] * state + (step[:, None] * element)[:, :, None] * entry
    return state
