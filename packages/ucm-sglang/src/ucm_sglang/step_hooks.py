"""Hooks around SGLang's steps and behind its attention layers, by its plugins' registry; for `LayerSaves`.

They are registered only for who asks to be told, so that nobody else's SGLang is touched. Whoever is told may
fail: SGLang goes on as without.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ucm_core.errors import ConfigError
from ucm_core.ops import border
from ucm_sglang.layer_saves import LayerSaves
from ucm_sglang.refusals import refuse
from ucm_sglang.weight_updates import is_hooked

__all__ = ["after_attention", "around_step", "listen"]

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
ATTENTION = "sglang.srt.layers.radix_attention.RadixAttention"

CAUSAL = "decoder"
"""The kind of attention whose keys and values do not depend on later tokens."""

Args = tuple[Any, ...]
More = Mapping[str, Any]

_listeners: list[LayerSaves] = []
"""At most one: SGLang's scheduler process has one linker."""


def listen(saves: LayerSaves) -> Callable[[], None]:
    """Tell ``saves`` of each step and layer from now on; returns what ends that, any number of times.

    ConfigError, naming what is missing, where SGLang has no such hooks.
    """
    _install()
    _listeners[:] = [saves]

    def end() -> None:
        if saves in _listeners:
            _listeners.remove(saves)

    return end


def around_step(original: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Run a step of a scheduler, and tell of its begin and its end; its loads have ended by then."""
    if not _listeners:
        return original(*args, **more)
    saves = _listeners[0]
    _told(saves, partial(_tell_begin, saves, args, more))
    try:
        return original(*args, **more)
    except BaseException:
        saves.failed()
        raise
    finally:
        _told(saves, saves.end)


def after_attention(_output: Any, *args: Any, **more: Any) -> None:
    """Tell that an attention layer is over."""
    for saves in _listeners:
        _told(saves, partial(_tell_layer, saves, args, more))


def _tell_begin(saves: LayerSaves, args: Args, more: More) -> None:
    saves.begin(_given("batch", 1, args, more))


def _tell_layer(saves: LayerSaves, args: Args, more: More) -> None:
    layer = args[0]
    if layer.attn_type.value == CAUSAL and not layer.is_cross_attention:
        saves.layer_is_over(int(layer.layer_id), _given("forward_batch", 4, args, more))


def _given(name: str, place: int, args: Args, more: More) -> Any:
    """One of the arguments of SGLang's method, of which the instance is at place 0."""
    return more[name] if name in more else args[place]


def _told(saves: LayerSaves, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 (the border: SGLang's step goes on, and nothing of it is saved)
        border.failed("layer_saves", error)
        saves.failed()


HOOKS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (SCHEDULER, "run_batch", around_step),
    (ATTENTION, "forward", after_attention),
)
"""Class, method, and what stands there."""


def _install() -> None:
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 (the engine)
    except ImportError:
        raise ConfigError(
            "layerwise_save needs SGLang's plugin hooks (0.5.11), which are not there"
        ) from None
    kinds = {around_step: HookType.AROUND, after_attention: HookType.AFTER}
    for owner, name, hook in _missing("layerwise_save hooks {}, which this SGLang does not have"):
        HookRegistry.register(f"{owner}.{name}", hook, kinds[hook])
    HookRegistry.apply_hooks()
    for owner, name, _ in _missing("{} went while it was hooked"):
        raise ConfigError(
            f"SGLang did not hook {owner}.{name} for layerwise_save: another plugin hooks it already, or"
            " SGLang's log says why"
        )


def _missing(refusal: str) -> list[tuple[str, str, Callable[..., Any]]]:
    """The hooks that SGLang does not call; ConfigError, by ``refusal``, for a name that it does not have."""
    for owner, name, _ in HOOKS:
        refuse(not callable(_found(owner, name)), ConfigError(refusal.format(f"{owner}.{name}")))
    return [each for each in HOOKS if not is_hooked(each[0], each[1], hook=each[2])]


def _found(owner: str, name: str) -> Any:
    try:
        return getattr(pkgutil.resolve_name(owner), name, None)
    except (ImportError, AttributeError):
        return None
