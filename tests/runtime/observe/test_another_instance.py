"""Tests of the advice to have another instance: when it is given, and when it is withdrawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.model.config.model import InstanceGroup
from moonpool.runtime.observe.another_instance import (
    WINDOW_S,
    InstanceLoad,
    LoadSample,
    Reason,
    Watch,
    advice,
    decide,
    largest_batch,
)

pytestmark = pytest.mark.promise(
    "The overview",
    "A model for which requests wait gets the advice to have another instance if its instances keep a "
    "core busy or execute all the time, and cores are free, and only then. The advice has the line to "
    "write and does not come and go.",
)

# One instance keeps its core busy, four requests wait, and the machine has idle cores.
BUSY = InstanceLoad(instances=1, cores=0.98, executing=1.0, waiting=4.0, spare_cores=3.0)
# The model waits for a database.
WAITS = replace(BUSY, cores=0.05)


class TestDecisions:
    @pytest.mark.parametrize(
        ("load", "reason"),
        [
            (BUSY, Reason.PROCESSOR),
            (WAITS, Reason.WAITING),
            (replace(BUSY, instances=3), Reason.PROCESSOR),
            (replace(BUSY, executing=0.0), Reason.PROCESSOR),
        ],
    )
    def test_a_model_that_is_behind_profits(self, load: InstanceLoad, reason: Reason) -> None:
        assert decide(load) is reason

    @pytest.mark.parametrize(
        "load",
        [
            replace(BUSY, waiting=0.0),
            replace(BUSY, waiting=0.9),  # the requests of a batch that forms
            replace(BUSY, spare_cores=0.0),  # no core is free
            replace(BUSY, spare_cores=0.7),
            replace(BUSY, cores=4.0, spare_cores=2.0),  # another instance would need four cores
            replace(BUSY, is_on_gpu=True),
            replace(WAITS, is_on_gpu=True),
            replace(WAITS, spare_cores=0.0),  # the instance may be waiting for a core
            replace(WAITS, executing=0.5),  # something else delays the requests, such as a queue delay
            replace(BUSY, cores=0.5, executing=0.5),
            replace(BUSY, instances=0),
        ],
    )
    def test_others_do_not(self, load: InstanceLoad) -> None:
        assert decide(load) is None

    @pytest.mark.parametrize(
        ("load", "before"),
        [
            (replace(BUSY, waiting=0.6), Reason.PROCESSOR),
            (replace(BUSY, spare_cores=0.6), Reason.PROCESSOR),
            (replace(BUSY, cores=0.65, executing=0.5), Reason.PROCESSOR),
            (replace(WAITS, executing=0.75), Reason.WAITING),
        ],
    )
    def test_advice_stays_a_little_below_its_threshold(self, load: InstanceLoad, before: Reason) -> None:
        assert decide(load) is None
        assert decide(load, before) is before

    @pytest.mark.parametrize(
        "load",
        [
            replace(BUSY, waiting=0.4),
            replace(BUSY, spare_cores=0.4),
            replace(BUSY, cores=0.5, executing=0.5),
            replace(BUSY, is_on_gpu=True),
        ],
    )
    @pytest.mark.parametrize("before", Reason)
    def test_advice_ends_far_below_its_threshold(self, load: InstanceLoad, before: Reason) -> None:
        assert decide(load, before) is None

    @given(
        st.builds(
            InstanceLoad,
            instances=st.integers(0, 4),
            cores=st.floats(0, 8),
            executing=st.floats(0, 1),
            waiting=st.floats(0, 50),
            spare_cores=st.floats(0, 16),
            is_on_gpu=st.booleans(),
        ),
        st.sampled_from([None, *Reason]),
    )
    def test_figures_that_stay_give_a_decision_that_stays(self, load: InstanceLoad, before: Reason | None) -> None:
        decided = decide(load, before)

        assert decide(load, decided) is decided


def fed(
    watch: Watch,
    seconds: int,
    *,
    cores: float = 1.0,
    executing: int = 1,
    waiting: float = 4.0,
    spare: float = 2.0,
    pids: tuple[int, ...] = (7,),
    begin_s: float = 0.0,
) -> list[Reason | None]:
    """Add a sample each second; returns the decision after each."""
    decided = []
    for second in range(seconds + 1):
        at_s = begin_s + second
        watch.add(LoadSample(at_s, dict.fromkeys(pids, at_s * cores), executing, waiting, spare))
        decided.append(watch.reason)
    return decided


class TestWatch:
    def test_nothing_is_said_before_the_window_is_whole(self) -> None:
        decided = fed(Watch(), 12)

        first = int(WINDOW_S)
        assert decided == [None] * first + [Reason.PROCESSOR] * (13 - first)

    def test_processor_time_is_shared_by_the_instances(self) -> None:
        watch = Watch()
        fed(watch, 12, cores=0.9, pids=(1, 2, 3), executing=3)

        assert watch.load is not None
        assert watch.load.instances == 3
        assert watch.load.cores == pytest.approx(0.9)
        assert watch.load.executing == 1.0

    def test_a_burst_is_no_reason(self) -> None:
        watch = Watch()
        for second in range(30):
            waiting = 500.0 if second % 10 < 3 else 0.0
            watch.add(LoadSample(float(second), {7: float(second)}, 1, waiting, 2.0))
            assert watch.reason is None

    def test_it_does_not_come_and_go_with_figures_around_a_limit(self) -> None:
        watch = Watch()
        fed(watch, 12)
        decided = []
        for second in range(13, 120):
            waiting = 0.6 if second // 7 % 2 else 1.6
            watch.add(LoadSample(float(second), {7: float(second)}, 1, waiting, 2.0))
            decided.append(watch.reason)

        assert set(decided) == {Reason.PROCESSOR}

    def test_it_is_taken_back_when_the_queue_is_empty(self) -> None:
        watch = Watch()
        fed(watch, 12)
        decided = fed(watch, 12, waiting=0.0, begin_s=13)

        assert decided[0] is Reason.PROCESSOR
        assert decided[-1] is None
        assert not watch.is_needed

    def test_an_instance_that_is_started_anew_changes_nothing_at_once(self) -> None:
        watch = Watch()
        fed(watch, 12)
        decided = fed(watch, 12, pids=(8,), begin_s=13)

        assert set(decided) == {Reason.PROCESSOR}
        assert watch.load is not None
        assert watch.load.cores == pytest.approx(1.0)

    def test_nothing_is_kept_of_a_model_that_has_time(self) -> None:
        watch = Watch()
        fed(watch, 1000, waiting=0.0)

        assert len(watch._samples) <= WINDOW_S + 2


class TestWords:
    @pytest.mark.parametrize(
        ("groups", "line"),
        [
            ([InstanceGroup("m_0", "AUTO")], "instance_group [{ count: 2 }]"),
            ([InstanceGroup("m_0", "CPU", 3)], "instance_group [{ count: 4 kind: KIND_CPU }]"),
            (
                [InstanceGroup("a", "CPU", 1), InstanceGroup("b", "MODEL", 2)],
                "instance_group [{ count: 2 kind: KIND_CPU }, { count: 2 kind: KIND_MODEL }]",
            ),
        ],
    )
    def test_the_line_has_one_instance_more(self, groups: list[InstanceGroup], line: str) -> None:
        assert advice(Reason.PROCESSOR, BUSY, groups)["line"] == line

    def test_the_sentence_says_why(self) -> None:
        groups = [InstanceGroup("m_0", "AUTO")]

        assert advice(Reason.PROCESSOR, BUSY, groups)["text"] == (
            "another instance would help: its instance keeps 1.0 cores busy; 4 requests wait, 3.0 cores are idle"
        )
        assert advice(Reason.WAITING, replace(WAITS, instances=2), groups, 8)["text"] == (
            "another instance would help: its 2 instances spend their time waiting, as for I/O (0.1 cores busy each); "
            "32 requests wait, 3.0 cores are idle"
        )

    def test_a_batch_is_as_large_as_the_queue_can_make_it(self) -> None:
        assert largest_batch(8, has_batching=True) == 8
        assert largest_batch(8, has_batching=False) == 1
        assert largest_batch(0, has_batching=True) == 1
