"""Spec tables as plain mappings and YAML text, for tables that are written by hand.

Errors name the place (row and key) and close matches. ``units`` may be a list of numbers and inclusive ranges
(``["0-3", 7]``) or one such range as text.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from ucm_core.errors import SpecError, shown
from ucm_core.spec.rows import Part, RankRule, RowKind, SpecRow

__all__ = ["read_table", "read_yaml", "row_to_mapping"]

_LAYER_DIGITS = 4
"""No model has ten thousand layers, and a longer range would fill the memory."""

_Choice = TypeVar("_Choice", bound=Enum)

_TABLE_KEYS = {"grain_tokens": True, "rows": True}
_ROW_KEYS = {
    "name": True,
    "kind": True,
    "block_tokens": False,
    "units": True,
    "parts": False,
    "window": False,
    "rank_rule": False,
    "interval": False,
    "follows": False,
    "extra": False,
}
_PART_KEYS = {"name": True, "shape": True, "dtype": True, "tokens_per_entry": False}


def read_table(mapping: Mapping[str, Any]) -> tuple[tuple[SpecRow, ...], int]:
    """Return the rows and the grain that ``mapping`` describes; SpecError names the row and the key."""
    fields = _checked(mapping, _TABLE_KEYS, "the table")
    rows = _sequence(fields["rows"], "rows", "the table")
    table_rows = tuple(_row_from_mapping(row, f"row {index}") for index, row in enumerate(rows))
    return table_rows, _whole(fields["grain_tokens"], "grain_tokens", "the table")


def read_yaml(text: str) -> Any:
    """Return the data in YAML or JSON ``text``; SpecError for text that is neither."""
    import yaml  # noqa: PLC0415 - only hand-written tables need it

    try:
        return yaml.safe_load(text)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
        AttributeError,
    ) as error:  # also bad numbers and dates
        raise SpecError(f"the spec table is not YAML: {error}") from error


def row_to_mapping(row: SpecRow) -> dict[str, Any]:
    """Return one row as plain data; fields at their default are left out."""
    fields: dict[str, Any] = {
        "name": row.name,
        "kind": row.kind.value,
        "block_tokens": row.block_tokens,
        "units": list(row.units),
        "parts": [_part_to_mapping(part) for part in row.parts],
        "rank_rule": row.rank_rule.value,
    }
    optional = {
        "window": row.window,
        "interval": row.interval,
        "follows": row.follows,
        "extra": row.extra or None,
    }
    return fields | {key: value for key, value in optional.items() if value is not None}


def _part_to_mapping(part: Part) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": part.name, "shape": list(part.shape), "dtype": part.dtype}
    return fields | ({"tokens_per_entry": part.tokens_per_entry} if part.tokens_per_entry != 1 else {})


def _row_from_mapping(mapping: object, place: str) -> SpecRow:
    if isinstance(mapping, Mapping) and isinstance(mapping.get("name"), str):
        place = f"row {mapping['name']!r}"
    fields = _checked(mapping, _ROW_KEYS, place)
    parts = _sequence(fields.get("parts") or (), "parts", place)

    def optional(key: str) -> int | None:
        return None if fields.get(key) is None else _whole(fields[key], key, place)

    return SpecRow(
        name=_text(fields["name"], "name", place),
        kind=_choice(RowKind, fields["kind"], f"{place}: kind"),
        block_tokens=optional("block_tokens") or 0,
        units=_units(fields["units"], place),
        parts=tuple(_part_from_mapping(part, place) for part in parts),
        window=optional("window"),
        rank_rule=_choice(RankRule, fields.get("rank_rule", "intersection"), f"{place}: rank_rule"),
        interval=optional("interval"),
        follows=None if fields.get("follows") is None else _text(fields["follows"], "follows", place),
        extra=optional("extra") or 0,
    )


def _part_from_mapping(mapping: object, place: str) -> Part:
    fields = _checked(mapping, _PART_KEYS, f"{place}, a part")
    place = f"{place}, part {shown(fields['name'])}"
    return Part(
        name=_text(fields["name"], "name", place),
        shape=tuple(_whole(size, "shape", place) for size in _sequence(fields["shape"], "shape", place)),
        dtype=_text(fields["dtype"], "dtype", place),
        tokens_per_entry=_whole(fields.get("tokens_per_entry", 1), "tokens_per_entry", place),
    )


def _checked(mapping: object, keys: Mapping[str, bool], place: str) -> Mapping[str, Any]:
    """Return ``mapping`` when it has every required key (True) and no unknown one."""
    if not isinstance(mapping, Mapping):
        raise SpecError(f"{place} must be a mapping, got {type(mapping).__name__}")
    for key in mapping:
        if key not in keys:
            raise SpecError(f"{place} has the unknown key {key!r}; {_hint(str(key), keys)}")
    missing = [key for key, required in keys.items() if required and mapping.get(key) is None]
    if missing:
        raise SpecError(f"{place} lacks {', '.join(missing)}")
    return mapping


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=2)
    return f"did you mean {' or '.join(close)}?" if close else f"it may have {', '.join(known)}"


def _choice(choices: type[_Choice], value: object, place: str) -> _Choice:
    known = {choice.value: choice for choice in choices}
    if not isinstance(value, str) or value not in known:
        raise SpecError(f"{place} is {shown(value)}; {_hint(shown(value), known)}")
    return known[value]


def _whole(value: object, key: str, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{place}: {key} must be a whole number, got {shown(value)}")
    return value


def _text(value: object, key: str, place: str) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{place}: {key} must be text, got {shown(value)}")
    return value


def _sequence(value: object, key: str, place: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise SpecError(f"{place}: {key} must be a list, got {shown(value)}")
    return value


def _units(value: object, place: str) -> tuple[int, ...]:
    spans = [value] if isinstance(value, str | int) else _sequence(value, "units", place)
    return tuple(unit for span in spans for unit in _span(span, place))


def _span(span: object, place: str) -> range:
    """Return the layers of ``7`` or of the inclusive text ``"0-3"``."""
    if isinstance(span, str):
        begin, dash, end = span.partition("-")
        layers = range(0)
        if _is_layer(begin) and (_is_layer(end) or not dash):
            layers = range(int(begin), int(end if dash else begin) + 1)
        if not layers:
            raise SpecError(f"{place}: units {span!r} is no layer range like 0-3")
        return layers
    number = _whole(span, "units", place)
    return range(number, number + 1)


def _is_layer(text: str) -> bool:
    return text.strip().isdecimal() and len(text.strip()) <= _LAYER_DIGITS
