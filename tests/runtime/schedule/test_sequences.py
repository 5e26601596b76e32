"""Tests of the sequencer: slots, the backlog, and the ends of sequences, with Triton's texts where it has some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from moonpool.runtime.errors import InvalidRequest, SequenceLost
from moonpool.runtime.model.config.model import SequenceBatching
from moonpool.runtime.schedule.sequences import END, START, Sequencer

if TYPE_CHECKING:
    from collections.abc import Hashable

MS = 1_000_000
IDLE_MS = 1000


@dataclass(eq=False)
class Asked:
    """The part of a request that the sequencer reads."""

    name: str
    correlation_id: int | str = 0
    flags: int = 0
    batch_size: int = 1
    priority: int = 0
    timeout_us: int = 0
    signature: Hashable = "s"

    def identify(self, correlation_id: int | str, flags: int) -> None:
        self.correlation_id, self.flags = correlation_id, flags

    def tell_apart(self, states: Hashable) -> None:
        self.signature = ("s", states)


class Hall:
    """A sequencer with a clock. Requests are written `"1s"`: sequence 1, START."""

    def __init__(self, *instances: str, max_batch_size: int = 4, **batching: Any) -> None:
        batching.setdefault("slots", max_batch_size)
        config = SequenceBatching(max_idle_us=IDLE_MS * 1000, **batching)
        self.sequencer: Sequencer[Asked, str] = Sequencer(config, max_batch_size, "M")
        self.now_ns = 0
        self.asked: dict[str, Asked] = {}
        self.failed: dict[str, str] = {}
        self.wake_at_ms: float | None = None
        for instance in instances or ("A",):
            self.sequencer.join(instance, 0)

    def add(self, *names: str, signature: str = "s") -> None:
        for name in names:
            number = name.rstrip("abcse")
            flags = START * ("s" in name) | END * ("e" in name)
            correlation_id: int | str = int(number) if number.isdigit() else number
            self.asked[name] = Asked(name, correlation_id, flags, signature=signature)
            self.sequencer.add(self.asked[name], self.now_ns)

    def form(self, *idle: str) -> list[list[str | None]]:
        """Form batches of the named instances, of instance A by default."""
        formation = self.sequencer.form(self.now_ns, idle or ("A",))
        self.failed.update({request.name: str(error) for request, error in formation.failed})
        self.wake_at_ms = None if formation.wake_at_ns is None else formation.wake_at_ns / MS
        return [[each.name if each else None for each in batch] for _, batch in formation.batches]

    def done(self, *names: str) -> None:
        for name in names:
            self.sequencer.done(self.asked[name], self.now_ns)

    def run(self, *idle: str) -> list[list[str | None]]:
        """Form batches and answer them."""
        batches = self.form(*idle)
        self.done(*[name for batch in batches for name in batch if name])
        return batches

    def later(self, ms: float) -> None:
        self.now_ns += int(ms * MS)


def oldest(*instances: str, slots: int = 4, **batching: Any) -> Hall:
    return Hall(*instances, is_direct=False, slots=slots, **batching)


# Flags and ids that a request must have


def test_a_request_without_an_id_is_refused() -> None:
    for nothing in (0, ""):
        with pytest.raises(InvalidRequest) as caught:
            Hall().sequencer.add(Asked("x", nothing, START), 0)
        assert str(caught.value) == (
            "inference request to model 'M' must specify a non-zero or non-empty correlation ID"
        )


@pytest.mark.parametrize("name", ["42", "42e", "abc-"])
def test_the_first_request_of_a_sequence_must_start_it(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Hall().add(name)
    assert str(caught.value) == (
        f"inference request for sequence {name.rstrip('e')} to model 'M' must specify the START flag "
        "on the first request of the sequence"
    )


def test_a_request_has_one_row_which_is_looked_at_first() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Hall().sequencer.add(Asked("x", 0, 0, batch_size=2), 0)
    assert str(caught.value) == (
        "inference request to model 'M' must specify batch-size 1 due to requirements of sequence batcher"
    )


def test_after_its_end_a_sequence_must_start_again() -> None:
    hall = Hall()
    hall.add("1s", "1e")
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        hall.add("1b")
    assert hall.run() == [["1s"]]
    assert hall.run() == [["1e"]]
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        hall.add("1b")


def test_numbers_and_texts_are_different_ids() -> None:
    hall = Hall()
    hall.sequencer.add(Asked("number", 1, START), 0)
    with pytest.raises(InvalidRequest):
        hall.sequencer.add(Asked("text", "1"), 0)


def test_a_start_in_the_middle_is_a_conflict_and_goes_on_in_the_same_slot() -> None:
    hall = Hall()
    assert hall.sequencer.add(Asked("1", 1, START), 0) is False
    assert hall.sequencer.add(Asked("2", 1, START), 0) is True
    assert hall.form() == [["1"]]


# Order, and slots


def test_the_requests_of_a_sequence_go_one_after_the_other() -> None:
    for hall in (Hall(), oldest()):
        hall.add("1s", "1a", "1b", "1e")
        assert hall.form() == [["1s"]]
        assert hall.form() == []
        hall.done("1s")
        assert [hall.run() for _ in range(4)] == [[["1a"]], [["1b"]], [["1e"]], []]


def test_a_slot_is_a_place_in_the_batch_and_empty_ones_before_the_last_are_sent() -> None:
    hall = Hall()
    hall.add("1s", "2s", "3s")
    assert hall.run() == [["1s", "2s", "3s"]]
    hall.add("3a")
    assert hall.run() == [[None, None, "3a"]]
    hall.add("2a", "1a", "2b")
    assert hall.run() == [["1a", "2a"]]
    assert hall.run() == [[None, "2b"]]


def test_a_free_slot_is_taken_lowest_first_and_instances_get_as_many() -> None:
    hall = Hall("A", "B", max_batch_size=2)
    hall.add("1s", "2s", "3s", "4s", "5s")
    assert hall.run("A", "B") == [["1s", "3s"], ["2s", "4s"]]
    hall.add("4e")
    assert hall.run("A", "B") == [[None, "4e"]]
    assert hall.run("A") == []
    assert hall.run("B") == [[None, "5s"]]


@pytest.mark.promise(
    "Sequences",
    "If there are more sequences than slots, the others wait in order until one ends, or was "
    "idle for too long after its last answer.",
)
def test_sequences_over_the_slots_wait_in_order_with_all_their_requests() -> None:
    hall = Hall(max_batch_size=1)
    hall.add("1s", "2s", "3s", "2a", "2e", "1e")
    sent = [hall.run() for _ in range(7)]
    assert sent == [[["1s"]], [["1e"]], [["2s"]], [["2a"]], [["2e"]], [["3s"]], []]


@pytest.mark.promise(
    "Sequences", "Two sequences of the same id never overlap: the second waits until the first has ended."
)
def test_a_sequence_that_starts_again_waits_for_its_end_and_behind_the_backlog() -> None:
    hall = Hall(max_batch_size=1)
    hall.add("1s", "1e")
    hall.asked["again"] = Asked("again", 1, START)
    hall.sequencer.add(hall.asked["again"], 0)
    hall.add("2se")
    sent = [hall.run() for _ in range(5)]
    assert sent == [[["1s"]], [["1e"]], [["2se"]], [["again"]], []]


def test_without_an_instance_sequences_wait_for_one() -> None:
    hall = Hall()
    hall.sequencer.leave("A", 0)
    hall.add("1s", "1a")
    assert hall.form() == []
    hall.sequencer.join("A", 0)
    hall.sequencer.join("A", 0)
    assert [hall.run(), hall.run()] == [[["1s"]], [["1a"]]]


# Batches of the direct strategy


def test_enough_slots_make_a_batch_and_fewer_wait_for_the_delay() -> None:
    hall = Hall(minimum_slot_utilization=0.75, max_queue_delay_us=3000)
    hall.add("1s", "2s")
    assert hall.form() == []
    assert hall.wake_at_ms == 3
    hall.later(1)
    hall.add("3s")
    assert hall.run() == [["1s", "2s", "3s"]]
    hall.add("3a")
    assert hall.form() == []
    assert hall.wake_at_ms == 4
    hall.later(3)
    assert hall.run() == [[None, None, "3a"]]


def test_without_a_utilization_the_delay_is_not_looked_at() -> None:
    hall = Hall(max_queue_delay_us=3000)
    hall.add("1s")
    assert hall.form() == [["1s"]]


def test_requests_of_another_shape_wait_and_the_oldest_goes_first() -> None:
    hall = Hall()
    hall.add("1s", "2s", "3s")
    hall.run()
    hall.add("2a", signature="other")
    hall.later(1)
    hall.add("1a", "3a")
    assert hall.run() == [[None, "2a"]]
    assert hall.run() == [["1a", None, "3a"]]


# Batches of the oldest


@pytest.mark.promise(
    "Sequences",
    "With the oldest strategy, a batch has at most one request of each sequence, and Triton's sizes and delays hold.",
)
def test_the_oldest_requests_make_a_batch_without_empty_places() -> None:
    hall = oldest(slots=3)
    hall.add("1s", "1a", "2s", "3s", "4s", "1b")
    assert hall.form() == [["1s", "2s", "3s"]]
    hall.done("2s")
    hall.done("1s", "3s")
    assert [hall.run(), hall.run()] == [[["1a"]], [["1b"]]]
    hall.add("2e")
    assert [hall.run(), hall.run()] == [[["2e"]], [["4s"]]]


@pytest.mark.promise("Sequences", "With the oldest strategy, a …")
def test_preferred_sizes_are_waited_for() -> None:
    hall = oldest(slots=8, preferred_batch_sizes=(2, 4), max_queue_delay_us=2000)
    hall.add("1s")
    assert hall.form() == []
    assert hall.wake_at_ms == 2
    hall.add("2s")
    assert hall.run() == [["1s", "2s"]]
    hall.add("1a")
    assert hall.form() == []
    hall.later(2)
    assert hall.run() == [["1a"]]


def test_a_model_that_does_not_batch_has_as_many_sequences_as_it_says() -> None:
    hall = oldest(slots=2, max_batch_size=0)
    hall.add("1s", "2s", "3s", "1a")
    assert [hall.run() for _ in range(4)] == [[["1s"]], [["2s"]], [["1a"]], []]


# What ends a sequence


@pytest.mark.promise("Sequences", "If there are more sequences …")
@pytest.mark.parametrize("make", [Hall, oldest])
def test_a_sequence_that_is_idle_for_too_long_gives_its_slot_up(make: Any) -> None:
    hall = make(slots=1)
    hall.add("1s", "2s")
    assert hall.run() == [["1s"]]
    hall.form()
    assert hall.wake_at_ms == IDLE_MS
    hall.later(IDLE_MS - 1)
    hall.add("1a")
    assert hall.form() == [["1a"]]
    hall.later(IDLE_MS * 3)  # a sequence that executes is not idle
    hall.done("1a")
    assert hall.form() == []
    hall.later(IDLE_MS)
    assert hall.form() == [["2s"]]
    with pytest.raises(InvalidRequest, match="sequence 1 to model 'M' must specify the START"):
        hall.add("1b")


def test_nobody_waits_for_idle_sequences_once_no_more_requests_come() -> None:
    hall = Hall(max_batch_size=1)
    hall.add("1s", "2s", "3se")
    assert hall.run() == [["1s"]]
    hall.sequencer.close(hall.now_ns)
    assert [hall.run(), hall.run(), hall.run()] == [[["2s"]], [["3se"]], []]


def test_a_drained_sequencer_is_empty_and_what_executes_is_the_last_of_its_sequence() -> None:
    for hall in (Hall(max_batch_size=2), oldest(slots=2)):
        hall.add("1s", "2s")
        hall.run()
        hall.add("1a", "3s", "2a", "2b")
        assert hall.form() == [["1a", "2a"]]
        assert [request.name for request in hall.sequencer.drain(0)] == ["2b", "3s"]
        assert len(hall.sequencer) == 0
        hall.done("1a", "2a")
        assert hall.form() == []
        assert hall.wake_at_ms is None
        with pytest.raises(InvalidRequest):
            hall.add("1b")
        hall.add("1s")
        assert hall.form() == [["1s"]]


# Requests whose callers left


@pytest.mark.parametrize("make", [Hall, oldest])
def test_a_request_that_leaves_is_as_if_never_sent(make: Any) -> None:
    hall = make(slots=2)
    hall.add("1s")
    hall.run()
    hall.add("1a", "1b")
    assert hall.sequencer.remove(hall.asked["1a"], 0) is True
    assert hall.sequencer.remove(hall.asked["1a"], 0) is False
    assert len(hall.sequencer) == 1
    assert hall.run() == [["1b"]]
    assert hall.sequencer.remove(hall.asked["1b"], 0) is False


@pytest.mark.parametrize("make", [Hall, oldest])
def test_without_its_start_a_sequence_fails(make: Any) -> None:
    hall = make(slots=1)
    hall.add("1s", "1a", "2s", "2a", "2e", "3s")
    hall.sequencer.remove(hall.asked["1s"], 0)
    hall.sequencer.remove(hall.asked["2s"], 0)
    assert hall.run() == [["3s"]]
    assert set(hall.failed) == {"1a", "2a", "2e"}
    assert "must specify the START flag" in hall.failed["2e"]
    assert len(hall.sequencer) == 0


@pytest.mark.parametrize("make", [Hall, oldest])
def test_an_end_that_leaves_ends_the_sequence_all_the_same(make: Any) -> None:
    hall = make(slots=1)
    hall.add("1s", "1e", "2s")
    assert hall.form() == [["1s"]]
    hall.sequencer.remove(hall.asked["1e"], 0)
    hall.done("1s")
    assert hall.form() == [["2s"]]


# Instances that break


@pytest.mark.promise("Sequences", "When an instance dies, its …")
@pytest.mark.parametrize("make", [Hall, oldest])
def test_sequences_of_an_instance_that_broke_are_lost(make: Any) -> None:
    hall = make("A", "B", slots=2)
    hall.add("1s", "2s", "3s")
    hall.run("A", "B")
    hall.add("1a", "1b", "1e", "2a")
    assert hall.form("A") == [["1a"]]
    hall.sequencer.leave("A", 0)
    hall.done("1a")  # the answer comes too late
    assert hall.form("A", "B") == [["2a"]]
    assert set(hall.failed) == {"1b", "1e"}
    assert hall.failed["1b"] == (
        "sequence 1 of model 'M' is lost, as the instance ended that had its state; start it again"
    )
    # The next request of a lost sequence gets the error.
    with pytest.raises(SequenceLost, match="sequence 3 of model 'M' is lost"):
        hall.add("3a")
    hall.add("3s")
    hall.done("2a")
    assert hall.run("B") == [[None, "3s"] if make is Hall else ["3s"]]


def test_a_lost_sequence_is_remembered_as_long_as_an_idle_one() -> None:
    hall = Hall()
    hall.add("1s")
    hall.run()
    hall.sequencer.leave("A", 0)
    hall.later(IDLE_MS)
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        hall.add("1a")


@pytest.mark.promise("Sequences", "When an instance dies, its …")
@pytest.mark.parametrize("make", [Hall, oldest])
def test_sequences_that_had_not_begun_in_a_broken_instance_begin_elsewhere(make: Any) -> None:
    hall = make(slots=2)
    hall.add("1s")
    hall.run()
    hall.add("1a", "2s", "2a", "3s")
    hall.asked["again"] = Asked("again", 1, START)
    assert hall.form() == ([["1a", "2s"]])
    hall.add("1e")
    hall.sequencer.add(hall.asked["again"], 0)
    hall.sequencer.leave("A", 0)
    hall.sequencer.join("B", 0)
    assert hall.run("B") == [["again", "3s"]]
    assert set(hall.failed) == {"1e", "2a"}


# Sequences of one request that is executed many times


@pytest.mark.parametrize("make", [Hall, oldest])
def test_an_iterative_request_is_a_sequence_of_its_own(make: Any) -> None:
    hall = make(slots=2, is_iterative=True)
    requests = [Asked(name, 0) for name in "abc"]
    for request in requests:
        hall.asked[request.name] = request
        hall.sequencer.add(request, 0)
    assert [(each.correlation_id, each.flags) for each in requests] == [(1, START), (2, START), (3, START)]
    assert hall.form() == [["a", "b"]]
    assert hall.sequencer.again(requests[0], 0) is True
    hall.done("b")
    assert requests[0].flags == 0
    # It keeps its slot, and another sequence takes the free one.
    assert sorted(hall.form()[0]) == ["a", "c"]
    hall.done("a", "c")
    assert hall.form() == []
    with pytest.raises(InvalidRequest, match="sequence 1 to model 'M' must specify the START"):
        hall.sequencer.add(Asked("x", 1, 0), 0)


def test_an_iterative_request_may_have_an_id_and_ends_only_when_it_is_answered() -> None:
    hall = Hall(is_iterative=True)
    hall.add("1se")
    hall.form()
    with pytest.raises(InvalidRequest, match="START"):
        hall.add("1a")
    hall.sequencer.again(hall.asked["1se"], 0)
    assert hall.form() == [["1se"]]
    hall.sequencer.add(Asked("free", 0), 0)
    assert hall.form("B") == []
    hall.done("1se")
    assert hall.form() == [[None, "free"]]


def test_a_rescheduled_request_can_leave_and_gives_its_slot_up() -> None:
    for hall in (Hall(is_iterative=True, slots=1), oldest(is_iterative=True, slots=1)):
        hall.add("1s", "2s")
        assert hall.form() == [["1s"]]
        hall.sequencer.again(hall.asked["1s"], 0)
        assert hall.sequencer.remove(hall.asked["1s"], 0) is True
        assert hall.form() == [["2s"]]


def test_a_rescheduled_request_is_lost_with_its_instance() -> None:
    hall = Hall(is_iterative=True)
    hall.add("1s", "2s")
    assert hall.form() == [["1s", "2s"]]
    hall.sequencer.again(hall.asked["1s"], 0)
    hall.sequencer.leave("A", 0)
    assert hall.sequencer.again(hall.asked["2s"], 0) is False
    assert hall.form() == []
    assert set(hall.failed) == {"1s"}


def test_as_many_slots_as_a_configuration_can_ask_for_cost_nothing() -> None:
    for make in (Hall, oldest):
        hall = make(slots=2**31 - 1)
        hall.add("1s", "2s")
        assert hall.run() == [["1s", "2s"]]


def test_everybody_who_is_told_of_a_loss_gets_an_error_of_their_own() -> None:
    hall = Hall()
    hall.add("1s")
    hall.run()
    hall.sequencer.leave("A", 0)
    errors = []
    for _ in range(2):
        with pytest.raises(SequenceLost) as caught:
            hall.add("1a")
        errors.append(caught.value)
    assert errors[0] is not errors[1]


class Interrupted(BaseException):
    """The exception that a signal handler raises."""


@pytest.mark.parametrize("name", ["_begin", "_ready"])
def test_a_request_that_was_added_half_leaves_no_slot_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    hall = oldest(slots=1)
    whole = getattr(hall.sequencer, name)

    def interrupted(*arguments: object) -> None:
        whole(*arguments)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(hall.sequencer, name, interrupted)
        with pytest.raises(Interrupted):
            hall.add("1s")
    hall.sequencer.remove(hall.asked["1s"], 0)
    assert len(hall.sequencer) == 0
    hall.add("2s")
    assert hall.form() == [["2s"]]


# The number on which advice is based


@pytest.mark.promise("The overview", "A model for which requests wait …")
def test_sequences_that_wait_for_a_slot_are_counted_and_not_their_requests() -> None:
    hall = Hall(max_batch_size=1)
    hall.add("1s", "1", "1a")
    hall.form()

    # One sequence has a slot. Its requests would wait for one another with any number of instances.
    assert len(hall.sequencer) == 2
    assert hall.sequencer.backlog == 0

    hall.add("2s", "2", "3s")
    hall.form()
    assert hall.sequencer.backlog == 2
