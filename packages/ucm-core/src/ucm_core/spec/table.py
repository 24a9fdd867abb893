"""Spec tables: everything the cache needs to know about a model, as data.

The table is made once at start-up and is read-only afterwards. Validation names the row and the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ucm_core.errors import SpecError, shown
from ucm_core.spec import text
from ucm_core.spec.encoding import digest_of
from ucm_core.spec.rows import Part, RankRule, RowKind, SpecRow, as_tuple, is_count, refuse_repeats

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


def _derived() -> Any:
    """Return a field that is neither given nor compared: it follows from the others."""
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class SpecTable:
    """All rows of a model and the grain of its prefix chain; immutable."""

    rows: tuple[SpecRow, ...]
    """In order of first layer, by convention; the digest does not depend on it."""
    grain_tokens: int
    """Tokens per step of the prefix chain."""
    chain_rows: tuple[SpecRow, ...] = _derived()
    """Rows that vote on the depth of a hit."""
    snapshot_rows: tuple[SpecRow, ...] = _derived()
    """Rows that vote on where to resume."""
    follower_rows: tuple[SpecRow, ...] = _derived()
    """Rows that only clamp at load."""
    alignment_tokens: int = _derived()
    """Exact lcm of the chain rows' block sizes; the grain when there is no chain row."""
    digest: bytes = _derived()
    """32 bytes over what the stored bytes mean: neither row order nor deployment facts enter."""

    def __post_init__(self) -> None:
        """Derive what follows from the rows; SpecError when they do not fit together."""
        self._derive("rows", as_tuple(self.rows, "the table's rows"))
        for row in self.rows:
            if not isinstance(row, SpecRow):
                raise SpecError(f"the table has the row {row!r}, which is no SpecRow")
        if not is_count(self.grain_tokens):
            raise SpecError(f"grain_tokens is {shown(self.grain_tokens)}, must be at least 1")
        refuse_repeats("the table has the row", (row.name for row in self.rows))
        self._derive("chain_rows", self._of_kind(RowKind.CHAIN))
        self._derive("snapshot_rows", self._of_kind(RowKind.SNAPSHOT))
        self._derive("follower_rows", self._of_kind(RowKind.FOLLOWER))
        for row in self.chain_rows:
            self._check_grain(row)
        for row in self.follower_rows:
            self._check_follower(row)
        sizes = [row.block_tokens for row in self.chain_rows]
        self._derive("alignment_tokens", alignment_of(sizes or [self.grain_tokens]))
        meanings = [row.meaning for row in sorted(self.rows, key=lambda row: row.name)]
        self._derive("digest", digest_of("ucm-spec-table-1", meanings))

    def row(self, name: str) -> SpecRow:
        """Return the row called ``name``; SpecError lists the names that exist."""
        for row in self.rows:
            if row.name == name:
                return row
        raise SpecError(f"no row {name!r} in the table; it has {', '.join(row.name for row in self.rows)}")

    def under_context(self, size: int) -> SpecTable:
        """Return the table for ``size`` context-parallel ranks: dealt-out tokens are replicated nowhere.

        ``block_tokens`` of a row counts the tokens of all ranks, so an engine's block id of 16 tokens covers
        64 under 4 ranks. SpecError where a block's entries cannot be dealt out evenly. The digest stays: the
        bytes mean the same, only who holds them changes.
        """
        if not is_count(size):
            raise SpecError(f"a context of {shown(size)} ranks; at least 1")
        if size == 1:
            return self
        for row in (*self.chain_rows, *self.follower_rows):
            _check_deal(row, size)
        return replace(self, rows=tuple(replace(row, rank_rule=RankRule.INTERSECTION) for row in self.rows))

    def to_mapping(self) -> dict[str, Any]:
        """Return the table as plain data, see ``ucm_core.spec.text``."""
        return {"grain_tokens": self.grain_tokens, "rows": [text.row_to_mapping(row) for row in self.rows]}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SpecTable:
        """Return the table that plain data describes; SpecError names the row and the key."""
        rows, grain_tokens = text.read_table(mapping)
        return cls(rows, grain_tokens)

    @classmethod
    def from_yaml(cls, yaml_text: str) -> SpecTable:
        """Return the table in YAML or JSON text."""
        return cls.from_mapping(text.read_yaml(yaml_text))

    def _derive(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _of_kind(self, kind: RowKind) -> tuple[SpecRow, ...]:
        return tuple(row for row in self.rows if row.kind is kind)

    def _check_grain(self, row: SpecRow) -> None:
        if row.block_tokens % self.grain_tokens:
            raise SpecError(
                f"row {row.name!r}: block_tokens {row.block_tokens} is no multiple of grain_tokens "
                f"{self.grain_tokens}, so its block ends have no digest"
            )

    def _check_follower(self, row: SpecRow) -> None:
        source = next((other for other in self.rows if other.name == row.follows), None)
        if source is None or source.kind is not RowKind.CHAIN:
            what = "a row that the table does not have" if source is None else f"a {source.kind.value} row"
            raise SpecError(
                f"row {row.name!r} follows {row.follows!r}, {what}; only a chain row has block ids"
            )
        if source.block_tokens != row.block_tokens:
            raise SpecError(
                f"row {row.name!r} has block_tokens {row.block_tokens} and follows {source.name!r} "
                f"with {source.block_tokens}; they must be equal"
            )


def _check_deal(row: SpecRow, size: int) -> None:
    for part in row.parts:
        if row.part_entries(part) % size:
            raise SpecError(
                f"row {row.name!r}, part {part.name!r}: {row.part_entries(part)} entries a block cannot be "
                f"dealt out evenly to {size} context ranks; choose block_tokens that is a multiple of "
                f"{size * part.tokens_per_entry}"
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
