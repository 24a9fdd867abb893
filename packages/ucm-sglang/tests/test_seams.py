"""What UCM calls and is called by looks as it did when the adapter was written.

A new release of SGLang that changes a seam fails here, cheaply and by name. After a look at what changed (and
at the adapter), ``python packages/ucm-sglang/tests/test_seams.py`` writes ``seams.json`` anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import import_doubles
import pytest

STORED = Path(__file__).parent / "seams.json"


def test_the_seams_are_as_they_were() -> None:
    pytest.importorskip("sglang")
    import_doubles.install()
    from seams import shapes

    found, stored = shapes(), json.loads(STORED.read_text(encoding="utf-8"))
    assert found == stored
    assert "missing" not in found.values()


def write() -> None:
    """Store what the installed SGLang looks like."""
    import_doubles.install()
    from seams import shapes

    STORED.write_text(json.dumps(shapes(), indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
