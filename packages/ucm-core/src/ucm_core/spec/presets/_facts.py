"""Typed reading of a model's configuration: what is missing or odd is a SpecError that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ucm_core.errors import SpecError, shown

__all__ = ["MAX_LAYERS", "MAX_SIZE", "Facts"]

MAX_SIZE = 1 << 24
"""Of any number in a configuration that shapes what is cached; no model comes near, and sums stay exact."""
MAX_LAYERS = 9_999
"""Of a model, as in tables written by hand; lists of more would only fill the memory."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A model's configuration and the resolved types of what it caches."""

    config: Mapping[str, Any]
    """The language model's part of ``config.json``, overrides merged in."""
    kv_dtype: str
    """Resolved type of keys and values."""
    state_dtypes: Mapping[str, str]
    """Resolved types of recurrent states and of index keys, by name."""

    def whole(self, *keys: str, default: int | None = None) -> int:
        """Return the first key that is set, a whole number above 0; ``default`` when none is."""
        for key in keys:
            value = self.config.get(key)
            if value is not None:
                return self._checked_whole(key, value)
        if default is None:
            raise self.wrong(f"has no {' or '.join(keys)}")
        return default

    def layers(self, key: str) -> int:
        """Return a number of layers, at least 1."""
        count = self.whole(key)
        if count > MAX_LAYERS:
            raise self.wrong(f"has {key} = {count}; expected at most {MAX_LAYERS}")
        return count

    def optional_whole(self, key: str) -> int | None:
        """Return a whole number above 0; None when the key is absent, null or 0."""
        value = self.config.get(key)
        return None if value is None or _is_zero(value) else self._checked_whole(key, value)

    def count(self, key: str, *, default: int) -> int:
        """Return a whole number of at least 0; ``default`` when the key is absent or null."""
        value = self.config.get(key)
        return default if value is None else 0 if _is_zero(value) else self._checked_whole(key, value)

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers of at least 0; None when the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(type(item) is int and item >= 0 for item in value):
            raise self.wrong(f"has {key} = {shown(value)}; expected a list of whole numbers")
        return tuple(value)

    def section(self, key: str) -> Facts | None:
        """Return what is nested under ``key``; None when the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(f"has {key} = {shown(value)}; expected a mapping")
        return replace(self, config={**value, "model_type": f"{self.model_type}, {key}"})

    def with_defaults(self, defaults: Mapping[str, Any]) -> Facts:
        """Return the facts of a family whose published checkpoints leave out what equals its defaults."""
        return replace(self, config={**defaults, **self.config})

    def names(self, *keys: str) -> tuple[str, ...] | None:
        """Return the first key that is set as a tuple of names; None when none is."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, list | tuple | str) and all(isinstance(item, str) for item in value):
                return tuple(value)
            if value is not None:
                raise self.wrong(f"has {key} = {shown(value)}; expected a list of names")
        return None

    def state_dtype(self, name: str) -> str:
        """Return the resolved type of a recurrent state ("conv", "ssm") or of index keys ("index")."""
        if name not in self.state_dtypes:
            raise SpecError(
                f"{self.model_type} caches more than keys and values; give state_dtypes[{name!r}]"
            )
        return self.state_dtypes[name]

    def wrong(self, complaint: str) -> SpecError:
        """Return the error to raise about this configuration."""
        return SpecError(f"the config of {self.model_type} {complaint}")

    @property
    def model_type(self) -> str:
        """The family's name, for messages."""
        return str(self.config.get("model_type"))

    @property
    def layer_count(self) -> int:
        """Number of layers."""
        return self.layers("num_hidden_layers")

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values; as many as query heads when not set, else a divisor of those."""
        heads = self.whole("num_key_value_heads", "num_attention_heads")
        queries = self.whole("num_attention_heads", default=heads)
        if queries % heads:
            raise SpecError(
                f"the config of {self.model_type}: num_attention_heads {queries} is no multiple of"
                f" num_key_value_heads {heads}"
            )
        return heads

    def head_dim(self, default: int | None = None) -> int:
        """Return the head size: set, else the family's ``default``, else hidden size / query heads."""
        if self.config.get("head_dim") is not None or default is not None:
            return self.whole("head_dim", default=default)
        return self.quotient("hidden_size", "num_attention_heads")

    def quotient(self, dividend: str, divisor: str) -> int:
        """Return an exact quotient of two keys."""
        upper, lower = self.whole(dividend), self.whole(divisor)
        if upper % lower:
            raise SpecError(
                f"the config of {self.model_type}: {dividend} {upper} is no multiple of {divisor} {lower}"
            )
        return upper // lower

    def _checked_whole(self, key: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_SIZE:
            raise self.wrong(f"has {key} = {shown(value)}; expected a whole number from 1 to {MAX_SIZE}")
        return value


def _is_zero(value: object) -> bool:
    return isinstance(value, int | float) and value == 0
