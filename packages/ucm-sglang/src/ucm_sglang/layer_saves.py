"""Saves of a prefill layer by layer: its pages are gathered while later layers still compute.

A linker hears of a node when its batch is over. Two hooks (`ucm_sglang.step_hooks`) stand where it is earlier
known what is there::

    the step begins      tokens and slots of its requests are read, before the forward
    the first layer      what the forward was given agrees with them: the saves begin
    each layer is over   its units of every page are gathered, by other threads
    the step is over     all layers came, the loads of its batch too, and the weights are the same: sealed;
                         anything else: given up

SGLang frees and overwrites slots between steps, so a step ends only when its saves read none any more, in
`STEP_WAIT_S` at most. A save that takes longer (room in the ring, another process that fills the same page)
is given up, and this way rests for `REST_S`. Whatever is not saved here is offered to the linker as ever, and
what is saved here it finds there. Every request of a step that fills whole pages is counted by its `Outcome`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from ucm_core.flow.handles import UnitSave
from ucm_core.flow.layers import LayerShards
from ucm_core.flow.step import RunningSave, StepSave
from ucm_core.flow.ticket import TicketGroup
from ucm_core.ops import border, metrics
from ucm_core.spec.keys import Keys
from ucm_sglang.page_cache import Pages, View
from ucm_sglang.prefills import Prefill, agrees, is_prefill, prefills_of, special, whole_pages

__all__ = ["NOT_BEGUN", "NOT_SAVED", "REST_S", "STEP_WAIT_S", "LayerSaves", "LinkedSave", "Outcome"]

STEP_WAIT_S = 1.0
"""How long a step waits for its saves, all together."""

REST_S = 60.0
"""How long nothing is saved layer by layer after a step that waited in vain."""


class Outcome(Enum):
    """What became of a request of a step."""

    SAVED = "saved"
    """Every process of the machine can read its pages."""
    MODE = "mode"
    """The step computed something else besides prompts, or with a draft model."""
    REQUEST = "request"
    """Its keys and values depend on more than its tokens."""
    TOKENS = "tokens"
    """The forward was given other tokens, positions or slots, or was more than one."""
    LAYERS = "layers"
    """A layer's hook did not come, as in a graph that is replayed."""
    LOAD = "load"
    """A load of the batch failed: what was computed on it is wrong."""
    WEIGHTS = "weights"
    """Nothing is cached now: the weights changed, or the cache is closed."""
    LATE = "late"
    """Not kept in time."""
    RESTING = "resting"
    """A step before was late."""
    FAILED = "failed"
    """Something raised."""


class LinkedSave:
    """What one step saves, of all its requests; for SGLang's scheduler thread."""

    def __init__(
        self,
        view: View | None = None,
        *,
        handles: Mapping[str, UnitSave] | None = None,
        keys: Mapping[str, Keys] | None = None,
    ) -> None:
        """By row the handle, and the keys of its objects; ``view``: whose stores keep them."""
        self.view = view
        self._keys = keys or {}
        self._running = RunningSave(StepSave("step", handles or {}), ())
        self._tickets = TicketGroup({row: handle.ticket for row, handle in self._running.rows.items()})

    def submit(self, layer: LayerShards) -> None:
        """Gather what ``layer`` has written."""
        self._running.submit(layer, None)

    def seal(self, timeout_s: float) -> bool:
        """All layers are over; whether everything was settled within ``timeout_s``."""
        self._running.finish(None)
        return self._tickets.wait(timeout_s)

    def give_up(self) -> None:
        """Keep no more of it; waits for what is being copied, not for a medium."""
        self._running.give_up()
        self._tickets.wait()

    def end(self) -> Outcome:
        """What was kept may be asked for from now on; whether that is all of it."""
        if self.view is not None:
            for row, ticket in self._tickets.rows.items():
                self.view.space.coordinator.saved(row, self._keys[row][ticket.stored])
        return Outcome.SAVED if self._tickets.ok else Outcome.LATE


NOT_SAVED = LinkedSave()
"""One of nothing: nothing is cached now."""
NOT_BEGUN = LinkedSave()
"""One of nothing, because something raised."""
_WITHOUT_SAVE = {NOT_SAVED: Outcome.WEIGHTS, NOT_BEGUN: Outcome.FAILED}


class Keeper(Protocol):
    """Who keeps pages (`ucm_sglang.linked_pages.LinkedPages`)."""

    @property
    def layers(self) -> Mapping[int, LayerShards]:
        """By layer what of the rows is final once it has computed."""

    def begin_save(self, requests: Sequence[Pages]) -> LinkedSave:
        """Begin to keep pages of some requests layer by layer; `NOT_SAVED`, `NOT_BEGUN`: nothing is kept."""

    def is_current(self, view: View | None) -> bool:
        """Whether a view is of the weights that SGLang computes with."""


