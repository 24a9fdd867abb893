"""Spec rows and spec tables: everything the cache needs to know about a model, as data.

A row collects all layers of one cache semantics. The table is made once at start-up and is read-only afterwards.
Validation is loud: it names the row and the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from ucm_core.errors import SpecError
from ucm_core.spec.dtypes import itemsize
from ucm_core.spec.encoding import digest_of

__all__ = [
    "MAX_ALIGNMENT_TOKENS",
    "Part",
    "RankRule",
    "RowKind",
    "SpecRow",
    "SpecTable",
    "alignment_of",
]

MAX_ALIGNMENT_TOKENS = 1_048_576
"""Above this common multiple no request of a real length could resume; such a table is refused."""


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
        object.__setattr__(self, "shape", tuple(self.shape))
        itemsize(self.dtype)
        if not self.name or not self.shape or any(not _positive(size) for size in self.shape):
            raise SpecError(f"part {self.name!r} needs a name and a shape of positive ints, got {self.shape}")
        if not _positive(self.tokens_per_entry):
            raise SpecError(
                f"part {self.name!r}: tokens_per_entry is {self.tokens_per_entry}, must be at least 1"
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
        object.__setattr__(self, "units", tuple(self.units))
        object.__setattr__(self, "parts", tuple(self.parts))
        self._check_names()
        self._check_units()
        self._check_tokens()
        self._check_kind()

    def part_bytes(self, part: Part) -> int:
        """Return the bytes of ``part`` in one unit of one block, or of one state."""
        if self.kind is RowKind.SNAPSHOT:
            return part.entry_bytes
        return self.block_tokens // part.tokens_per_entry * part.entry_bytes

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

    def _check_names(self) -> None:
        if not self.name:
            raise SpecError("a row needs a name")
        _refuse_repeats(f"row {self.name!r} has the part", (part.name for part in self.parts))
        if not self.parts and self.kind is not RowKind.NONE:
            raise SpecError(f"row {self.name!r} is a {self.kind.value} row without parts")

    def _check_units(self) -> None:
        if not self.units or min(self.units) < 0:
            raise SpecError(f"row {self.name!r} needs layer numbers from 0, got {self.units}")
        for before, after in zip(self.units, self.units[1:], strict=False):
            if before >= after:
                raise SpecError(
                    f"row {self.name!r}: units must ascend without repeats, {before} is before {after}"
                )

    def _check_tokens(self) -> None:
        if not _positive(self.block_tokens) and not (self.kind is RowKind.NONE and self.block_tokens == 0):
            raise SpecError(f"row {self.name!r}: block_tokens is {self.block_tokens}, must be at least 1")
        if self.window is not None and not _positive(self.window):
            raise SpecError(
                f"row {self.name!r}: window is {self.window}, must be at least 1 (the token itself)"
            )
        if self.extra < 0:
            raise SpecError(f"row {self.name!r}: extra is {self.extra}, must not be negative")
        if self.interval is not None and (self.interval <= 0 or self.interval % self.block_tokens):
            raise SpecError(
                f"row {self.name!r}: interval {self.interval} is no multiple of its grid {self.block_tokens}"
            )

    def _check_kind(self) -> None:
        if (self.kind is RowKind.FOLLOWER) != (self.follows is not None):
            raise SpecError(f"row {self.name!r} is a {self.kind.value} row with follows={self.follows!r}")
        if self.interval is not None and self.kind is not RowKind.SNAPSHOT:
            raise SpecError(
                f"row {self.name!r}: interval {self.interval} is for snapshot rows, not {self.kind.value}"
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
                f"row {self.name!r}, part {part.name!r}: tokens_per_entry is {part.tokens_per_entry}; a state has none"
            )
        if self.kind is not RowKind.SNAPSHOT and self.block_tokens % part.tokens_per_entry:
            raise SpecError(
                f"row {self.name!r}, part {part.name!r}: block_tokens {self.block_tokens} is no multiple of "
                f"tokens_per_entry {part.tokens_per_entry}"
            )


@dataclass(frozen=True)
class SpecTable:
    """All rows of a model and the grain of its prefix chain; immutable.

    Not slotted, because the derived values below are computed once and kept.
    """

    rows: tuple[SpecRow, ...]
    """In order of first layer, by convention; the digest does not depend on it."""
    grain_tokens: int
    """Tokens per step of the prefix chain."""

    def __post_init__(self) -> None:
        """Raise SpecError when rows do not fit together."""
        object.__setattr__(self, "rows", tuple(self.rows))
        if not _positive(self.grain_tokens):
            raise SpecError(f"grain_tokens is {self.grain_tokens}, must be at least 1")
        _refuse_repeats("the table has the row", (row.name for row in self.rows))
        for row in self.chain_rows:
            self._check_grain(row)
        for row in self.follower_rows:
            self._check_follower(row)
        alignment_of(row.block_tokens for row in self.chain_rows)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes over what the stored bytes mean: neither row order nor deployment facts enter."""
        return digest_of(
            "ucm-spec-table-1", sorted((row.meaning for row in self.rows), key=lambda item: str(item[0]))
        )

    @cached_property
    def alignment_tokens(self) -> int:
        """Exact lcm of the chain rows' block sizes; the grain when there is no chain row."""
        return (
            alignment_of(row.block_tokens for row in self.chain_rows)
            if self.chain_rows
            else self.grain_tokens
        )

    @cached_property
    def chain_rows(self) -> tuple[SpecRow, ...]:
        """Rows that vote on the depth of a hit."""
        return self._of_kind(RowKind.CHAIN)

    @cached_property
    def snapshot_rows(self) -> tuple[SpecRow, ...]:
        """Rows that vote on where to resume."""
        return self._of_kind(RowKind.SNAPSHOT)

    @cached_property
    def follower_rows(self) -> tuple[SpecRow, ...]:
        """Rows that only clamp at load."""
        return self._of_kind(RowKind.FOLLOWER)

    def row(self, name: str) -> SpecRow:
        """Return the row called ``name``; SpecError lists the names that exist."""
        for row in self.rows:
            if row.name == name:
                return row
        raise SpecError(f"no row {name!r} in the table; it has {', '.join(row.name for row in self.rows)}")

    def _of_kind(self, kind: RowKind) -> tuple[SpecRow, ...]:
        return tuple(row for row in self.rows if row.kind is kind)

    def _check_grain(self, row: SpecRow) -> None:
        if row.block_tokens % self.grain_tokens:
            raise SpecError(
                f"row {row.name!r}: block_tokens {row.block_tokens} is no multiple of grain_tokens "
                f"{self.grain_tokens}, so its block ends have no digest"
            )

    def _check_follower(self, row: SpecRow) -> None:
        source = next((other for other in self.chain_rows if other.name == row.follows), None)
        if source is None:
            raise SpecError(f"row {row.name!r} follows {row.follows!r}, which is no chain row of the table")
        if source.block_tokens != row.block_tokens:
            raise SpecError(
                f"row {row.name!r} has block_tokens {row.block_tokens} and follows {source.name!r} "
                f"with {source.block_tokens}; they must be equal"
            )


def alignment_of(block_tokens: Iterable[int]) -> int:
    """Return the exact lcm of block sizes; SpecError above MAX_ALIGNMENT_TOKENS, with both numbers.

    >>> alignment_of([544, 256])
    4352
    """
    sizes = tuple(block_tokens)
    multiple = math.lcm(*sizes)
    if multiple > MAX_ALIGNMENT_TOKENS:
        raise SpecError(
            f"block sizes {', '.join(map(str, sizes))} meet only every {multiple} tokens, above the limit "
            f"of {MAX_ALIGNMENT_TOKENS}; choose block sizes with common factors"
        )
    return multiple


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _refuse_repeats(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{what} {name!r} twice")
        seen.add(name)
