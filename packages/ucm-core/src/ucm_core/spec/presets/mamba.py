"""Full attention mixed with Mamba2 states.

Shapes of a state: convolution ``(kernel - 1, d_inner + 2 * groups * state_size)``, then matrix
``(heads, head_dim, state_size)``: the Mamba2 recurrence keeps the last kernel - 1 inputs of x, B and C.
"""

from __future__ import annotations

from collections.abc import Iterable

from ucm_core.errors import shown
from ucm_core.spec.presets._facts import MAX_SIZE, Facts
from ucm_core.spec.presets._layers import Family, Holding, attention, layer_kinds, placed, state

__all__ = ["FAMILIES"]

_KINDS = {
    "mamba": "state",
    "linear_attention": "state",
    "M": "state",
    "attention": "full",
    "full_attention": "full",
    "*": "full",
    "mlp": "",
    "moe": "",
    "-": "",
    "E": "",
}


def _expanded(facts: Facts) -> int:
    """Return the inner width where it is a multiple of the hidden size."""
    factor = facts.config.get("mamba_expand", 2)
    if not isinstance(factor, int | float) or not 0 < factor * facts.whole("hidden_size") <= MAX_SIZE:
        raise facts.wrong(f"has mamba_expand = {shown(factor)}; expected a factor of its hidden_size")
    return int(factor * facts.whole("hidden_size"))


def _mamba2(facts: Facts, inner: int) -> Holding:
    """Return the state under the ``mamba_*`` spelling of the keys."""
    groups, size = facts.whole("mamba_n_groups", default=1), facts.whole("mamba_d_state")
    conv = (facts.whole("mamba_d_conv") - 1, inner + 2 * groups * size)
    heads = facts.whole("mamba_n_heads")
    head_dim = inner // heads if facts.config.get("mamba_d_head") == "auto" else facts.whole("mamba_d_head")
    return state(facts, "mamba2", conv=conv, ssm=(heads, head_dim, size))


def _mixed(facts: Facts, kinds: Iterable[str], mamba: Holding | None) -> Iterable[tuple[int, Holding]]:
    held = {"": (), "full": (attention(facts, facts.head_dim()),), "state": (mamba,) if mamba else ()}
    return placed(kinds, held)


def _listed(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield by the list of layer kinds."""
    kinds = layer_kinds(facts, keys=("layer_types", "layers_block_type"), spellings=_KINDS)
    if kinds is None:
        raise facts.wrong("has no layer_types")
    return _mixed(facts, kinds, _mamba2(facts, _expanded(facts)) if "state" in kinds else None)


def _attention_indexed(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield attention at the listed layers and states elsewhere."""
    indices = facts.numbers("attn_layer_indices")
    if indices is None:
        return _listed(facts)
    kinds = ("full" if layer in indices else "state" for layer in range(facts.layer_count))
    return _mixed(facts, kinds, _mamba2(facts, _expanded(facts)))


def _parallel(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield attention and a state in every layer."""
    mamba = _mamba2(facts, facts.whole("mamba_d_ssm", default=_expanded(facts)))
    both = {"both": (attention(facts, facts.head_dim()), mamba)}
    return placed(("both",) * facts.layer_count, both)


def _patterned(facts: Facts) -> Iterable[tuple[int, Holding]]:
    """Yield by a pattern text (M state, * attention, others nothing) or by the list that replaced it."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    kinds = layer_kinds(facts, keys=keys, spellings=_KINDS)
    if kinds is None:
        raise facts.wrong("has neither hybrid_override_pattern nor layers_block_type")
    heads, head_dim = facts.whole("mamba_num_heads"), facts.whole("mamba_head_dim")
    groups, size = facts.whole("n_groups", "mamba_n_groups"), facts.whole("ssm_state_size")
    conv = (facts.whole("conv_kernel", "mamba_d_conv") - 1, heads * head_dim + 2 * groups * size)
    return _mixed(facts, kinds, state(facts, "mamba2", conv=conv, ssm=(heads, head_dim, size)))


FAMILIES: dict[str, Family] = {
    "granitemoehybrid": _listed,
    "bamba": _attention_indexed,
    "falcon_h1": _parallel,
    "nemotron_h": _patterned,
}
"""model_type -> what each layer holds."""