class _Step:
    """One step: what it computes, and what becomes of it as far as it is known."""

    def __init__(
        self,
        outcome: Outcome = Outcome.MODE,
        *,
        requests: int = 0,
        prefills: Sequence[Prefill] = (),
        pages: Sequence[Pages] = (),
    ) -> None:
        """By default one that nothing is to be saved of."""
        self.outcome, self.requests = outcome, requests
        self.prefills, self.pages = prefills, pages
        self.save = NOT_SAVED
        self.forward: Any = None
        """SGLang's ``ForwardBatch``, once a layer is over."""
        self.seen: set[int] = set()
        """Layers that are over."""

    @property
    def goes_well(self) -> bool:
        """Whether it is to be kept, as far as it is known."""
        return self.outcome is Outcome.SAVED


class LayerSaves:
    """The step that runs, and what is saved of it; for SGLang's scheduler thread."""

    def __init__(
        self,
        keeper: Keeper,
        page_tokens: int,
        *,
        wait_s: float = STEP_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keeper, self._page_tokens = keeper, page_tokens
        self._wait_s, self._clock = wait_s, clock
        self._step = _Step()
        self._rests_until_s = 0.0

    def begin(self, batch: Any) -> None:
        """A step begins that computes ``batch``, SGLang's ``ScheduleBatch``."""
        self._step = _Step()
        if batch.forward_mode.is_extend():
            self._step = self._read(batch)

    def layer_is_over(self, layer: int, forward: Any) -> None:
        """A layer has written its keys and values; ``forward`` is SGLang's ``ForwardBatch``."""
        step, shards = self._step, self._keeper.layers.get(layer)
        if step.goes_well:
            self._compare(step, forward)
        if step.goes_well and shards is not None:
            step.seen.add(layer)
            step.save.submit(shards)
            metrics.UNITS_SAVED.labels(when="layer").inc(len(shards.needs))

    def load_failed(self) -> None:
        """A load of the step's batch failed, so that nobody knows what its layers computed on."""
        self._step.outcome = Outcome.LOAD

    def failed(self) -> None:
        """Something raised in the step."""
        self._step.outcome = Outcome.FAILED

    def end(self) -> None:
        """The step is over; SGLang's memory is not read any more when this returns."""
        step, self._step = self._step, _Step()
        try:
            outcome = self._settle(step)
        except Exception:
            step.save.give_up()
            raise
        if outcome is Outcome.LATE:
            self._rest()
        _count(outcome, step.requests)

    # -- private

    def _read(self, batch: Any) -> _Step:
        if not is_prefill(batch):
            return _Step(Outcome.MODE, requests=len(batch.reqs))
        prefills = prefills_of(batch)
        _count(Outcome.REQUEST, special(prefills, self._page_tokens))
        pages = whole_pages(prefills, self._page_tokens)
        return _Step(self._hope(pages), requests=len(pages), prefills=prefills, pages=pages)

    def _hope(self, pages: Sequence[Pages]) -> Outcome:
        """What becomes of these if nothing goes wrong."""
        if not pages:
            return Outcome.MODE
        return Outcome.SAVED if self._clock() >= self._rests_until_s else Outcome.RESTING

    def _compare(self, step: _Step, forward: Any) -> None:
        """Begin the save at the first layer, if the forward does what was read; one forward is a step."""
        if step.forward is None:
            step.forward, step.outcome = forward, self._begin_save(step, forward)
        elif step.forward is not forward:
            step.outcome = Outcome.TOKENS

    def _begin_save(self, step: _Step, forward: Any) -> Outcome:
        if not agrees(step.prefills, forward):
            return Outcome.TOKENS
        step.save = self._keeper.begin_save(step.pages)
        return _WITHOUT_SAVE.get(step.save, Outcome.SAVED)

    def _settle(self, step: _Step) -> Outcome:
        """Keep all of it or nothing; what became of it."""
        outcome = self._judge(step)
        if outcome is not Outcome.SAVED or not step.save.seal(self._wait_s):
            step.save.give_up()
        return step.save.end() if outcome is Outcome.SAVED else outcome

    def _judge(self, step: _Step) -> Outcome:
        if not step.goes_well:
            return step.outcome
        unseen = len(self._keeper.layers.keys() - step.seen)
        metrics.LAYERS_UNSEEN.inc(unseen)
        if unseen:
            return Outcome.LAYERS
        return Outcome.SAVED if self._keeper.is_current(step.save.view) else Outcome.WEIGHTS

    def _rest(self) -> None:
        self._rests_until_s = self._clock() + REST_S
        border.complaints.say("layer_saves", f"a save layer by layer took too long: none for {REST_S:.0f} s")


def _count(outcome: Outcome, requests: int) -> None:
    metrics.LAYER_SAVES.labels(result=outcome.value).inc(requests)
