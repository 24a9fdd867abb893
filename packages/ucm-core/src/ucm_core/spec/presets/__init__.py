"""Canonical tables: from a merged ``config.json`` to spec rows, one module per cache semantics.

A module of this package whose name does not begin with an underscore is a preset when it has ``FAMILIES``: a
mapping from ``model_type`` to a function that yields what each layer holds. It may have ``DRAFTS``, the same
for the draft layers (MTP) that a checkpoint carries beside the model. Modules are found, not listed: adding
one changes no other file. Knowledge of model families lives in this package only.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from ucm_core.errors import SpecError, shown
from ucm_core.spec.presets._facts import Facts
from ucm_core.spec.presets._layers import Family, Shared, rows_of
from ucm_core.spec.table import SpecTable

__all__ = ["canonical_table", "draft_table", "drafts", "families", "shared_layers"]

DRAFT_PREFIX = "mtp."


@cache
def families() -> Mapping[str, Family]:
    """Return every known family by ``model_type``; SpecError when two modules claim one."""
    return _claimed("FAMILIES")


@cache
def drafts() -> Mapping[str, Family]:
    """Return the families whose draft layers are known; SpecError when two modules claim one."""
    return _claimed("DRAFTS")


def _claimed(attribute: str) -> Mapping[str, Family]:
    found: dict[str, Family] = {}
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for model_type, family in getattr(module, attribute, {}).items():
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
    is one. ``state_dtypes`` are the resolved types of "conv" and "ssm" states and of "index" keys, needed by
    models that have some. ``block_tokens`` is a multiple of the grain, equal to it by default; a compressed
    row has the smallest number of such blocks that cuts no entry. Draft layers are not in it, whatever the
    configuration says about them: the table is the same with and without speculative decoding. Raises
    SpecError for an unknown family (naming its ``model_type``) and for missing or contradicting keys.
    """
    text_config = _text_config(config)
    family = _family(families(), text_config, "no preset for model_type")
    facts = Facts(text_config, kv_dtype=kv_dtype, state_dtypes=dict(state_dtypes or {}))
    block_tokens = grain_tokens if block_tokens is None else block_tokens
    return SpecTable(
        rows_of(family(facts), block_tokens=block_tokens, grain_tokens=grain_tokens), grain_tokens
    )


def draft_table(
    config: Mapping[str, Any],
    *,
    grain_tokens: int = 64,
    kv_dtype: str,
    state_dtypes: Mapping[str, str] | None = None,
    block_tokens: int | None = None,
) -> SpecTable:
    """Return the table of the draft layers (MTP) in a checkpoint; arguments as for the model's.

    Draft layers never share a namespace with the model: their rows are named ``mtp.<name>`` and make a table
    of their own, whose digest in the model's identity (``dataclasses.replace(identity, table=...)``) names
    another namespace. The rest of that identity stays, because what a draft layer keeps is computed from the
    model's hidden states, and it is computed from each token together with the *next* one: blocks of these
    rows need keys over pairs of tokens, those of the model's chain do not determine them. Layers are numbered
    on after the model's. A draft model with a checkpoint of its own has a `canonical_table` of its own, and
    its identity must hold the digest of the model it drafts for.
    Raises SpecError where the configuration has no draft layers or how they are built is not known.
    """
    text_config = _text_config(config)
    family = _family(drafts(), text_config, "no preset for draft layers of model_type")
    facts = Facts(text_config, kv_dtype=kv_dtype, state_dtypes=dict(state_dtypes or {}))
    block_tokens = grain_tokens if block_tokens is None else block_tokens
    rows = rows_of(family(facts), block_tokens=block_tokens, grain_tokens=grain_tokens, prefix=DRAFT_PREFIX)
    return SpecTable(rows, grain_tokens)


def shared_layers(config: Mapping[str, Any]) -> dict[int, int]:
    """Return layer -> the layer whose bytes it reads, for ``UnitMap``'s ``follows``."""
    text_config = _text_config(config)
    family = _family(families(), text_config, "no preset for model_type")
    # which layer reads which does not depend on the types, and the rows are not looked at
    facts = Facts(
        text_config, kv_dtype="bfloat16", state_dtypes=dict.fromkeys(("conv", "ssm", "index"), "bfloat16")
    )
    return {layer: held.source for layer, held in family(facts) if isinstance(held, Shared)}


def _family(known: Mapping[str, Family], config: Mapping[str, Any], complaint: str) -> Family:
    model_type = config.get("model_type")
    family = known.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        close = difflib.get_close_matches(shown(model_type).strip("'"), known, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(known))}"
        raise SpecError(f"{complaint} {shown(model_type)}; {hint}")
    return family


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) and "model_type" in nested else config
