"""C-48: number and order of joint calls follow from shared facts only, and a mismatch ends with a name."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from rank_engine import RankEngine

from ucm_core.coordinator.coordinator import Verdict
from ucm_core.errors import StoreError
from ucm_core.flow.copy import BufferBlocks
from ucm_core.spec.keys import PrefixChain
from ucm_core.spec.segments import Parallelism, Rank
from ucm_core.testing.joint_calls import JointCalls

STEPS = 12
TWO_STAGES = Parallelism(2, (3, 2))


@dataclass(frozen=True)
class Plan:
    """One step, as all ranks are handed it: what to load of one chain, how far to save another."""

    load: tuple[PrefixChain, Verdict] | None
    save: tuple[PrefixChain, int] | None


@dataclass
class Worker:
    """A double of one rank of an engine: it computes nothing, and joins the others twice a step."""

    engine: RankEngine
    rank: Rank
    number: int
    joint: JointCalls
    failed: list[int] = field(default_factory=list)
    error: StoreError | None = None
    loses: bool = False
    """Half of what was promised is gone when it loads, of its own segments only."""

    def step(self, number: int, plan: Plan) -> None:
        if plan.load is not None:
            self.failed.append(self.load(plan.load[1]))
        self.joint.call(self.number, f"step {number}: loaded")
        if plan.save is not None:
            chain, blocks = plan.save
            for row in self.engine.ranks[self.rank].stores:
                self.engine.save(self.rank, row, chain, np.ones(blocks, dtype=np.bool_))
        self.joint.call(self.number, f"step {number}: saved")

    def load(self, verdict: Verdict) -> int:
        """Objects that did not come: results differ by rank, the joint calls after them must not."""
        cache = self.engine.ranks[self.rank]
        if self.loses:
            for row, store in cache.stores.items():
                store.drop(verdict.keys[row][::2])
        blank = {row: self.engine.payload(self.rank, row, len(verdict.keys[row])) for row in cache.stores}
        tickets = cache.load_into(verdict, {row: BufferBlocks(part) for row, part in blank.items()})
        assert tickets.wait(60)
        return sum(int(ticket.object_results.astype(bool).sum()) for ticket in tickets.rows.values())


def together(workers: Sequence[Worker], act: Callable[[Worker], None]) -> None:
    """Run ``act`` on every worker in a thread of its own; keeps what each of them raised."""

    def run(worker: Worker) -> None:
        try:
            act(worker)
        except StoreError as error:
            worker.error = error

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def workers_of(engine: RankEngine, *, wait_s: float = 60.0) -> list[Worker]:
    joint = JointCalls(len(engine.ranks), wait_s=wait_s)
    return [Worker(engine, rank, number, joint) for number, rank in enumerate(engine.ranks)]


def draw(engine: RankEngine, dice: random.Random) -> Plan:
    """A step: chains come back, grow, or are new; one with nothing to do is possible."""
    chain = engine.chain(dice.randrange(3))
    load = (chain, engine.scheduler.resolve(chain)) if dice.random() < 0.7 else None
    save = (engine.chain(dice.randrange(3)), dice.randint(3, 6)) if dice.random() < 0.7 else None
    return Plan(load, save)


@pytest.mark.parametrize("cut", [Parallelism(2), TWO_STAGES], ids=["2 ranks", "4 ranks"])
@pytest.mark.parametrize("seed", range(2))
def test_all_ranks_make_the_same_joint_calls_whatever_becomes_of_their_loads(
    tmp_path: Path, cut: Parallelism, seed: int
) -> None:
    engine, dice = RankEngine(tmp_path, cut=cut, ring_bytes=0), random.Random(seed)
    workers = workers_of(engine)
    for number in range(STEPS):
        plan = draw(engine, dice)
        workers[-1].loses = dice.random() < 0.5
        together(workers, lambda worker, number=number, plan=plan: worker.step(number, plan))  # type: ignore[misc]
    calls = {worker.joint.calls(worker.number) for worker in workers}
    assert [worker.error for worker in workers] == [None] * len(workers)
    assert calls == {tuple(f"step {n}: {what}" for n in range(STEPS) for what in ("loaded", "saved"))}
    assert sum(workers[-1].failed) > sum(workers[0].failed), "one rank has less than the others"
    engine.close()


def test_a_rank_that_has_nothing_pending_and_leaves_a_call_out_is_named(tmp_path: Path) -> None:
    """The defect of the public case: a rank-local early return before a joint step."""
    joint = JointCalls(3, wait_s=0.2)
    workers = [Worker(None, Rank(number), number, joint) for number in range(3)]  # type: ignore[arg-type]

    def act(worker: Worker) -> None:
        for step in range(4):
            if worker.number == 1 and step == 2:
                return
            joint.call(worker.number, f"step {step}")

    together(workers, act)
    assert workers[1].error is None
    for worker in (workers[0], workers[2]):
        assert str(worker.error) == "rank 1 did not make call 2 ('step 2') within 0.2 s"


def test_ranks_that_drift_apart_are_named_with_the_step_at_once() -> None:
    joint = JointCalls(2, wait_s=60.0)
    workers = [Worker(None, Rank(number), number, joint) for number in range(2)]  # type: ignore[arg-type]
    names = (["load", "save", "load"], ["load", "load", "save"])

    def act(worker: Worker) -> None:
        for name in names[worker.number]:
            joint.call(worker.number, name)

    together(workers, act)
    assert {str(worker.error) for worker in workers} == {"call 1 of rank 1 is 'load', that of rank 0 'save'"}


def test_after_a_mismatch_nobody_waits_any_more() -> None:
    joint = JointCalls(2, wait_s=0.05)
    for _ in range(2):
        with pytest.raises(StoreError, match="rank 1 did not make call 0"):
            joint.call(0, "load")


@pytest.mark.parametrize("seed", range(5))
def test_many_ranks_pass_many_calls(seed: int) -> None:
    joint, dice = JointCalls(4), random.Random(seed)
    names = tuple(dice.choice("abc") for _ in range(50))
    workers = [Worker(None, Rank(number), number, joint) for number in range(4)]  # type: ignore[arg-type]

    def act(worker: Worker) -> None:
        for name in names:
            joint.call(worker.number, name)

    together(workers, act)
    assert {worker.error for worker in workers} == {None}
    assert [joint.calls(number) for number in range(4)] == [names] * 4
