"""Properties of the policy that decides how many instances a model has, also under simulated load."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.model.config.options import check_option
from moonpool.runtime.residency.autoscaling import (
    DOWN_S,
    UP_S,
    Autoscaler,
    QueueCounts,
    QueueWatch,
    Room,
    ScaleSample,
    ScaleStep,
)

TARGET_MS = 10.0
TICK_S = 0.1
RANGES = st.tuples(st.integers(1, 6), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
ROOMS = st.builds(Room, st.floats(0, 16, allow_nan=False) | st.just(float("inf")), st.integers(0, 20))
LOADS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1), ROOMS), max_size=300)


@given(RANGES, LOADS)
def test_steps_stay_within_the_range_and_do_not_swing(
    bounds: tuple[int, int], loads: list[tuple[float, float, Room]]
) -> None:
    scaler = Autoscaler(bounds, TARGET_MS)
    instances = bounds[0]
    last_s, last_up_s = -1e9, -1e9
    for number, (wait_ms, share, room) in enumerate(loads):
        now_s = number * TICK_S
        step = scaler.step(ScaleSample(now_s, instances, wait_ms, share * instances), room)
        if step is None:
            continue
        assert bounds[0] <= step.instances <= bounds[1]
        assert step.instances != instances
        assert step.because
        if step.instances > instances:
            assert wait_ms > TARGET_MS
            assert step.instances <= 2 * instances
            assert step.instances - instances <= max(1, room.by_memory)
            assert now_s - last_s > UP_S - 1e-9
            last_up_s = now_s
        else:
            assert wait_ms <= TARGET_MS / 2
            assert step.instances == instances - 1
            # What came stays for a while.
            assert now_s - last_up_s > DOWN_S - 1e-9
        instances, last_s = step.instances, now_s


@given(RANGES)
def test_no_load_leads_to_the_least_and_too_much_to_the_most(bounds: tuple[int, int]) -> None:
    scaler = Autoscaler(bounds, TARGET_MS)
    instances, now_s = bounds[0], 0.0
    for wait_ms, wanted in ((1000.0, bounds[1]), (0.0, bounds[0])):
        for _ in range(int((bounds[1] + 1) * (DOWN_S + 1) / TICK_S)):
            step = scaler.step(ScaleSample(now_s, instances, wait_ms, 0.0), Room())
            instances = instances if step is None else step.instances
            now_s += TICK_S
        assert instances == wanted


@pytest.mark.parametrize(
    ("room", "because"), [(Room(0.2, 9), "no processor is idle"), (Room(4.0, 0), "there is no memory")]
)
def test_nothing_comes_where_the_machine_has_no_room(room: Room, because: str) -> None:
    scaler = Autoscaler((1, 8), TARGET_MS)
    for number in range(20):
        assert scaler.step(ScaleSample(number * TICK_S, 1, 500.0, 1.0), room) is None
    assert because in scaler.held_because


def test_a_number_out_of_range_is_corrected_at_once() -> None:
    scaler = Autoscaler((2, 4), TARGET_MS)
    step = scaler.step(ScaleSample(0.0, 9, 0.0, 0.0), Room())
    assert step == ScaleStep(4, "2..4 is allowed")


def simulate(rate_hz: float, service_s: float, seconds: float, bounds: tuple[int, int]) -> tuple[list[int], float]:
    """Serve Poisson arrivals with instances that follow the policy.

    Returns their number at each tick, and the mean wait in the last third, in ms.
    """
    chance = random.Random(7)
    scaler, instances = Autoscaler(bounds, TARGET_MS), bounds[0]
    arrivals: list[float] = []
    now_s = chance.expovariate(rate_hz)
    while now_s < seconds:
        arrivals.append(now_s)
        now_s += chance.expovariate(rate_hz)
    free_at = [0.0] * instances
    heapq.heapify(free_at)
    numbers, waits, late, place = [], [], [], 0
    for tick in range(int(seconds / TICK_S)):
        end_s = (tick + 1) * TICK_S
        served = []
        while place < len(arrivals) and max(free_at[0], arrivals[place]) < end_s:
            start_s = max(heapq.heappop(free_at), arrivals[place])
            heapq.heappush(free_at, start_s + service_s)
            served.append((start_s - arrivals[place]) * 1e3)
            place += 1
        waiting = [(end_s - each) * 1e3 for each in arrivals[place:] if each < end_s]
        waits = served + waiting
        busy = sum(each > end_s for each in free_at)
        wait_ms = sum(waits) / len(waits) if waits else 0.0
        if end_s > seconds * 2 / 3:
            late += served
        step = scaler.step(ScaleSample(end_s, instances, wait_ms, busy), Room())
        if step is not None:
            while len(free_at) < step.instances:
                heapq.heappush(free_at, end_s)
            while len(free_at) > step.instances:
                heapq.heappop(free_at)
            instances = step.instances
        numbers.append(instances)
    return numbers, sum(late) / len(late)


def test_simulated_load_gets_enough_instances_and_few_steps() -> None:
    # 2.4 instances' worth of work.
    numbers, wait_ms = simulate(120.0, 0.02, 60.0, (1, 8))

    assert wait_ms < 2 * TARGET_MS
    assert 3 <= numbers[-1] <= 6
    assert sum(a != b for a, b in itertools.pairwise(numbers)) <= 12
    # Enough within a second.
    assert max(numbers[: int(1.5 / TICK_S)]) >= 3


@pytest.mark.parametrize("text", ["", "1", "0..3", "4..2", "a..b", "1..", "1...3"])
def test_wrong_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"1\.\.8"):
        check_option("MOONPOOL_INSTANCES", text)


COUNTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**9), st.integers(0, 3)), min_size=1, max_size=30)


@given(COUNTS)
def test_the_waiting_time_is_that_of_what_ended_or_of_what_does_not_end(looks: list[tuple[int, int, int]]) -> None:
    watch, ended, queue_ns, stuck_s = QueueWatch(), 0, 0, 0
    for second, (more, waited_ns, waiting) in enumerate(looks):
        ended, queue_ns = ended + more, queue_ns + more * waited_ns
        stuck_s = stuck_s + 1 if second and waiting and not more else 0
        wait_ms = watch.wait_ms(QueueCounts(float(second), ended, queue_ns, waiting))
        if not second:
            assert wait_ms == 0
        elif more:
            assert wait_ms == pytest.approx(waited_ns / 1e6)
        else:
            assert wait_ms == stuck_s * 1e3
