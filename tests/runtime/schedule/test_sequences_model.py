"""Checks that the sequencer keeps its promises to models under random operations."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.runtime.schedule.test_sequences import Asked

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.model.config.model import SequenceBatching
from moonpool.runtime.schedule.sequences import START, Sequencer

pytestmark = pytest.mark.promise(
    "Sequences",
    "The requests of a sequence go to one instance, in the order of arrival, one at a time; no "
    "request is lost, whatever happens in between.",
)

US = 1000
INSTANCES = ("A", "B")

CONFIGS = st.builds(
    SequenceBatching,
    is_direct=st.booleans(),
    slots=st.integers(1, 3),
    max_idle_us=st.sampled_from([20, 1_000_000]),
    max_queue_delay_us=st.sampled_from([0, 15]),
    minimum_slot_utilization=st.sampled_from([0.0, 0.6, 1.0]),
    preferred_batch_sizes=st.sampled_from([(), (2,), (3,)]),
    is_iterative=st.booleans(),
)


class Promises(RuleBasedStateMachine):
    @initialize(config=CONFIGS)
    def start(self, config: SequenceBatching) -> None:
        self.config = config
        self.sequencer: Sequencer[Asked, str] = Sequencer(config, 3, "M")
        self.now_ns = 0
        self.arrived = 0
        self.is_closed = False
        self.joined: set[str] = set()
        # The number of requests that had arrived when an instance was told to end.
        self.retiring: dict[str, int] = {}
        # Every request is in exactly one of these: waiting, executing, over.
        self.waiting: dict[str, Asked] = {}
        self.executing: dict[str, list[Asked]] = {}
        self.over: set[str] = set()
        # For each sequence that has begun: its instance, and the number of its last request.
        self.place: dict[int | str, tuple[str, int]] = {}
        self.last: dict[int | str, int] = defaultdict(int)
        self.join("A")

    # Operations

    @precondition(lambda self: not self.is_closed)
    @rule(correlation_id=st.integers(0, 5), flags=st.integers(0, 3), shape=st.sampled_from("st"))
    def add(self, correlation_id: int, flags: int, shape: str) -> None:
        request = Asked(str(self.arrived), correlation_id, flags, signature=shape)
        self.arrived += 1
        try:
            self.sequencer.add(request, self.now_ns)
        except MoonpoolError:
            return
        assert request.correlation_id
        self.waiting[request.name] = request

    @rule(instance=st.sampled_from(INSTANCES))
    def join(self, instance: str) -> None:
        self.sequencer.join(instance, self.now_ns)
        self.joined.add(instance)

    @rule(instance=st.sampled_from(INSTANCES))
    def leave(self, instance: str) -> None:
        self.sequencer.leave(instance, self.now_ns)
        self.joined.discard(instance)
        self.retiring.pop(instance, None)
        for request in self.executing.pop(instance, []):
            self.over.add(request.name)
            self.sequencer.done(request, self.now_ns)  # its answer comes too late
        self.place = {i: where for i, where in self.place.items() if where[0] != instance}

    @rule(instance=st.sampled_from(INSTANCES))
    def retire(self, instance: str) -> None:
        if self.sequencer.retire(instance):
            assert instance not in self.executing
            self.joined.discard(instance)
            self.retiring.pop(instance, None)
        else:
            assert instance in self.joined
            assert self.sequencer.has_sequences
            self.retiring.setdefault(instance, self.arrived)

    @rule(pick=st.integers(0, 20))
    def remove(self, pick: int) -> None:
        names = sorted(self.waiting)
        if names:
            request = self.waiting.pop(names[pick % len(names)])
            self.over.add(request.name)
            assert self.sequencer.remove(request, self.now_ns)
            assert not self.sequencer.remove(request, self.now_ns)

    @rule(microseconds=st.sampled_from([1, 7, 15, 20]))
    def wait(self, microseconds: int) -> None:
        self.now_ns += microseconds * US

    @rule(idle=st.permutations(INSTANCES), count=st.integers(0, 2))
    def form(self, idle: list[str], count: int) -> None:
        free = [each for each in idle[:count] if each not in self.executing]
        formation = self.sequencer.form(self.now_ns, free)
        for request, _ in formation.failed:
            self.waiting.pop(request.name)
            self.over.add(request.name)
        assert formation.wake_at_ns is None or formation.wake_at_ns > self.now_ns
        for instance, batch in formation.batches:
            assert instance in free
            free.remove(instance)
            self.check_batch(instance, batch)
        assert len(self.sequencer) == len(self.waiting)
        self.check_nobody_waits_in_vain(self.joined.intersection(free))

    def check_batch(self, instance: str, batch: list[Asked | None]) -> None:
        requests = [request for request in batch if request is not None]
        assert batch
        assert batch[-1] is not None
        assert len(batch) <= 3
        assert self.config.is_direct or len(requests) == len(batch)
        assert len({request.signature for request in requests}) == 1
        assert len({request.correlation_id for request in requests}) == len(requests)
        assert instance in self.joined
        self.executing[instance] = requests
        for place, request in enumerate(batch):
            if request is None:
                continue
            del self.waiting[request.name]
            which = request.correlation_id
            assert int(request.name) >= self.last[which], "in the order of arrival"
            self.last[which] = int(request.name)
            where = (instance, place if self.config.is_direct else 0)
            if request.flags & START:
                assert int(request.name) < self.retiring.get(instance, self.arrived), "none begins where it should end"
                self.place[which] = where
            assert self.place[which] == where, "a sequence stays where it began"

    def check_nobody_waits_in_vain(self, free: set[str]) -> None:
        """Check that an instance without a batch has no request to execute, except one that waits for a delay."""
        if self.config.max_queue_delay_us == 0:
            first = {request.correlation_id: request for request in reversed(self.waiting.values())}
            going_on = (self.place[which] for which, each in first.items() if not each.flags & START)
            assert free.isdisjoint(instance for instance, _ in going_on)
            assert self.sequencer.backlog or free != self.joined or not self.waiting

    @rule(pick=st.integers(0, 20), is_done=st.booleans())
    def answer(self, pick: int, is_done: bool) -> None:
        busy = sorted(self.executing)
        if not busy:
            return
        for request in self.executing.pop(busy[pick % len(busy)]):
            if self.config.is_iterative and not is_done:
                assert self.sequencer.again(request, self.now_ns)
                assert request.flags == 0
                self.waiting[request.name] = request
                continue
            self.over.add(request.name)
            self.sequencer.done(request, self.now_ns)

    @rule(is_done=st.booleans())
    def serve(self, is_done: bool) -> None:
        """Execute and answer what waits."""
        self.form([*INSTANCES], 2)
        self.answer(0, is_done)

    @precondition(lambda self: self.arrived > 10)
    @rule()
    def close(self) -> None:
        self.sequencer.close(self.now_ns)
        self.is_closed = True

    @precondition(lambda self: self.arrived > 10)
    @rule()
    def drain(self) -> None:
        drained = {request.name for request in self.sequencer.drain(self.now_ns)}
        failed = {request.name for request, _ in self.sequencer.form(self.now_ns, ()).failed}
        assert drained | failed == set(self.waiting)
        self.over |= set(self.waiting)
        self.waiting.clear()

    @invariant()
    def all_are_somewhere(self) -> None:
        if hasattr(self, "sequencer"):
            self.form([], 0)

    def teardown(self) -> None:
        """Check that everything ends without further operations."""
        if not hasattr(self, "sequencer"):
            return
        self.sequencer.close(self.now_ns)
        self.join("A")
        for _ in range(2 * self.arrived + 2):
            for _ in range(len(self.executing)):
                self.answer(0, is_done=True)
            self.now_ns += 100 * US
            self.form(["A", "B"], 2)
            for instance in list(self.retiring):
                self.retire(instance)
                self.join(instance)
        assert not self.waiting
        assert repr(self.sequencer) == "<Sequencer: 0 requests wait, 0 sequences>"
        assert self.sequencer.form(self.now_ns, ()).wake_at_ns is None


TestPromises = pytest.mark.slow(Promises.TestCase)
TestPromises.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
