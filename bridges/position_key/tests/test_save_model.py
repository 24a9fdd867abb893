"""Random orders of what can happen to saves against the definition, read from a log of all of it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ucm_position_key import ObjectKey, SaveLedger, UnitKey

KEYS = [ObjectKey("full", bytes([n]) * 32) for n in range(3)]
UNITS = [UnitKey(key, "s", shard) for key in KEYS for shard in range(2)]


class Saves(RuleBasedStateMachine):
    """The log: (what, job number or None, units or keys), oldest first."""

    @initialize()
    def open(self):
        self.ledger, self.log, self.jobs = SaveLedger(), [], []

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def begin(self, keys):
        job = self.ledger.begin([unit for unit in UNITS if unit.object in keys])
        self.log.append(("begin", job.number, keys))
        self.jobs.append(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), unit=st.sampled_from(UNITS))
    def acknowledge(self, data, unit):
        job = data.draw(st.sampled_from(self.jobs))
        self.ledger.acknowledge(job, unit)
        self.log.append(("acknowledge", job.number, [unit]))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), unit=st.sampled_from(UNITS))
    def fail(self, data, unit):
        job = data.draw(st.sampled_from(self.jobs))
        self.ledger.fail(job, unit)
        self.log.append(("end", job.number, [unit.object]))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def abort(self, data):
        job = data.draw(st.sampled_from(self.jobs))
        self.ledger.abort(job)
        self.log.append(("end", job.number, KEYS))

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def forget(self, keys):
        self.ledger.forget(keys)
        self.log.append(("forget", None, keys))

    def due(self, key, number):
        """What a job was to write of a key."""
        (job,) = (job for job in self.jobs if job.number == number)
        return {unit for unit in job.units if unit.object == key}

    def ended(self, key, number):
        """When a job was through with a key, and whether it had written all of it by then."""
        events = [(time, what, about) for time, (what, job, about) in enumerate(self.log) if job == number]
        due = self.due(key, number)
        if not due:
            return -1, False
        for time, what, about in events:
            due -= {*about} if what == "acknowledge" else set()
            if not due or (what == "end" and key in about):
                return time, not due
        return None, False

    def is_saved(self, key):
        for job in self.jobs:
            time, complete = self.ended(key, job.number)
            if complete:
                asked = [
                    what for what, _, about in self.log[:time] if what in {"begin", "forget"} and key in about
                ]
                later = [what for what, _, about in self.log[time:] if what == "forget" and key in about]
                if asked[-1] == "begin" and not later:
                    return True
        return False

    @invariant()
    def the_ledger_says_what_the_log_says(self):
        if not hasattr(self, "log"):
            return
        self.ledger.check_integrity()
        assert self.ledger.saved(KEYS) == tuple(map(self.is_saved, KEYS))
        open_jobs = [
            {job.number for job in self.jobs if self.ended(key, job.number)[0] is None} for key in KEYS
        ]
        assert self.ledger.under_way(KEYS) == tuple(map(bool, open_jobs))
        assert all(len(jobs) <= 1 for jobs in open_jobs)
        statistics = self.ledger.statistics()
        assert statistics.jobs == len(set().union(*open_jobs))
        assert statistics.objects_under_way == sum(map(len, open_jobs))


TestSaves = Saves.TestCase
TestSaves.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
