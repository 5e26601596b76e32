"""Checks under random operations that each request of a sequence gets the state after the last answer, and no other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.runtime.schedule.test_sequences import Asked

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.model.config.model import SequenceBatching
from moonpool.runtime.schedule.sequences import END, START, Sequencer

pytestmark = pytest.mark.promise("Sequences", "A model gets the states of …")

US = 1000
INSTANCES = ("A", "B")
CONFIGS = st.builds(
    SequenceBatching,
    is_direct=st.booleans(),
    slots=st.integers(1, 3),
    max_idle_us=st.sampled_from([20, 1_000_000]),
    max_queue_delay_us=st.sampled_from([0, 15]),
)


@dataclass(frozen=True)
class Names:
    """The names of the requests that were answered since the start of a sequence, as its state."""

    names: tuple[str, ...] = ()

    @property
    def key(self) -> int:
        return len(self.names) % 2


class StatePromises(RuleBasedStateMachine):
    @initialize(config=CONFIGS, survives=st.booleans())
    def start(self, config: SequenceBatching, survives: bool) -> None:
        self.survives, self.is_patient = survives, config.max_idle_us > 20
        self.sequencer: Sequencer[Asked, str] = Sequencer(config, 3, "M", Names(), survives=survives)
        self.now_ns = 0
        self.arrived = 0
        self.last: dict[int | str, int] = {}
        self.executing: dict[str, list[Asked]] = {}
        # The last instance of each sequence, and if its last request ends it.
        self.place: dict[int | str, str] = {}
        self.is_closed: dict[int | str, bool] = {}
        # The state of each sequence that had an answer.
        self.states: dict[int | str, Names] = {}
        # Requests that were broken off by the end of an instance.
        self.broken_off: list[Asked] = []

    @rule(ids=st.lists(st.integers(1, 3), min_size=1, max_size=4), flags=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def add(self, ids: list[int], flags: int) -> None:
        for correlation_id in ids:
            self.arrived += 1
            try:
                self.sequencer.add(Asked(str(self.arrived), correlation_id, flags), self.now_ns)
            except MoonpoolError:
                assert not self.goes_on(correlation_id), "it goes on where it stood"
                self.sequencer.add(Asked(str(self.arrived), correlation_id, flags | START), self.now_ns)
            self.is_closed[correlation_id] = bool(flags & END)

    def goes_on(self, which: int) -> bool:
        """Return True if a sequence cannot be idle for too long, nor end with its instance, and has not ended."""
        return self.survives and self.is_patient and which in self.states and not self.is_closed[which]

    @rule(instance=st.sampled_from(INSTANCES))
    def join(self, instance: str) -> None:
        self.sequencer.join(instance, self.now_ns)

    @rule(instance=st.sampled_from(INSTANCES))
    def leave(self, instance: str) -> None:
        self.sequencer.leave(instance, self.now_ns)
        self.broken_off += self.executing.pop(instance, [])
        if not self.survives:
            self.states = {which: state for which, state in self.states.items() if self.place[which] != instance}

    @rule(microseconds=st.sampled_from([1, 15, 20]))
    def wait(self, microseconds: int) -> None:
        self.now_ns += microseconds * US

    @rule(idle=st.permutations(INSTANCES))
    def form(self, idle: list[str]) -> None:
        free = [each for each in idle if each not in self.executing]
        for instance, batch in self.sequencer.form(self.now_ns, free).batches:
            requests = [request for request in batch if request is not None]
            self.executing[instance] = requests
            keys = set()
            for request in requests:
                which = request.correlation_id
                self.place[which] = instance
                assert int(request.name) > self.last.get(which, 0), "in the order of arrival"
                if request.flags & START:
                    self.states.pop(which, None)
                state = self.sequencer.state_of(request)
                # A request that goes on with a sequence has the state that the last answer left.
                assert state == self.states.get(which)
                assert state is not None or request.flags & START
                keys.add((state or Names()).key)
            assert len(keys) == 1, "states of one batch have equal shapes"

    @rule()
    def serve(self) -> None:
        """Execute and answer what waits."""
        self.form(["A", "B"])
        self.answer(0)

    @rule(pick=st.integers(0, 3))
    def answer(self, pick: int) -> None:
        busy = sorted(self.executing)
        if not busy:
            return
        for request in self.executing.pop(busy[pick % len(busy)]):
            which = request.correlation_id
            new = Names((*self.states.get(which, Names()).names, request.name))
            self.sequencer.keep(request, new)
            self.states[which] = new
            self.last[which] = int(request.name)
            self.sequencer.done(request, self.now_ns)
            if request.flags & END:
                del self.states[which]

    @rule(pick=st.integers(0, 3))
    def retry(self, pick: int) -> None:
        if self.broken_off:
            request = self.broken_off.pop(pick % len(self.broken_off))
            went_on = self.last.get(request.correlation_id, 0) > int(request.name)
            assert not (self.sequencer.rejoin(request, self.now_ns) and went_on)

    def teardown(self) -> None:
        """Check that no sequence stays, and with it no state."""
        if not hasattr(self, "sequencer"):
            return
        self.join("A")
        self.sequencer.close(self.now_ns)
        for _ in range(2 * self.arrived + 2):
            for _ in range(len(self.executing)):
                self.answer(0)
            self.now_ns += 100 * US
            self.form(["A", "B"])
        assert repr(self.sequencer) == "<Sequencer: 0 requests wait, 0 sequences>"


TestStatePromises = pytest.mark.slow(StatePromises.TestCase)
TestStatePromises.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
