"""The reference engine as a whole: what it saves it finds again, and never anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from openings import Crowd, engine, object_files

from ucm_core.spec.segments import Parallelism
from ucm_core.testing.engine.engine import EngineShape, ReferenceEngine
from ucm_core.testing.engine.request import Phase
from ucm_core.testing.engine.scheduler import Feed
from ucm_core.testing.engine.work import Step

PROMPT = list(range(100, 170))
"""70 tokens: the deepest joint point that leaves one to compute is 64."""
SHAPES = {
    "one rank": EngineShape(),
    "small pages": EngineShape(pages_per_block=2),
    "shared tensors": EngineShape(shared=(("full", (0, 4)), ("window-20", (2, 6)))),
    "followed layers": EngineShape(follows={8: 4, 9: 5}),
    "heads": EngineShape(Parallelism(tensor=2)),
    "more ranks than latents": EngineShape(Parallelism(tensor=2, partition=(4, 4))),
    "stages": EngineShape(Parallelism(partition=(4, 4))),
    "uneven stages": EngineShape(Parallelism(partition=(1, 0, 7))),
    "prefill context": EngineShape(Parallelism(prefill_context=2)),
    "everything": EngineShape(
        Parallelism(tensor=2, partition=(3, 5), prefill_context=2), Feed(drafts=2), pages_per_block=2
    ),
}


def run(engine_: ReferenceEngine, prompt: list[int] = PROMPT, *, output_tokens: int = 3) -> int:
    """Run one request; the tokens that it did not compute."""
    before = engine_.scheduler.counts.resumed_tokens
    request = engine_.submit("r", prompt, output_tokens=output_tokens)
    counts = engine_.run()
    assert request.phase is Phase.FINISHED
    assert len(request.tokens) == len(prompt) + output_tokens
    return counts.resumed_tokens - before


@pytest.mark.parametrize("name", SHAPES)
def test_a_repeated_prompt_resumes_at_the_deepest_joint_point(tmp_path: Path, name: str) -> None:
    with engine(tmp_path, shape=SHAPES[name]) as first:
        assert [run(first), run(first), run(first, [7, *PROMPT])] == [0, 64, 0]
    with engine(tmp_path, shape=SHAPES[name]) as restarted:
        assert run(restarted, [*PROMPT, 1, 2]) == 64


def test_another_process_resumes_from_the_files(tmp_path: Path) -> None:
    with engine(tmp_path) as here:
        run(here)
    command = [sys.executable, __file__, str(tmp_path)]
    paths = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    found = subprocess.run(command, env=paths, capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == ["64"]


def test_ranks_that_are_cut_alike_share_and_others_do_not(tmp_path: Path) -> None:
    """Segments name slices: with one stage instead of two nothing is whole."""
    with engine(tmp_path, shape=SHAPES["heads"]) as two:
        run(two)
    with engine(tmp_path, shape=SHAPES["one rank"]) as one:
        assert run(one) == 0
    with engine(tmp_path, shape=SHAPES["heads"]) as again:
        assert run(again) == 64


def test_of_ranks_with_equal_bytes_each_object_is_written_by_one(tmp_path: Path) -> None:
    """Of 4 blocks: 4 files of the latent row, not 8, and 2 x 4 of the row whose heads are cut."""
    with engine(tmp_path, shape=SHAPES["heads"]) as two:
        run(two)
    files = Counter(path.parts[-3] for path in object_files(tmp_path))
    assert (files["latent"], files["key"], files["full"]) == (4, 4, 8)


def test_a_missing_segment_of_one_rank_is_a_miss_for_all(tmp_path: Path) -> None:
    with engine(tmp_path, shape=SHAPES["heads"]) as two:
        run(two)
    one = next(path for path in object_files(tmp_path) if ".h1-2." in path.name and "full" in path.parts)
    one.unlink()
    with engine(tmp_path, shape=SHAPES["heads"]) as again:
        assert run(again) < 64


def test_drafts_change_no_token_and_no_byte(tmp_path: Path) -> None:
    prompt, luck = Crowd().prompt(), Random(1)
    tokens = []
    for drafts in (0, 4):
        shape = EngineShape(feed=Feed(drafts=drafts), seed=luck.randrange(9))
        with engine(tmp_path / str(drafts), shape=shape) as engine_:
            request = engine_.submit("r", prompt, output_tokens=60)
            counts = engine_.run()
            tokens.append(request.tokens)
            assert run(engine_, [*request.tokens, 5]) > len(prompt)
    assert counts.rejected > 0
    assert tokens[0] == tokens[1]


def test_layers_that_are_called_again_keep_their_last_bytes(tmp_path: Path) -> None:
    """What the first call wrote is rubbish."""
    with engine(tmp_path) as engine_:
        engine_.change = lambda step: replace(step, repeated=frozenset({4, 6, 7}))
        run(engine_)
        engine_.change = lambda step: step
        assert run(engine_) == 64


class TestHooksThatDoNotCome:
    def skip(self, engine_: ReferenceEngine, *layers: int, only_loads: bool = False) -> None:
        def change(step: Step) -> Step:
            skipped = frozenset(layers) if bool(step.loads) or not only_loads else frozenset()
            return replace(step, skipped=skipped)

        engine_.change = change

    def test_what_they_would_have_saved_is_saved_late(self, tmp_path: Path) -> None:
        with engine(tmp_path) as engine_:
            self.skip(engine_, 4, 5)
            engine_.submit("r", PROMPT)
            engine_.step()
            engine_.step()
            assert engine_.reports[0].unseen == (4, 5)
            assert engine_.reports[0].units_saved_late == 3  # full, latent and its key
            engine_.run()
            self.skip(engine_)
            assert run(engine_) == 64

    def test_what_nobody_waited_for_has_failed(self, tmp_path: Path) -> None:
        with engine(tmp_path) as engine_:
            run(engine_)
            self.skip(engine_, 5, only_loads=True)
            engine_.submit("r", PROMPT)
            for _ in range(3):
                engine_.step()
            assert engine_.scheduler.counts.rewound >= 1
            self.skip(engine_)
            engine_.run()
            assert engine_.scheduler.counts.finished == 2


class TestFailures:
    def test_an_object_that_vanished_is_computed_again(self, tmp_path: Path) -> None:
        """It goes between the verdict and the load: on one rank only, and all of them start again."""
        shape = SHAPES["more ranks than latents"]
        with engine(tmp_path, shape=shape) as writer:
            run(writer)
        with engine(tmp_path, shape=shape) as engine_:
            begin_load = engine_.ranks[1].begin_load

            def drop_first(load):
                engine_.ranks[1].begin_load = begin_load
                for path in object_files(tmp_path):
                    if ".h1-2.u0-1." in path.name and "full" in path.parts:
                        path.unlink()
                begin_load(load)

            engine_.ranks[1].begin_load = drop_first
            run(engine_)
            assert engine_.scheduler.counts.rewound == 1
            assert run(engine_) == 64

    def test_damaged_files_are_a_miss(self, tmp_path: Path) -> None:
        with engine(tmp_path) as writer:
            run(writer)
        for path in object_files(tmp_path):
            data = bytearray(path.read_bytes())
            data[4100] ^= 1
            path.write_bytes(data)
        with engine(tmp_path) as engine_:
            run(engine_)
            assert engine_.scheduler.counts.rewound > 0
            assert run(engine_) == 64


if __name__ == "__main__":
    with engine(Path(sys.argv[1])) as here:
        sys.stdout.write(str(run(here)))
