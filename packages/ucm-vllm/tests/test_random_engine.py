"""Whatever an engine does with its blocks and becomes of files: no wrong byte is loaded or stored."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from random_engine import POOL, TOKENS, RandomEngine, Running
from slow_saves import SlowSave

from ucm_core.store.block import BlockStore

STEPS = 120
WAIT_S = 300.0


@pytest.fixture
def slow_saves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Half of all saves read a little later than they could, often in the middle of another step."""
    real, choice, timers = BlockStore.begin_save, random.Random(7), []

    def begin_save(*arguments: Any, **more: Any) -> Any:
        save = real(*arguments, **more)
        if choice.random() < 0.5:
            return save
        slow = SlowSave(save)
        timers.append(threading.Timer(0.15 * choice.random(), slow.let_go))
        timers[-1].start()
        return slow

    monkeypatch.setattr(BlockStore, "begin_save", begin_save)
    yield
    for timer in timers:
        timer.join()


def live(engine: RandomEngine) -> None:
    """Requests come and go; then all are aborted, and everything is given back."""
    for _ in range(STEPS):
        if engine.choice.random() < 0.6 and len(engine.waiting) < 6:
            engine.arrive()
        engine.step()
        for what, chance in ((engine.abort, 0.06), (engine.damage, 0.08), (engine.forget, 0.5)):
            if engine.choice.random() < chance:
                what()
    deadline = time.monotonic() + WAIT_S
    while engine.running or engine.waiting or engine.loading:
        engine.abort()
    while engine.held:
        engine.step()
        assert time.monotonic() < deadline


def wrongly_stored(seen: list[Running], root: Path) -> list[str]:
    """What a new engine loads of all that was ever asked."""
    reader = RandomEngine(root, 0)
    for number, asked in enumerate(seen):
        if len(asked.prefix) >= (POOL - 1) * TOKENS:
            continue
        again = Running(f"again {number}", list(asked.request.all_token_ids), outputs=1)
        reader.forget()
        reader.waiting.append(again)
        while again in reader.waiting or again in reader.running:
            reader.step()
    wrong, loads = reader.wrong, reader.loads
    reader.halves.close()
    assert loads
    return wrong


@pytest.mark.parametrize("settings", [{}, {"load_asynchronously": True}, {"layerwise": False}], ids=str)
def test_no_wrong_byte_is_loaded_or_stored(
    tmp_path: Path, slow_saves: None, settings: dict[str, bool]
) -> None:
    seen = []
    for seed in (1, 2):  # the second engine meets what the first has left
        engine = RandomEngine(tmp_path, seed, **settings)
        live(engine)
        engine.halves.scheduler.check_integrity()
        engine.halves.worker.check_integrity()
        engine.halves.worker.wait_durable(WAIT_S)
        engine.halves.close()
        assert engine.wrong == []
        assert sorted(engine.pages.free) == list(range(1, POOL))
        assert engine.halves.scheduler.request_count == 0
        seen += engine.seen
    assert wrongly_stored(seen, tmp_path) == []
