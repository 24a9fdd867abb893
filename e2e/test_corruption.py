"""Files are damaged between two processes: right tokens, a counter, and the next save heals them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e import objects
from e2e.harness import Answer
from e2e.runs import Runs, serve_apart

FLIPS = (0, 11, 60, 130, 4093, 4096, 12345, -1)
"""Where one byte flips: magic, version, key, a checksum, the header's own; the payload begins at 4096."""


def flip_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def damage(files: Iterable[Path]) -> None:
    """Damage every file: the first two are swapped, the third is cut short, one byte flips in each other."""
    one, other, third, *rest = files
    swap(one, other)
    objects.cut_short(third)
    for number, path in enumerate(rest):
        flip_byte(path, FLIPS[number % len(FLIPS)])


@dataclass(frozen=True, slots=True)
class Damaged:
    """A process on a root of which every file was damaged."""

    answers: tuple[Answer, ...]
    """To the first prompts, then to the longer ones."""
    corrupt: float
    """What the counter of corrupt objects said in the end."""
    before: dict[Path, bytes]
    """Objects by path before the damage."""
    hurt: dict[Path, bytes]
    """The same after the damage."""
    after: dict[Path, bytes]
    """The same after the process has ended."""


@pytest.fixture(scope="module", params=["dense", "window"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def damaged(runs: Runs, family: str) -> Damaged:
    root = runs.root_copy(family, "damaged")
    before = objects.contents(root)
    for files in objects.rows(root).values():
        damage(files)
    hurt = objects.contents(root)
    with runs.engine("damaged", family, root) as engine:
        first = serve_apart(engine, runs.prompts(family).first)
        longer = serve_apart(engine, runs.plain(family).longer_prompts)
        corrupt = engine.counter("ucm_objects_failed_total", reason="corrupt")
    return Damaged(first + longer, corrupt, before, hurt, objects.contents(root))


def test_every_file_was_damaged(damaged: Damaged) -> None:
    assert damaged.before.keys() == damaged.hurt.keys()
    assert all(damaged.before[path] != damaged.hurt[path] for path in damaged.before)


def test_tokens_are_right(runs: Runs, family: str, damaged: Damaged) -> None:
    right = runs.plain(family).first + runs.plain(family).longer
    assert [answer.tokens for answer in damaged.answers] == [answer.tokens for answer in right]


def test_it_is_counted(damaged: Damaged) -> None:
    assert damaged.corrupt > 0


def test_files_that_were_needed_are_healed(family: str, damaged: Damaged) -> None:
    full = [path for path in damaged.before if path.parts[-3] == "full"]
    assert len(full) == 12
    assert {path: damaged.after[path] == damaged.before[path] for path in full} == dict.fromkeys(full, True)


def test_files_of_a_window_are_healed_where_a_prompt_ended(family: str, damaged: Damaged) -> None:
    """Of the window's blocks only those before the resume positions 256, 384 and 512 are ever read."""
    window = [path for path in damaged.before if path.parts[-3] != "full"]
    healed = [path for path in window if damaged.after[path] == damaged.before[path]]
    assert len(healed) >= (3 if family == "window" else 0)
    assert all(damaged.after[path] == damaged.hurt[path] for path in window if path not in healed)
