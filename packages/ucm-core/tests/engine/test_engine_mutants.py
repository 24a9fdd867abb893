"""The verification can fail: an engine that is handed a wrong byte, or makes one, notices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from openings import engine, object_files
from test_engine_races import gate
from test_reference_engine import PROMPT, SHAPES, run

from ucm_core.flow.step import RunningLoad
from ucm_core.testing.engine import layers, scheduler
from ucm_core.testing.engine.engine import EngineShape, ReferenceEngine, WrongBytesError
from ucm_core.testing.engine.request import Request
from ucm_core.testing.engine.scheduler import Feed

ROWS = ["full", "latent", "window-20", "key", "state"]


def prepared(engine_: ReferenceEngine) -> Request:
    """A request whose loads have landed and whose step is still to come."""
    run(engine_)
    request = engine_.submit("r", PROMPT)
    engine_.step()
    assert request.resumed == 64
    return request


@pytest.mark.parametrize("row", ROWS)
def test_one_flipped_bit_of_any_row_is_noticed(
    tmp_path: Path, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path) as engine_:
        request = prepared(engine_)
        memory = engine_.ranks[0].memories[row]
        wrong = memory.wrong

        def flip(layer: int, cells: layers.Cells) -> int:
            if layer == memory.row.units[-1]:
                memory._memory[-1, cells.pages[-1], cells.places[-1], -1] ^= 1
            return wrong(layer, cells)

        monkeypatch.setattr(memory, "wrong", flip)
        with pytest.raises(WrongBytesError, match=f"1 reads were wrong .* row='{row}'"):
            engine_.step()
        monkeypatch.undo()
        engine_.abort(request)


def test_a_pipeline_that_does_not_wait_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant believes that what it asked for is there."""
    with engine(tmp_path) as engine_:
        run(engine_)
        with gate(engine_, PROMPT) as opened:
            monkeypatch.setattr(RunningLoad, "wait", lambda self, layer, left_s: None)
            monkeypatch.setattr(RunningLoad, "finish", lambda self, promised, left_s: {})
            request = engine_.submit("r", PROMPT)
            engine_.step()
            with pytest.raises(WrongBytesError):
                engine_.step()
            monkeypatch.undo()
            opened.set()
            engine_.abort(request)


def test_an_engine_that_saves_what_was_thrown_away_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant saves the bytes of a call of a layer that is not the last one."""

    def rubbish_last(*arguments: object) -> list[layers._Call]:
        return [replace(call, rubbish=call.layer == 4) for call in calls(*arguments)]

    calls = layers._calls
    with engine(tmp_path) as engine_:
        monkeypatch.setattr(layers, "_calls", rubbish_last)
        with pytest.raises(WrongBytesError, match="row='full', layer=4"):
            [run(engine_) for _ in range(2)]
        monkeypatch.undo()
        engine_.abort(engine_.scheduler.waiting[0])


def test_a_draft_that_was_rejected_and_kept_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = Request.accept

    def one_more(request: Request, drafts: Sequence[int]) -> int:
        return min(accept(request, drafts) + 1, len(drafts))

    monkeypatch.setattr(Request, "accept", one_more)
    shape = EngineShape(feed=Feed(drafts=3, drafts_right=0.0))
    with engine(tmp_path, shape=shape) as engine_:
        request = engine_.submit("r", PROMPT, output_tokens=20)
        with pytest.raises(WrongBytesError):
            engine_.run()
        engine_.abort(request)


def test_pages_that_are_used_again_too_early_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant gives the pages of an aborted request away while a load still writes to them."""
    with engine(tmp_path, shape=EngineShape(pages=8)) as engine_:
        run(engine_)
        with gate(engine_, PROMPT) as opened:
            monkeypatch.setattr(engine_.ranks[0], "idle", lambda request: True)
            monkeypatch.setattr(RunningLoad, "give_up", lambda self: None)
            aborted = late(engine_)
            key = aborted.key
            engine_.abort(aborted)
            other = engine_.submit("other", [7, *PROMPT], output_tokens=9)
            for _ in range(2):
                engine_.step()
            opened.set()
            assert engine_.ranks[0]._copies[key][0].ticket.wait(60, shard=0)
            with pytest.raises(WrongBytesError):
                engine_.step()
            monkeypatch.undo()
            engine_.ranks[0].cancel(key)
            engine_.abort(other)


def late(engine_: ReferenceEngine) -> Request:
    """A request that was admitted, and whose loads have begun."""
    request = engine_.submit("late", PROMPT)
    engine_.step()
    return request


class TestRanksDoNotKnowOfEachOther:
    """A load fails on the first stage; the second one computes on its garbage, and cannot know."""

    SHAPE = SHAPES["stages"]

    def fail_once(self, root: Path) -> None:
        with engine(root, shape=self.SHAPE) as writer:
            run(writer)
        with engine(root, shape=self.SHAPE) as engine_:
            for path in object_files(root):
                if ".u0-1." in path.name and path.parts[-3] == "full":
                    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
            run(engine_, [*PROMPT, *range(40)])
            assert engine_.scheduler.counts.rewound == 1
        with engine(root, shape=self.SHAPE) as reader:
            assert run(reader, [*PROMPT, *range(40)]) == 96

    def test_what_it_computed_is_not_saved(self, tmp_path: Path) -> None:
        self.fail_once(tmp_path)

    def test_the_mutant_that_saves_it_is_noticed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        planned = scheduler._Planned
        monkeypatch.setattr(
            scheduler, "_Planned", lambda request, work, drafts, saving: planned(request, work, drafts, True)
        )
        with pytest.raises(WrongBytesError):
            self.fail_once(tmp_path)
