"""Decisions if an instance is started again, and when."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.process.restart import GiveUp, RestartAt, RestartPolicy

pytestmark = pytest.mark.promise(
    "Lifecycle",
    "The first restart comes at once, each further one later than the one before, and they end at the limit.",
)

seconds = st.floats(0, 1000, allow_nan=False)
policies = st.builds(
    RestartPolicy,
    max_restarts=st.integers(0, 8),
    window_s=st.floats(0.001, 1000),
    first_backoff_s=st.sampled_from([0.0, 0.5]),
    backoff_s=seconds,
    backoff_max_s=seconds,
)


def test_waits_double_from_the_second_death_up_to_the_cap_and_then_it_gives_up() -> None:
    policy = RestartPolicy(max_restarts=6, backoff_max_s=0.5)
    deaths: list[float] = []
    waits: list[float] = []
    while isinstance(decision := policy.decide([*deaths, 50.0], 50.0), RestartAt):
        waits.append(round(decision.at_s - 50.0, 6))
        deaths.append(50.0)
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.5, 0.5]
    assert decision == GiveUp("died 7 times within 60 s, in which 6 restarts are allowed")


def test_deaths_that_left_the_window_are_forgiven() -> None:
    policy = RestartPolicy(max_restarts=1, window_s=10)
    assert isinstance(policy.decide([0.0, 9.9], 9.9), GiveUp)
    assert policy.decide([0.0, 10.0], 10.0) == RestartAt(10.0)


def test_without_restarts_the_first_death_is_the_last() -> None:
    decision = RestartPolicy(max_restarts=0).decide([1.0], 1.0)
    assert decision == GiveUp("died, and restarts are switched off")


def test_a_decision_that_comes_late_restarts_now() -> None:
    policy = RestartPolicy()
    assert policy.decide([0.0, 1.0], 5.0) == RestartAt(5.0)
    assert policy.decide([0.0], 1000.0) == RestartAt(1000.0)


def test_many_deaths_do_not_overflow() -> None:
    policy = RestartPolicy(max_restarts=10**6, window_s=math.inf)
    assert policy.decide([0.0] * 5000, 0.0) == RestartAt(60.0)


@pytest.mark.parametrize(
    ("field", "value"), [("max_restarts", -1), ("window_s", 0.0), ("backoff_s", math.nan), ("backoff_max_s", -0.1)]
)
def test_a_policy_that_means_nothing_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value}"):
        RestartPolicy(**{field: value})  # type: ignore[arg-type]


def test_there_is_no_decision_before_a_death() -> None:
    with pytest.raises(ValueError, match="before the first death"):
        RestartPolicy().decide([], 0.0)


@given(policy=policies, lives_s=st.lists(st.floats(0, 100), min_size=1, max_size=40))
def test_restarts_are_never_more_than_the_policy_allows(policy: RestartPolicy, lives_s: list[float]) -> None:
    now_s = 0.0
    deaths: list[float] = []
    restarted: list[float] = []
    for life_s in lives_s:
        now_s += life_s
        deaths.append(now_s)
        decision = policy.decide(deaths, now_s)
        assert policy.decide(deaths[-policy.max_restarts - 1 :], now_s) == decision
        in_window = [death for death in deaths if now_s - death < policy.window_s]
        if isinstance(decision, GiveUp):
            assert len(in_window) > policy.max_restarts
            break
        assert len(in_window) <= policy.max_restarts
        restarted.append(now_s)
        assert now_s <= decision.at_s <= now_s + policy.backoff_max_s
        now_s = decision.at_s
    for begin in restarted:
        within = [each for each in restarted if 0 <= each - begin < policy.window_s]
        assert len(within) <= policy.max_restarts


@given(policy=policies, deaths=st.integers(2, 50))
def test_no_wait_is_shorter_than_the_one_before(policy: RestartPolicy, deaths: int) -> None:
    assert policy.backoff_after_s(deaths) <= policy.backoff_after_s(deaths + 1)
