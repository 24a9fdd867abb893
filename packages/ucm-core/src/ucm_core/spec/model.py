"""The one way from a checkpoint directory to a table and an identity: every engine gets the same ones.

Neither the path nor the served name enters; what the engine changed enters as data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ucm_core.errors import IdentityError
from ucm_core.spec.checkpoint import WeightDigester, code_digest, depends_on_length, read_config
from ucm_core.spec.encoding import canonical_json
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.presets import canonical_table
from ucm_core.spec.table import SpecTable

__all__ = ["Model", "Resolved", "read_model"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an engine decided at start-up that changes computed values or stored bytes."""

    compute_dtype: str
    """Type of the computation."""
    kv_dtype: str
    """Logical type of keys and values."""
    state_dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Types of recurrent states ("conv", "ssm") and of an indexer's keys ("index")."""
    quantisation: Mapping[str, Any] | None = None
    """Quantisation that the checkpoint does not carry, and constant scales."""
    run_options: Mapping[str, Any] | None = None
    """Options that change computed values."""
    revision: str | None = None
    """Only where weights cannot be read."""
    max_model_len: int | None = None
    """The engine's longest request in tokens; enters only where rotary values depend on it."""
    grain_tokens: int = 64
    """Tokens per step of the prefix chain."""
    block_tokens: int | None = None
    """Tokens per chain block; None = the grain."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the cache knows it."""

    directory: Path
    """The checkpoint."""
    table: SpecTable
    """Its canonical table."""
    identity: ModelIdentity
    """Its identity; not known before the weights are digested."""

    def with_weights(self, digester: WeightDigester) -> Model:
        """Return the model with its weights digested (every byte is read once); may raise IdentityError."""
        weights = digester.digest(self.directory)
        return dataclasses.replace(self, identity=dataclasses.replace(self.identity, weights=weights))


def read_model(directory: Path, resolved: Resolved, *, overrides: Mapping[str, Any] | None = None) -> Model:
    """Return table and identity of the checkpoint in ``directory``, weights not yet digested.

    Raises IdentityError where the identity is unknown (see ``read_config``; also a rope that depends on a
    ``max_model_len`` that is not given) and SpecError for a family without a preset.
    """
    config = _completed(read_config(directory, overrides), directory, resolved.max_model_len)
    table = canonical_table(
        config,
        grain_tokens=resolved.grain_tokens,
        kv_dtype=resolved.kv_dtype,
        state_dtypes=resolved.state_dtypes,
        block_tokens=resolved.block_tokens,
    )
    identity = ModelIdentity(
        config=canonical_json(config),
        weights=None,
        revision=resolved.revision,
        compute_dtype=resolved.compute_dtype,
        kv_dtype=resolved.kv_dtype,
        state_dtypes=tuple(resolved.state_dtypes.items()),
        quantisation=canonical_json(resolved.quantisation or None),
        run_options=canonical_json(resolved.run_options or None),
        grain_tokens=resolved.grain_tokens,
        table=table.digest.hex(),
    )
    return Model(Path(directory), table, identity)


def _completed(config: dict[str, Any], directory: Path, max_model_len: int | None) -> dict[str, Any]:
    """Return ``config`` with what else changes values: the engine's length, the checkpoint's own code."""
    added: dict[str, Any] = {}
    if "auto_map" in config:  # names classes of the checkpoint's own, which an engine may run
        added["auto_map_code"] = code_digest(directory)
    if depends_on_length(config):
        if max_model_len is None:
            raise IdentityError(
                "rotary values depend on max_model_len, which is not given: the model's identity is unknown"
            )
        added["max_model_len"] = int(max_model_len)
    return config | added
