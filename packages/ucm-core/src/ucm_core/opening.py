"""What must fit together before a cache is opened; nothing here touches a file."""

from __future__ import annotations

import os

from ucm_core.coordinator.retention import RetentionPolicy
from ucm_core.errors import ConfigError
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.table import SpecRow, SpecTable

__all__ = ["check_grain", "retention_policies", "settings_of"]


def settings_of(config: str | os.PathLike[str] | None) -> CacheConfig:
    """The settings for a root's directory, None = all defaults; ConfigError for anything else."""
    if config is None:
        return CacheConfig()
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config is a {type(config).__name__}; give the root's directory,"
            " or CacheConfig.load(...) of a mapping"
        )
    return CacheConfig(root=os.fspath(config))


def check_grain(config: CacheConfig, table: SpecTable, *, identity: ModelIdentity) -> None:
    """Raise ConfigError where the table, the identity and the settings contradict each other."""
    if table.digest.hex() != identity.table:
        raise ConfigError(
            f"the identity was made for the table {identity.table[:12]}, not for {table.digest.hex()[:12]};"
            " make both from the same model"
        )
    if table.grain_tokens != identity.grain_tokens:
        raise ConfigError(
            f"the table has {table.grain_tokens} tokens per grain, the identity {identity.grain_tokens}"
        )
    asked = "grain_tokens" in config.model_fields_set
    if asked and config.grain_tokens != table.grain_tokens:
        raise ConfigError(
            f"setting 'grain_tokens' = {config.grain_tokens}, but the table has {table.grain_tokens};"
            " make the table with the same grain"
        )


def retention_policies(config: CacheConfig, table: SpecTable) -> dict[str, RetentionPolicy]:
    """Per snapshot row of ``table`` what the settings say about its states.

    Raises `ucm_core.ConfigError` for a name that is no snapshot row's and for a budget that holds no state.
    """
    names = [row.name for row in table.snapshot_rows]
    unknown = next((name for name in config.retention if name not in {"*", *names}), None)
    if unknown is not None:
        known = ", ".join(names) or "there are none"
        raise ConfigError(f"setting 'retention': row {unknown!r} holds no states; rows that do: {known}")
    return {row.name: _policy(config, row) for row in table.snapshot_rows}


def _policy(config: CacheConfig, row: SpecRow) -> RetentionPolicy:
    knobs = config.retention.get(row.name, config.retention.get("*"))
    policy = RetentionPolicy(**knobs.model_dump()) if knobs else RetentionPolicy()
    if policy.budget_bytes is not None and policy.budget_bytes < row.block_bytes:
        raise ConfigError(
            f"setting 'retention': budget_bytes = {policy.budget_bytes} of row {row.name!r} holds none of its"
            f" states of {row.block_bytes} bytes; give at least as much"
        )
    return policy
