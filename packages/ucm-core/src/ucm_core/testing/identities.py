"""What every adapter must tell apart, and call by one name: computations that differ in one thing each.

An adapter's tests subclass `IdentityTests` and say how it identifies what its engine runs. All of them are
held to what the core itself reads, so two engines meet in one namespace for the same computation and in none
for two of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ucm_core.spec.checkpoint import WeightDigester
from ucm_core.spec.model import Model, Resolved, read_model


@dataclass(frozen=True, slots=True)
class Computation:
    """A checkpoint, and how an engine runs it."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """What its ``config.json`` says otherwise than the suite's."""
    weights: bytes = b"weights"
    """Stands for tensors: nobody loads them."""
    dtype: str = "bfloat16"
    """Of the computation, and of keys and values."""
    grain_tokens: int = 64
    state_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Of recurrent states, where the model has them: "conv" and "ssm"."""

    def write(self, directory: Path, config: Mapping[str, Any]) -> Path:
        """Write its checkpoint, else like ``config``, to ``directory`` (made if absent) and return that."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({**config, **self.config}))
        (directory / "model.safetensors").write_bytes(self.weights)
        return directory

    def read(self, directory: Path) -> Model:
        """What the core reads of it, weights not yet digested."""
        resolved = Resolved(
            compute_dtype=self.dtype,
            kv_dtype=self.dtype,
            state_dtypes=self.state_dtypes,
            max_model_len=2048,
            grain_tokens=self.grain_tokens,
        )
        return read_model(directory, resolved)


COMPUTATIONS: Mapping[str, Computation] = {
    "plain": Computation(),
    "weights": Computation(weights=b"Weights"),
    "dtype": Computation(dtype="float32"),
    "grain": Computation(grain_tokens=16),
    "rope base": Computation({"rope_theta": 500000.0}),
    "rope scaling": Computation({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "layers": Computation({"num_hidden_layers": 3}),
    "heads": Computation({"num_key_value_heads": 4}),
    "head size": Computation({"head_dim": 8}),
    "norm": Computation({"rms_norm_eps": 1e-4}),
    "width of the MLPs": Computation({"intermediate_size": 192}),
}
"""What differs -> the computation; no two may share anything."""

STATE_DTYPES: Mapping[str, str] = {"conv": "bfloat16", "ssm": "float32"}


def _with_states(config: Mapping[str, Any] | None = None, **more: Any) -> Computation:
    return Computation(**{"config": config or {}, "state_dtypes": STATE_DTYPES, **more})


STATE_COMPUTATIONS: Mapping[str, Computation] = {
    "plain": _with_states(),
    "weights": _with_states(weights=b"Weights"),
    "dtype": _with_states(dtype="float32"),
    "grain": _with_states(grain_tokens=16),
    "dtype of convolutions": _with_states(state_dtypes={**STATE_DTYPES, "conv": "float32"}),
    "dtype of states": _with_states(state_dtypes={**STATE_DTYPES, "ssm": "bfloat16"}),
    "heads, with states as large": _with_states({"mamba_n_heads": 16, "mamba_d_head": 16}),
    "size of a state": _with_states({"mamba_d_state": 16}),
    "width of convolutions": _with_states({"mamba_d_conv": 3}),
    "groups": _with_states({"mamba_n_groups": 2}),
    "order of the layers": _with_states({"layer_types": ["attention", "mamba"]}),
}
"""As `COMPUTATIONS`, of a model that mixes recurrent states with full attention."""


class IdentityTests:
    """Subclass it, define ``identify`` and give it the ``config.json`` of a model with grouped queries."""

    config: Mapping[str, Any]
    """That of the plain computation: 2 layers, 2 KV heads, a rope base of 10,000."""

    computations: Mapping[str, Computation] = COMPUTATIONS
    """What differs -> the computation."""

    def identify(self, computation: Computation, directory: Path) -> Model:
        """Return what the adapter makes of an engine that runs ``computation`` from ``directory``."""
        raise NotImplementedError

    @pytest.mark.parametrize("name", COMPUTATIONS)
    def test_it_is_what_every_engine_finds(self, name: str, tmp_path: Path) -> None:
        computation = self.computations[name]
        path = computation.write(tmp_path / "checkpoint", self.config)
        found, expected = self.identify(computation, path), computation.read(path)
        assert (found.identity, found.table) == (expected.identity, expected.table)

    def test_no_two_share_a_namespace(self, tmp_path: Path) -> None:
        digester = WeightDigester(tmp_path / "digests")
        models = (
            self.identify(one, one.write(tmp_path / name, self.config))
            for name, one in self.computations.items()
        )
        namespaces = {model.with_weights(digester).identity.namespace for model in models}
        assert len(namespaces) == len(self.computations)

    def test_the_same_from_another_directory_shares_it(self, tmp_path: Path) -> None:
        plain, digester = self.computations["plain"], WeightDigester(tmp_path / "digests")
        models = (self.identify(plain, plain.write(tmp_path / name, self.config)) for name in ("one", "two"))
        assert len({model.with_weights(digester).identity.namespace for model in models}) == 1


class StateIdentityTests(IdentityTests):
    """As `IdentityTests`, with the ``config.json`` of a model that mixes Mamba2 states with full attention.

    That of its plain computation has a layer of each in ``layer_types``, states first, 8 heads of 32 and a
    ``mamba_d_state`` of 32, convolutions of 4, one group.
    """

    computations = STATE_COMPUTATIONS

    @pytest.mark.parametrize("name", STATE_COMPUTATIONS)
    def test_it_is_what_every_engine_finds(self, name: str, tmp_path: Path) -> None:
        super().test_it_is_what_every_engine_finds(name, tmp_path)
