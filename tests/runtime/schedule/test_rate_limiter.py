"""Tests of the rate limiter: who may have resources, in which order, and that all of them come back."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.inside import hosted_in, registry_of
from tests.runtime.held_batches import HoldingBackend, queued
from tests.runtime.recorder import PATIENCE_S, Planned, config, row, x
from tests.waiting import wait_until

from moonpool import ConfigError, LoadFailed, QueueTimeout, Runtime
from moonpool.ipc.errors import PeerGone
from moonpool.runtime.model.config.model import RateLimitResource, RateLimits
from moonpool.runtime.schedule.rate_limiter import Resource, ResourcePool, read_resources

pytestmark = pytest.mark.promise(
    "Batching",
    "With a rate limiter, an instance executes only while the resources that its configuration names are free, and all "
    "of them come back: with the answer, the loss or the end of the instance. Of those that wait, the one goes first "
    "that has executed least.",
)
START, END = 1, 2


# The pool, alone.


def limits(priority: int = 0, **counts: int) -> RateLimits:
    """Make the needs of a member; a resource whose name is in upper case is one of all devices."""
    resources = tuple(RateLimitResource(name, name.isupper(), count) for name, count in counts.items())
    return RateLimits(resources, priority)


NEEDS = st.builds(limits, st.integers(0, 3), A=st.integers(0, 4), B=st.integers(0, 2), c=st.integers(0, 3))
GIVEN = {("A", None): 5, ("B", 1): 3, ("c", None): 3, ("c", 0): 4}


class PoolMachine(RuleBasedStateMachine):
    """Members come, ask, execute and go at random. The pool keeps its promises after each step."""

    members = Bundle("members")
    given: dict[Resource, int] = {}  # noqa: RUF012 - never changed

    def __init__(self) -> None:
        super().__init__()
        self.pool: ResourcePool[int] = ResourcePool(self.given)
        self.needs: dict[int, dict[Resource, int]] = {}
        self.weights: dict[int, int] = {}
        self.executed: Counter[int] = Counter()
        self.asked: list[int] = []
        self.before: Counter[Resource] = Counter()
        self.number = 0

    @rule(target=members, needs=NEEDS, device=st.integers(0, 1))
    def join(self, needs: RateLimits, device: int) -> int:
        self.number += 1
        self.needs[self.number] = {
            (each.name, None if each.is_global else device): each.count for each in needs.resources
        }
        self.note(self.pool.join({self.number: (needs, device)}))
        return self.number

    @rule(member=members)
    def ask(self, member: int) -> None:
        if member not in self.asked and not self.pool.holds(member):
            self.asked.append(member)
        if self.pool.acquire(member):
            self.note([member])

    @rule(member=members, has_executed=st.booleans(), asks_again=st.booleans())
    def release(self, member: int, *, has_executed: bool, asks_again: bool) -> None:
        before = self.pool.rank(member)
        self.asked = [each for each in self.asked if each != member] + [member] * asks_again
        self.note(self.pool.release(member, has_executed=has_executed, asks_again=asks_again))
        assert (self.pool.rank(member) > before) == has_executed

    @rule(member=consumes(members))
    def leave(self, member: int) -> None:
        self.asked = [each for each in self.asked if each != member]
        del self.needs[member]
        self.note(self.pool.leave([member]))
        assert not self.pool.acquire(member)

    def note(self, granted: list[int]) -> None:
        """Take those that hold their resources now from those that wait. They are told of once, and nobody else is."""
        for member in granted:
            if member in self.asked:
                self.asked.remove(member)

    @invariant()
    def nothing_is_lost_or_taken_twice(self) -> None:
        held: Counter[Resource] = Counter()
        for member, needs in self.needs.items():
            if self.pool.holds(member):
                held.update(needs)
        assert {k: v for k, v in self.pool.in_use.items() if v} == {k: v for k, v in held.items() if v}

    @invariant()
    def never_more_than_the_count(self) -> None:
        for resource, count in self.pool.in_use.items():
            # Less may be there than is in use once a member that needs much has left. Then nothing is taken.
            assert count <= max(self.pool.limits.get(resource, 0), self.before[resource])
        self.before = Counter(self.pool.in_use)

    @invariant()
    def who_waits_could_not_run(self) -> None:
        waiting = [each for each in self.asked if not self.pool.holds(each)]
        assert waiting == self.asked
        for member in waiting:
            needs = self.needs[member]
            lacks = any(self.pool.in_use[each] + count > self.pool.limits[each] for each, count in needs.items())
            behind = any(
                self.needs[other].keys() & needs.keys() and self.pool.rank(other) <= self.pool.rank(member)
                for other in waiting
                if other != member
            )
            assert lacks or behind

    def teardown(self) -> None:
        # Whoever holds something executes and returns it: all those that wait have their turn, each once.
        waiting = list(self.asked)
        for _ in range(len(waiting) + 1):
            for member in [each for each in self.needs if self.pool.holds(each)]:
                self.note(self.pool.release(member, has_executed=True))
        assert not self.asked
        for member in list(self.needs):
            self.pool.leave([member])
        assert not any(self.pool.in_use.values())


class GivenPoolMachine(PoolMachine):
    given = GIVEN


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, deadline=None)
TestGivenPool = GivenPoolMachine.TestCase
TestGivenPool.settings = settings(max_examples=60, deadline=None)


def test_one_that_needs_much_is_not_starved_by_those_that_need_little() -> None:
    pool: ResourcePool[str] = ResourcePool({("R", None): 2})
    pool.join({"a": (limits(R=1), 0), "b": (limits(R=1), 0), "big": (limits(R=2), 0), "s": (limits(), 0)})
    assert pool.acquire("a")
    assert pool.acquire("b")
    assert not pool.acquire("big")
    assert pool.release("a", has_executed=True) == []
    assert not pool.acquire("a")
    assert pool.acquire("s")
    assert pool.release("b", has_executed=True) == ["big"]
    assert pool.release("big", has_executed=True) == ["a"]


def test_priorities_share_executions_as_their_inverses() -> None:
    pool: ResourcePool[str] = ResourcePool({})
    pool.join({"one": (limits(R=1), 0), "two": (limits(2, R=1), 0), "four": (limits(4, R=1), 0)})
    for name in ("one", "two", "four"):
        pool.acquire(name)
    counts: Counter[str] = Counter()
    holding = "one"
    for _ in range(700):
        counts[holding] += 1
        (holding,) = pool.release(holding, has_executed=True, asks_again=True)
    assert all(abs(counts[name] - share) <= 1 for name, share in (("one", 400), ("two", 200), ("four", 100)))


def test_one_that_comes_late_does_not_go_first_until_it_has_caught_up() -> None:
    pool: ResourcePool[str] = ResourcePool({})
    pool.join({"old": (limits(R=1), 0)})
    for _ in range(50):
        assert pool.acquire("old")
        pool.release("old", has_executed=True)
    pool.join({"new": (limits(R=1), 0), "apart": (limits(S=1), 0)})
    assert (pool.rank("new"), pool.rank("apart")) == (50, 0)


@pytest.mark.parametrize(
    ("given", "needs", "text"),
    [
        (["R:3"], [(limits(R=4), 0)], 'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, the minimum required count is 4'),
        (["S:9"], [(limits(R=1), 0)], 'Resource count for "R" is limited to 0 which'),
        (["r:9:1"], [(limits(r=1), 0)], 'Resource count for "r" is limited to 0 which'),
        (["r:9", "r:1"], [(limits(r=2), 0)], 'Resource count for "r" is limited to 1 which'),
        ([], [(limits(R=1), 0), (RateLimits((RateLimitResource("R", False, 1),)), 0)],
         'Resource "R" is present as both global and device-specific resource in the model configuration.'),
    ],
)  # fmt: skip
def test_what_could_never_run_does_not_join(given: list[str], needs: list[Any], text: str) -> None:
    pool: ResourcePool[int] = ResourcePool(read_resources(given))
    with pytest.raises(ValueError, match="Resource") as raised:
        pool.join(dict(enumerate(needs)))
    assert text in str(raised.value)
    assert not pool.acquire(0)
    assert pool.limits == {}


def test_counts_hold_for_a_device_for_each_or_for_all() -> None:
    pool: ResourcePool[int] = ResourcePool(read_resources(["r:2", "r:5:1", "R:1:7", "R:3:0"]))
    pool.join({0: (limits(r=1), 0), 1: (limits(r=1), 1), 2: (limits(R=1), 0)})
    assert pool.limits == {("r", 0): 2, ("r", 1): 5, ("R", None): 3}


@pytest.mark.parametrize("text", ["R", "R:", "R:x", "R:1:2:3", ":1", "R:-1", "R:1:", "R:1:-1", ""])
def test_a_count_that_cannot_be_read_is_refused(text: str) -> None:
    what = "option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got "
    with pytest.raises(ValueError, match="rate-limit-resource") as raised:
        read_resources([text])
    assert str(raised.value).endswith(what + text)
    with pytest.raises(ValueError, match="rate_limit: must be texts such as NAME:COUNT"):
        Runtime(rate_limit=[text])


def test_counts_are_a_list() -> None:
    with pytest.raises(ValueError, match="must be a list of texts, not 'R:1'"):
        Runtime(rate_limit="R:1")


# Models of a runtime.


def group(count: int = 1, priority: int = 0, **counts: int) -> dict[str, Any]:
    resources = [{"name": name, "global": name.isupper(), "count": each} for name, each in counts.items()]
    limiter = {"resources": resources, "priority": priority}
    return {"instance_group": [{"kind": "KIND_CPU", "count": count, "rate_limiter": limiter}]}


@contextmanager
def limited(
    folder: Path, given: list[str] | None, /, **models: dict[str, Any]
) -> Iterator[tuple[HoldingBackend, Runtime]]:
    """Make a runtime with these models, each by the changes of its configuration."""
    backend = HoldingBackend()
    with Runtime(backends=[backend], rate_limit=given, drain_timeout_s=30.0) as runtime:
        try:
            for name, changes in models.items():
                runtime.load(name, folder, config=config(backend="holding", **changes))
            yield backend, runtime
        finally:
            backend.is_quick = True
            for held in backend.held_batches.values():
                held.answer()
            if given is not None:
                wait_until(lambda: in_use(runtime) == {}, PATIENCE_S, what="all resources")


def in_use(runtime: Runtime) -> dict[Resource, int]:
    limiter = registry_of(runtime).limiter
    assert limiter is not None
    return limiter.in_use


class Ask(threading.Thread):
    """A thread that sends one request to a model and keeps its outcome."""

    def __init__(self, runtime: Runtime, model: str, inputs: dict[str, Any], **options: Any) -> None:
        super().__init__()
        self._act: Any = partial(runtime.infer, model, inputs, timeout_s=PATIENCE_S, **options)
        self._outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._act()["Y"].flat[0]
        except Exception as error:
            self._outcome = error

    def result(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self._outcome


def test_models_that_share_a_resource_execute_in_turn(folder: Path) -> None:
    with limited(folder, [], a=group(R=1), b=group(R=1), c=group()) as (backend, runtime):
        first = Ask(runtime, "a", x(1))
        held = backend.wait_for(1)
        assert in_use(runtime) == {("R", None): 1}
        second = Ask(runtime, "b", x(2))
        queued(runtime, 1, "b")
        # What needs nothing does not wait.
        third = Ask(runtime, "c", x(3))
        backend.wait_for(2).answer()
        assert third.result() == 3
        assert backend.sent == [[1], [3]]
        held.answer()
        backend.wait_for(3).answer()
        assert (first.result(), second.result()) == (1, 2)


def test_without_a_limiter_they_execute_at_once(folder: Path) -> None:
    with limited(folder, None, a=group(R=1), b=group(R=1)) as (backend, runtime):
        asked = [Ask(runtime, name, x(1)) for name in "ab"]
        for number in (1, 2):
            backend.wait_for(number)
        backend.held_batches["a_0_0"].answer()
        backend.held_batches["b_0_0"].answer()
        assert [each.result() for each in asked] == [1, 1]


def test_counts_that_are_given_let_more_execute(folder: Path) -> None:
    with limited(folder, ["R:2"], m=group(3, R=1)) as (backend, runtime):
        asked = [Ask(runtime, "m", x(1)) for _ in range(3)]
        first, _ = backend.wait_for(1), backend.wait_for(2)
        queued(runtime, 1, "m")
        assert in_use(runtime) == {("R", None): 2}
        assert len(backend.sent) == 2
        first.answer()
        backend.wait_for(3).answer()
        for held in backend.held_batches.values():
            held.answer()
        assert [each.result() for each in asked] == [1] * 3


def test_the_model_that_has_executed_least_goes_first(folder: Path) -> None:
    with limited(folder, [], a=group(R=1), b=group(1, 3, R=1)) as (backend, runtime):
        asked = [Ask(runtime, "a", x(0))]
        backend.wait_for(1)
        for number in range(1, 12):
            name = "ab"[number % 2]
            asked.append(Ask(runtime, name, x(number)))
            queued(runtime, (number + 1) // 2, name)
        for number in range(1, 9):
            backend.wait_for(number).answer()
        backend.wait_for(9)
        order = [batch.instance.model.name for batch, _ in backend.batches]
        # With equal ranks (executions times priority), the one that has waited longer goes.
        assert "".join(order[:8]) == "abaabaaa"
        backend.is_quick = True
        backend.wait_for(9).answer()
        assert sorted(each.result() for each in asked) == list(range(12))


def test_requests_that_wait_for_a_resource_share_a_batch(folder: Path) -> None:
    batched = {"max_batch_size": 8, "dynamic_batching": {}, **group(R=1)}
    with limited(folder, [], a=group(R=1), b=batched) as (backend, runtime):
        asked = [Ask(runtime, "a", x(0))]
        held = backend.wait_for(1)
        for number in range(1, 4):
            asked.append(Ask(runtime, "b", row(number)))
            queued(runtime, number, "b")
        held.answer()
        backend.wait_for(2).answer()
        assert sorted(each.result() for each in asked) == [0, 1, 2, 3]
        assert backend.sent == [[0], [1, 2, 3]]


def test_two_queues_that_keep_requests_back_do_not_wake_each_other(folder: Path) -> None:
    delayed = {"max_batch_size": 2, "dynamic_batching": {"max_queue_delay_microseconds": 30_000_000}, **group(2, R=1)}
    with limited(folder, [], a=delayed, b=delayed) as (backend, runtime):
        asked = [Ask(runtime, name, row(1)) for name in "ab"]
        for name in "ab":
            queued(runtime, 1, name)
        # Neither has resources while it waits for a larger batch, and nobody waits for them.
        wait_until(lambda: in_use(runtime) == {})
        backend.is_quick = True
        asked += [Ask(runtime, name, row(2)) for name in "ab"]
        assert [each.result() for each in asked] == [1, 1, 2, 2]


def test_a_request_times_out_while_its_instance_waits_for_a_resource(folder: Path) -> None:
    policy = {"default_timeout_microseconds": 20_000, "timeout_action": "REJECT"}
    late = {"max_batch_size": 2, "dynamic_batching": {"default_queue_policy": policy}, **group(R=1)}
    with limited(folder, [], a=group(R=1), b=late) as (backend, runtime):
        first = Ask(runtime, "a", x(1))
        held = backend.wait_for(1)
        assert isinstance(Ask(runtime, "b", row(2)).result(), QueueTimeout)
        held.answer()
        assert first.result() == 1
        assert backend.sent == [[1]]


def test_a_caller_that_leaves_takes_nothing(folder: Path) -> None:
    async def leave(runtime: Runtime) -> None:
        task = asyncio.ensure_future(runtime.ainfer("b", x(2)))
        await asyncio.to_thread(queued, runtime, 1, "b")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with limited(folder, [], a=group(R=1), b=group(R=1)) as (backend, runtime):
        first = Ask(runtime, "a", x(1))
        held = backend.wait_for(1)
        asyncio.run(leave(runtime))
        held.answer()
        assert first.result() == 1
        wait_until(lambda: in_use(runtime) == {})
        last = Ask(runtime, "a", x(3))
        backend.wait_for(2).answer()
        assert last.result() == 3
        assert backend.sent == [[1], [3]]


@pytest.mark.parametrize("is_idle", [True, False])
def test_an_instance_that_dies_returns_what_it_has(folder: Path, *, is_idle: bool) -> None:
    with limited(folder, [], a=group(R=1), b=group(R=1)) as (backend, runtime):
        first = Ask(runtime, "a", x(1))
        held = backend.wait_for(1)
        second = Ask(runtime, "b", x(2))
        queued(runtime, 1, "b")
        if is_idle:  # the one that waits
            record = hosted_in(runtime, "b").supervisor.records[0]
            record.instance.report_broken(PeerGone("broken"))
            held.answer()
            assert first.result() == 1
        else:  # the one that executes
            held.break_down(PeerGone("broken"))
            assert isinstance(first.result(), Exception)
        backend.wait_for(2).answer()
        assert second.result() == 2
        # The one that was started again has its turn as before.
        backend.is_quick = True
        assert Ask(runtime, "a", x(3)).result() == 3
        assert Ask(runtime, "b", x(4)).result() == 4


@pytest.mark.parametrize("unloaded", ["a", "b"], ids=["has a resource", "waits for one"])
def test_a_model_is_unloaded_once_it_is_empty_and_returns_what_it_has(folder: Path, unloaded: str) -> None:
    with limited(folder, [], a=group(R=1), b=group(R=1)) as (backend, runtime):
        first = Ask(runtime, "a", x(1))
        held = backend.wait_for(1)
        second = Ask(runtime, "b", x(2))
        queued(runtime, 1, "b")
        unloading = threading.Thread(target=runtime.unload, args=[unloaded])
        unloading.start()
        held.answer()
        backend.wait_for(2).answer()
        unloading.join(PATIENCE_S)
        assert not unloading.is_alive()
        assert (first.result(), second.result()) == (1, 2)


def test_what_needs_too_much_does_not_load(folder: Path) -> None:
    with limited(folder, ["R:2", "d:9"], a=group(R=1)) as (backend, runtime):
        more = config(backend="holding", **group(R=3))
        both = group(R=1)
        both["instance_group"][0]["rate_limiter"]["resources"].append({"name": "R", "global": False, "count": 1})
        for name, given, text in (
            ("b", more, 'Resource count for "R" is limited to 2 which will prevent scheduling'),
            ("b", config(backend="holding", **group(s=1)), 'Resource count for "s" is limited to 0'),
            ("b", config(backend="holding", **both), 'Resource "R" is present as both global'),
            ("a", more, "the minimum required count is 3"),
        ):  # fmt: skip
            with pytest.raises(ConfigError) as raised:
                runtime.load(name, folder, config=given)
            assert text in str(raised.value)
        # The model that serves goes on as it was, and others load.
        backend.is_quick = True
        runtime.load("b", folder, config=config(backend="holding", **group(R=2, d=1)))
        for name in "ab":
            assert Ask(runtime, name, x(1)).result() == 1


def test_a_load_that_fails_leaves_no_limit_behind(folder: Path) -> None:
    with limited(folder, [], a=group(2, R=1)) as (backend, runtime):
        backend.failures["model_instance_initialize", "a:1 a_0_2"] = Planned("no")
        with pytest.raises(LoadFailed, match="no"):
            runtime.scale("a", 3)
        backend.failures["model_instance_initialize", "b:1 b_0_0"] = Planned("no")
        with pytest.raises(LoadFailed, match="no"):
            runtime.load("b", folder, config=config(backend="holding", **group(R=5)))
        asked = [Ask(runtime, "a", x(1)) for _ in range(2)]
        held = backend.wait_for(1)
        queued(runtime, 1, "a")
        backend.is_quick = True
        held.answer()
        assert [each.result() for each in asked] == [1, 1]


def test_instances_come_and_go_with_their_resources(folder: Path) -> None:
    with limited(folder, ["R:2"], m=group(1, R=1)) as (backend, runtime):
        asked = [Ask(runtime, "m", x(1))]
        backend.wait_for(1)
        runtime.scale("m", 3)
        asked += [Ask(runtime, "m", x(1)) for _ in range(2)]
        backend.wait_for(2)
        queued(runtime, 1, "m")
        for held in backend.held_batches.values():
            held.answer()
        backend.wait_for(3)
        backend.is_quick = True
        for held in backend.held_batches.values():
            held.answer()
        assert [each.result() for each in asked] == [1] * 3
        runtime.scale("m", 1)
        # One that needs something else takes the place of one that does not.
        runtime.load("m", folder, config=config(backend="holding", **group(1, R=2)))
        assert [each["name"] for each in runtime.instances("m")] != ["m_0_0"]
        limiter = registry_of(runtime).limiter
        assert limiter is not None
        assert len(limiter._wakes) == 1
        assert Ask(runtime, "m", x(2)).result() == 2


def test_sequences_stay_with_instances_that_wait_for_a_resource(folder: Path) -> None:
    batching = {"max_sequence_idle_microseconds": 3_600_000_000}
    sequences = {"max_batch_size": 1, "sequence_batching": batching, **group(2, R=1)}
    with limited(folder, [], a=group(R=1), m=sequences) as (backend, runtime):
        first = Ask(runtime, "a", x(0))
        held = backend.wait_for(1)
        asked = [Ask(runtime, "m", row(each), correlation_id=each, flags=START) for each in (1, 2)]
        queued(runtime, 2, "m")
        backend.is_quick = True
        held.answer()
        assert [each.result() for each in (first, *asked)] == [0, 1, 2]
        places = {values[-1]: batch.instance.name for batch, values in backend.batches[1:]}
        assert len(set(places.values())) == 2
        for flags in (0, END):
            for each in (1, 2):
                options = {"correlation_id": each, "flags": flags}
                assert Ask(runtime, "m", row(each), **options).result() == each
                assert backend.batches[-1][0].instance.name == places[each]


def test_the_main_thread_and_its_event_loop_are_served_too(folder: Path) -> None:
    async def ask(runtime: Runtime) -> list[float]:
        answers = await asyncio.gather(*(runtime.ainfer("a", x(each)) for each in range(20)))
        return [float(answer["Y"][0]) for answer in answers]

    with limited(folder, [], a=group(2, R=1), b=group(R=1)) as (backend, runtime):
        backend.is_quick = True
        for number in range(20):
            assert runtime.infer("ab"[number % 2], x(number))["Y"][0] == number
        assert asyncio.run(ask(runtime)) == list(range(20))


def test_a_response_from_the_cache_needs_no_resource(folder: Path) -> None:
    backend = HoldingBackend()
    given = {"response_cache": {"enable": True}, **group(R=1)}
    with Runtime(backends=[backend], rate_limit=[], response_cache_bytes=1 << 20) as runtime:
        for name in "ab":
            runtime.load(name, folder, config=config(backend="holding", **given))
        backend.is_quick = True
        assert Ask(runtime, "a", x(1)).result() == 1
        backend.is_quick = False
        other = Ask(runtime, "b", x(2))
        held = backend.wait_for(2)
        assert Ask(runtime, "a", x(1)).result() == 1
        assert in_use(runtime) == {("R", None): 1}
        held.answer()
        assert other.result() == 2


def test_many_requests_of_many_models_all_have_answers(folder: Path) -> None:
    models = {f"m{i}": group(1 + i % 2, i % 3, R=1 + i % 3, S=1) for i in range(5)}
    with limited(folder, ["R:4", "S:2"], **models) as (backend, runtime):
        backend.is_quick = True
        most: list[dict[Resource, int]] = []

        def send(name: str) -> None:
            for number in range(60):
                assert runtime.infer(name, x(number), timeout_s=PATIENCE_S)["Y"][0] == number
                most.append(in_use(runtime))

        threads = [threading.Thread(target=send, args=[name]) for name in models for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(most) == 600
        assert all(each.get(("R", None), 0) <= 4 for each in most)
        assert all(each.get(("S", None), 0) <= 2 for each in most)
        assert len(backend.sent) == 600
