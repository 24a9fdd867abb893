"""Doubles of slow stores: real handles whose work waits until the test lets it go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ucm_core.flow.handles import ComputeEvent, UnitSave
from ucm_core.flow.ticket import Ticket
from ucm_core.store.block import BlockStore


class SlowSave:
    """A double of a `UnitSave`: nothing of the real one is read or published before `let_go`."""

    def __init__(self, real: UnitSave) -> None:
        self._real = real
        self._waiting: list[Callable[[], Any]] = []
        self._slow = True

    @property
    def ticket(self) -> Ticket:
        return self._real.ticket

    def submit(self, shards: slice, *, ready: ComputeEvent | None = None) -> None:
        self._do(partial(self._real.submit, shards, ready=ready))

    def seal(self) -> None:
        self._do(self._real.seal)

    def abandon(self) -> None:
        self._waiting.clear()
        self._real.abandon()

    def let_go(self) -> None:
        """Do what was asked so far, and everything at once from now on."""
        self._slow = False
        for call in self._waiting:
            call()
        self._waiting.clear()

    def _do(self, call: Callable[[], Any]) -> None:
        if self._slow:
            self._waiting.append(call)
        else:
            call()


class SlowStore:
    """Makes every save of blocks slow while ``slow`` is true."""

    def __init__(self, monkeypatch: Any) -> None:
        self.slow = True
        self.saves: list[SlowSave] = []
        real = BlockStore.begin_save

        def begin_save(store: BlockStore, *arguments: Any, **more: Any) -> UnitSave:
            save = real(store, *arguments, **more)
            if not self.slow:
                return save
            self.saves.append(SlowSave(save))
            return self.saves[-1]

        monkeypatch.setattr(BlockStore, "begin_save", begin_save)

    def let_go(self) -> None:
        """Let all saves go on."""
        for save in self.saves:
            save.let_go()
