"""Canonical tables: from a merged ``config.json`` to spec rows, one module per cache semantics.

A module of this package whose name does not begin with an underscore is a preset when it has ``FAMILIES``: a
mapping from ``model_type`` to a function that yields what each layer holds. Modules are found, not listed:
adding one changes no other file. Knowledge of model families lives in this package only.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from ucm_core.errors import SpecError
from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, rows_of
from ucm_core.spec.table import SpecTable

__all__ = ["canonical_table", "families"]


@cache
def families() -> Mapping[str, Family]:
    """Return every known family by ``model_type``; SpecError when two modules claim one."""
    found: dict[str, Family] = {}
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for model_type, family in getattr(module, "FAMILIES", {}).items():
            if model_type in found:
                raise SpecError(f"two presets claim the model type {model_type!r}, one in {module.__name__}")
            found[model_type] = family
    return found


def canonical_table(
    config: Mapping[str, Any],
    *,
    grain_tokens: int = 64,
    kv_dtype: str,
    state_dtypes: Mapping[str, str] | None = None,
    block_tokens: int | None = None,
) -> SpecTable:
    """Return the table that every engine makes of the same model.

    ``config`` is the merged configuration (``read_config``); a wrapper's ``text_config`` is used where there
    is one. ``state_dtypes`` are the resolved types of "conv" and "ssm" states, needed by models that have
    some. ``block_tokens`` is a multiple of the grain, equal to it by default. Raises SpecError for an unknown
    family (naming its ``model_type``) and for missing or contradicting keys.
    """
    text_config = _text_config(config)
    family = families().get(text_config.get("model_type", ""))
    if family is None:
        known = ", ".join(sorted(families()))
        raise SpecError(f"no preset for model_type {text_config.get('model_type')!r}; known are {known}")
    facts = Facts(text_config, kv_dtype=kv_dtype, state_dtypes=dict(state_dtypes or {}))
    block_tokens = grain_tokens if block_tokens is None else block_tokens
    return SpecTable(
        rows_of(family(facts), block_tokens=block_tokens, grain_tokens=grain_tokens), grain_tokens
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) and "model_type" in nested else config
