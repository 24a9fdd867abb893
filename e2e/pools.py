"""SGLang's pools and radix tree with UCM, without a model, as a process: what they are given and give."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from e2e.checkpoints.safetensors import read_tensors, write_tensors
from e2e.harness import ENGINES, SGLANG, Engine, EngineFailed, Prompt

POOLS = replace(SGLANG, runner=ENGINES / "sglang_pools_runner.py")

Floats = NDArray[np.float32]

Values = dict[str, Floats]
"""What SGLang's pools have of a prompt, as `engine/sglang_pools_runner.py` says: k, v, conv, ssm."""


class Pools(Engine):
    """The handle of such a process; its setup is of kind `POOLS`."""

    def attach(self, arguments: Mapping[str, Any], *, conv_dtype: str = "float32") -> None:
        """Leave the tree before, and make an empty one with UCM, both by arguments of `sglang.Engine`."""
        self._wait_ready()
        error = self._ask("attach", arguments=dict(arguments), conv_dtype=conv_dtype)["error"]
        if error is not None:
            raise EngineFailed(f"attach: refused: {error}")

    def restorable(self, prompt: Prompt) -> int:
        """How many tokens of `prompt` could be loaded."""
        return int(self._ask("restorable", prompt=asdict(prompt))["tokens"])

    def load(self, prompt: Prompt, path: Path) -> Values:
        """Load `prompt` to SGLang's pools; what came, by way of a file at `path`."""
        count = self._ask("load", prompt=asdict(prompt), path=str(path))["tokens"]
        values = read_tensors(path)
        assert values["k"].shape[1] == count
        return values

    def save(self, prompt: Prompt, values: Values, path: Path) -> None:
        """Have SGLang's tree keep the beginning of `prompt` that `values` are of, by a file at `path`."""
        write_tensors(path, values, dtype="F32")
        self._ask("save", prompt=asdict(prompt), path=str(path))
