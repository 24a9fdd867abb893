"""Model identity: two engines share a cache exactly when their identities are equal and known.

Whatever changes the computed values is in it, by value and not by spelling. Unknown never equals anything.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ucm_core.errors import IdentityError, shown
from ucm_core.spec.dtypes import DTYPES
from ucm_core.spec.encoding import canonical_json, digest_of

__all__ = ["CANONICAL_LAYOUT", "FORMAT_VERSION", "SAMPLED", "ModelIdentity", "canonical_json"]

CANONICAL_LAYOUT = "canonical-nhd-1"
"""Layout id of engine-neutral bytes: parts in row order, token-major, no padding."""

FORMAT_VERSION = 2
"""Version of everything on disk that a namespace holds."""

SAMPLED = "sampled:"
"""Stands before a digest of samples of the weights: it never equals one of all their bytes."""

_JSON_FIELDS = ("config", "quantisation", "run_options")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Everything that must be equal before one computation's bytes may serve another."""

    config: str
    """The merged ``config.json`` as JSON text; made canonical here."""
    weights: str | None
    """Hex digest over all weights, ``sampled:`` before one over samples; None = unknown, nothing is kept."""
    revision: str | None
    """The caller's revision, only where weights cannot be read."""
    compute_dtype: str
    """Resolved type of the computation."""
    kv_dtype: str
    """Resolved logical type of the KV cache."""
    table: str
    """Hex digest of the spec table."""
    state_dtypes: tuple[tuple[str, str], ...] = ()
    """Resolved types of recurrent states as (state, dtype), sorted."""
    quantisation: str = "null"
    """Quantisation and constant scales as JSON text; made canonical here."""
    run_options: str = "null"
    """Options that change computed values as JSON text; made canonical here."""
    layout: str = CANONICAL_LAYOUT
    """Layout id of the stored bytes."""
    grain_tokens: int = 64
    """Tokens per step of the prefix chain."""
    format_version: int = FORMAT_VERSION
    """Version of the bytes on disk."""
    generation: int = 0
    """Persistent counter, raised by a reset and by changed weights."""
    private_token: str = ""
    """Random while weights live only in one engine's memory; shares with nobody."""

    def __post_init__(self) -> None:
        """Make the JSON fields canonical; IdentityError for ``auto``, empty or unusable fields."""
        for name in _JSON_FIELDS:
            object.__setattr__(self, name, _canonical_text(name, getattr(self, name)))
        object.__setattr__(self, "state_dtypes", _pairs(self.state_dtypes))
        dtypes = [("compute_dtype", self.compute_dtype), ("kv_dtype", self.kv_dtype), *self.state_dtypes]
        for name, dtype in dtypes:
            _check_dtype(name, dtype)
        _check_text("private_token", self.private_token)
        if self.revision is not None:
            _check_text("revision", self.revision)
        if not isinstance(self.layout, str) or not self.layout:
            raise IdentityError(f"layout is {self.layout!r}; name the layout of the stored bytes")
        if self.weights is not None:
            _check_hex("weights", _unmarked(self.weights))
        _check_hex("table", self.table)
        for name, least in (("grain_tokens", 1), ("format_version", 1), ("generation", 0)):
            _check_number(name, getattr(self, name), least=least)

    @property
    def known(self) -> bool:
        """False while the weights are unknown: then nothing is stored and nothing is found."""
        return self.weights is not None

    @property
    def digest(self) -> bytes:
        """32 bytes over every field. Equal digests prove nothing unless both identities are known."""
        return _made_once(self)

    @property
    def base_digest(self) -> bytes:
        """32 bytes over everything but weights, generation and private token: names the counter."""
        excluded = ("weights", "generation", "private_token")
        return digest_of("ucm-model-base-1", {k: v for k, v in self._fields().items() if k not in excluded})

    @property
    def namespace(self) -> str:
        """Name of the directory that holds this identity's objects: 32 hex characters.

        Raises IdentityError while the weights are unknown, so that nothing can be kept under a guess.
        """
        if not self.known:
            raise IdentityError(
                "the weights are unknown, so this identity has no namespace; check .known first"
            )
        return self.digest.hex()[:32]

    def matches(self, other: ModelIdentity) -> bool:
        """Return whether bytes of one may serve the other; False when either is unknown."""
        return self.known and other.known and self.digest == other.digest

    def with_generation(self, generation: int, private_token: str = "") -> ModelIdentity:
        """Return this identity in another generation."""
        return dataclasses.replace(self, generation=generation, private_token=private_token)

    def require_same_model(
        self, other: ModelIdentity, *, halves: tuple[str, str] = ("here", "there")
    ) -> None:
        """Raise IdentityError with both digests and the first differing field unless both run one model.

        For the start of an engine, before the first load or save. ``halves`` names the two in the message.
        Weights are compared once both halves know them; which generation it is one half says, later.
        """
        mine, theirs = self.with_generation(0), other.with_generation(0)
        if mine.known != theirs.known:
            mine, theirs = (dataclasses.replace(identity, weights=None) for identity in (mine, theirs))
        field = mine.first_difference(theirs)
        if field is not None:
            raise IdentityError(
                f"two halves of one engine run different models: {self.digest.hex()} ({halves[0]}) and"
                f" {other.digest.hex()} ({halves[1]}) differ first in {field}"
            )

    def manifest(self) -> dict[str, Any]:
        """Return the identity as readable plain data; ``from_manifest`` reads it back."""
        fields = self._fields()
        return fields | {name: json.loads(fields[name]) for name in _JSON_FIELDS}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> ModelIdentity:
        """Return the identity of a manifest; IdentityError when fields are missing or unknown."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(manifest) != names:
            raise IdentityError(
                f"a manifest has other fields than an identity: {sorted(set(manifest) ^ names)}"
            )
        fields = dict(manifest) | {name: canonical_json(manifest[name]) for name in _JSON_FIELDS}
        fields["state_dtypes"] = tuple((name, dtype) for name, dtype in manifest["state_dtypes"])
        return cls(**fields)

    def first_difference(self, other: ModelIdentity) -> str | None:
        """Return the first differing field with both values, or None: ``config.rope_theta: 1 != 2``."""
        return _difference(self.manifest(), other.manifest(), "")

    def _fields(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"state_dtypes": [list(pair) for pair in self.state_dtypes]}


@lru_cache(maxsize=32)  # asked for in every step of an engine, and over all of a config.json
def _made_once(identity: ModelIdentity) -> bytes:
    return digest_of("ucm-model-identity-1", identity._fields())


def _canonical_text(name: str, text: object) -> str:
    if text == "":
        return "null"
    try:
        return canonical_json(json.loads(text) if isinstance(text, str) else text)
    except (ValueError, RecursionError) as error:
        raise IdentityError(f"{name} is not JSON text: {error}") from error


def _pairs(state_dtypes: Any) -> tuple[tuple[str, str], ...]:
    try:
        pairs = tuple(sorted((state, dtype) for state, dtype in state_dtypes))
    except (TypeError, ValueError):
        raise IdentityError(f"state_dtypes are {state_dtypes!r}; give pairs of (state, dtype)") from None
    for state, _ in pairs:
        _check_text("a name in state_dtypes", state)
    return pairs


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise IdentityError(f"{name} is {shown(text)}, a {type(text).__name__}; give text")


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise IdentityError(f"{name} is {dtype!r}; give the resolved type, one of {', '.join(DTYPES)}")


def _check_number(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise IdentityError(f"{name} is {value!r}, out of range: give an int of at least {least}")


def _unmarked(weights: str) -> str:
    return weights.removeprefix(SAMPLED) if isinstance(weights, str) else weights


def _check_hex(name: str, digest: str) -> None:
    try:
        content = bytes.fromhex(digest)
    except (TypeError, ValueError):
        content = b""
    if len(content) < 16 or digest != content.hex():
        raise IdentityError(f"{name} is {shown(digest)}; give at least 32 lower-case hex characters")


def _difference(left: Any, right: Any, path: str) -> str | None:
    """Return the first path at which two pieces of plain data differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(key for key in right if key not in left)]:
            inner = f"{path}.{key}" if path else key
            found = _difference(left.get(key, _ABSENT), right.get(key, _ABSENT), inner)
            if found:
                return found
        return None
    # By type as well as by value: True is not 1.
    if left is _ABSENT or right is _ABSENT or canonical_json(left) != canonical_json(right):
        return f"{path}: {left!r} != {right!r}"
    return None


class _Absent:
    """Stands for a key that only the other side has."""

    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()
