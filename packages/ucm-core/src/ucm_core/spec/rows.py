"""Spec rows: one per cache semantics, with exact byte sums and loud validation."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ucm_core.errors import SpecError, shown
from ucm_core.spec.dtypes import itemsize

__all__ = [
    "Part",
    "RankRule",
    "RowKind",
    "SpecRow",
    "as_tuple",
    "is_count",
    "is_name",
    "is_number",
    "refuse_repeats",
]

MAX_NUMBER = (1 << 31) - 1
"""Of layers, tokens and elements; products of two of them stay inside 64 bits."""
MAX_BLOCK_TOKENS = 1_048_576
MAX_BLOCK_BYTES = 1 << 40
"""Of all units of one block or state: offsets stay far inside 64 bits."""


class RowKind(Enum):
    """What kind of thing a row holds."""

    CHAIN = "chain"
    """Grows with the prefix: every block is reusable on its own."""
    SNAPSHOT = "snapshot"
    """A state at one exact position, usable only to continue there."""
    FOLLOWER = "follower"
    """Rides on the block ids of a chain row; never votes, but clamps at load."""
    NONE = "none"
    """Never cached."""


class RankRule(Enum):
    """Whether tensor parallelism slices a row or replicates it."""

    ALL_UNION = "all_union"
    """Replicated: any rank's copy is enough."""
    INTERSECTION = "intersection"
    """Sliced: every rank's piece is needed."""


@dataclass(frozen=True, slots=True)
class Part:
    """One named piece of a unit's bytes, for example the keys of a layer.

    >>> Part("k", (8, 128), "bfloat16").entry_bytes
    2048
    """

    name: str
    """Unique within its row."""
    shape: tuple[int, ...]
    """Elements per entry (chain rows and followers) or per state (snapshot rows)."""
    dtype: str
    """Canonical name, see ``ucm_core.spec.dtypes``."""
    tokens_per_entry: int = 1
    """Tokens that one entry stands for; above 1 for compressed rows."""

    def __post_init__(self) -> None:
        """Raise SpecError when a field cannot describe bytes."""
        object.__setattr__(self, "shape", as_tuple(self.shape, f"part {self.name!r}: shape"))
        _check_dtype(self.name, self.dtype)
        if not is_name(self.name) or not self.shape or any(not is_count(size) for size in self.shape):
            raise SpecError(
                f"part {self.name!r} needs a name and a shape of positive ints, got {shown(self.shape)}"
            )
        if not is_count(self.tokens_per_entry):
            raise SpecError(
                f"part {self.name!r}: tokens_per_entry is {shown(self.tokens_per_entry)}, must be at least 1"
            )

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry (or of one state)."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def meaning(self) -> list[object]:
        """The fields that say what the bytes mean, as plain data."""
        return [self.name, list(self.shape), self.dtype, self.tokens_per_entry]


@dataclass(frozen=True, slots=True)
class SpecRow:
    """All layers of one cache semantics.

    >>> SpecRow("full", RowKind.CHAIN, 64, (0, 1), (Part("k", (2, 32), "bfloat16"),)).block_bytes
    16384
    """

    name: str
    """Unique within the table, named by meaning ("full", "window-128")."""
    kind: RowKind
    """What the row holds."""
    block_tokens: int
    """Tokens per block; for snapshot rows the grid that positions lie on. Rows of kind none may say 0."""
    units: tuple[int, ...]
    """Global numbers of the row's layers, ascending."""
    parts: tuple[Part, ...]
    """What one unit holds, in storage order; empty only for rows of kind none."""
    window: int | None = None
    """Sliding window in tokens, the token itself included; None = the whole prefix."""
    rank_rule: RankRule = RankRule.INTERSECTION
    """Who writes the row and how ranks combine."""
    interval: int | None = None
    """Snapshot rows: tokens between kept states, a multiple of the grid; None = keep what is offered."""
    follows: str | None = None
    """Followers: the name of the chain row whose block ids they ride on."""
    extra: int = 0
    """Window rows: tokens that the engine keeps beyond the window."""

    def __post_init__(self) -> None:
        """Raise SpecError when the fields contradict each other."""
        object.__setattr__(self, "units", as_tuple(self.units, f"row {self.name!r}: units"))
        object.__setattr__(self, "parts", as_tuple(self.parts, f"row {self.name!r}: parts"))
        self._check_types()
        self._check_names()
        self._check_units()
        self._check_tokens()
        self._check_kind()
        self._check_bytes()

    def part_entries(self, part: Part) -> int:
        """Return the entries of ``part`` in one unit of one block, or 1, the state.

        Tokens per block and bytes per block are separate facts: a block of 128 entries covers 512 tokens at 4
        tokens an entry and 16,384 at 128.
        """
        return 1 if self.kind is RowKind.SNAPSHOT else self.block_tokens // part.tokens_per_entry

    def part_bytes(self, part: Part) -> int:
        """Return the bytes of ``part`` in one unit of one block, or of one state."""
        return self.part_entries(part) * part.entry_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of one block: the exact sum of its parts."""
        return sum(self.part_bytes(part) for part in self.parts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all units of the row."""
        return len(self.units) * self.unit_bytes

    @property
    def meaning(self) -> list[object]:
        """The fields that say what the stored bytes mean; deployment facts stay out."""
        block_tokens = None if self.kind in (RowKind.SNAPSHOT, RowKind.NONE) else self.block_tokens
        parts = [part.meaning for part in self.parts]
        return [self.name, self.kind.value, block_tokens, list(self.units), parts, self.window, self.follows]

    def _check_types(self) -> None:
        for field, value, kind in (
            ("kind", self.kind, RowKind),
            ("rank_rule", self.rank_rule, RankRule),
            *(("parts", part, Part) for part in self.parts),
        ):
            if not isinstance(value, kind):
                raise SpecError(f"row {self.name!r}: {field} has {value!r}, which is no {kind.__name__}")

    def _check_names(self) -> None:
        if not is_name(self.name):
            raise SpecError(f"a row needs a name, got {self.name!r}")
        refuse_repeats(f"row {self.name!r} has the part", (part.name for part in self.parts))
        if not self.parts and self.kind is not RowKind.NONE:
            raise SpecError(f"row {self.name!r} is a {self.kind.value} row without parts")

    def _check_units(self) -> None:
        if not self.units or not all(is_number(unit) for unit in self.units):
            raise SpecError(f"row {self.name!r} needs layer numbers from 0, got {shown(self.units)}")
        for before, after in zip(self.units, self.units[1:], strict=False):
            if before >= after:
                raise SpecError(
                    f"row {self.name!r}: units must ascend without repeats, {before} is before {after}"
                )

    def _check_tokens(self) -> None:
        none = self.kind is RowKind.NONE and self.block_tokens == 0
        if not none and not (is_count(self.block_tokens) and self.block_tokens <= MAX_BLOCK_TOKENS):
            raise SpecError(
                f"row {self.name!r}: block_tokens is {shown(self.block_tokens)}, must be at least 1 and "
                f"at most {MAX_BLOCK_TOKENS}"
            )
        if self.window is not None and not is_count(self.window):
            raise SpecError(
                f"row {self.name!r}: window is {shown(self.window)}, must be at least 1 (the token itself)"
            )
        if not is_number(self.extra):
            raise SpecError(
                f"row {self.name!r}: extra is {shown(self.extra)}, must be an int that is not negative"
            )

    def _check_kind(self) -> None:
        if (self.kind is RowKind.FOLLOWER) != (self.follows is not None):
            raise SpecError(f"row {self.name!r} is a {self.kind.value} row with follows={self.follows!r}")
        if self.interval is not None and self.kind is not RowKind.SNAPSHOT:
            raise SpecError(
                f"row {self.name!r}: interval {shown(self.interval)} is for snapshot rows, "
                f"not {self.kind.value}"
            )
        if self.interval is not None and (not is_count(self.interval) or self.interval % self.block_tokens):
            raise SpecError(
                f"row {self.name!r}: interval {shown(self.interval)} is no multiple of its grid "
                f"{self.block_tokens}"
            )
        if (self.window is not None or self.extra) and self.kind is not RowKind.CHAIN:
            raise SpecError(
                f"row {self.name!r}: window {self.window} and extra {self.extra} are for chain rows"
            )
        for part in self.parts:
            self._check_part(part)

    def _check_part(self, part: Part) -> None:
        if self.kind is RowKind.SNAPSHOT and part.tokens_per_entry != 1:
            raise SpecError(
                f"row {self.name!r}, part {part.name!r}: a state has no tokens_per_entry "
                f"(got {part.tokens_per_entry})"
            )
        if self.kind is not RowKind.SNAPSHOT and self.block_tokens % part.tokens_per_entry:
            raise SpecError(
                f"row {self.name!r}, part {part.name!r}: block_tokens {self.block_tokens} is no multiple of "
                f"tokens_per_entry {part.tokens_per_entry}"
            )

    def _check_bytes(self) -> None:
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise SpecError(
                f"row {self.name!r}: {len(self.units)} units of {self.unit_bytes} bytes are "
                f"{self.block_bytes} bytes a block, above the limit of {MAX_BLOCK_BYTES}"
            )


def _check_dtype(part: object, dtype: str) -> None:
    try:
        itemsize(dtype)
    except SpecError as error:
        raise SpecError(f"part {part!r}: {error}") from None


def is_name(value: object) -> bool:
    """Return whether ``value`` is text that is not empty and has a UTF-8 spelling."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_number(value: object) -> bool:
    """Return whether ``value`` is an int of at least 0 and at most `MAX_NUMBER`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def as_tuple(values: Any, what: str) -> tuple[Any, ...]:
    """Return ``values`` as a tuple; SpecError when ``what`` is no sequence."""
    try:
        return tuple(values)
    except TypeError:
        raise SpecError(f"{what} is {values!r}; give a sequence") from None


def is_count(value: object) -> bool:
    """Return whether ``value`` is an int of at least 1 and at most `MAX_NUMBER`."""
    return is_number(value) and value != 0


def refuse_repeats(what: str, names: Iterable[Hashable]) -> None:
    """Raise SpecError at the first name that occurs twice."""
    seen: set[Hashable] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{what} {name!r} twice")
        seen.add(name)
