"""Properties of the policy that decides which models stay in memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool import Resident
from moonpool.runtime.model.states import RESIDENCE, InvalidMove, Machine, Residence
from moonpool.runtime.residency.policy import Act, Candidate, Need, Sieve, decide, shortage

KEYS = st.integers(0, 9)
NEEDS = st.builds(Need, st.integers(0, 100), st.integers(0, 100))
PRESENT = st.dictionaries(
    KEYS,
    st.builds(Candidate, NEEDS, st.integers(0, 3), st.booleans(), st.just("are in use"), st.booleans()),
    max_size=8,
)
LIMITS = st.builds(
    Resident,
    models=st.none() | st.integers(1, 8),
    memory=st.none() | st.integers(1, 300),
    gpu_memory=st.none() | st.integers(1, 300),
)


def sieve_of(keys: Any) -> Sieve[int]:
    sieve: Sieve[int] = Sieve()
    for key in keys:
        sieve.add(key)
    return sieve


@given(LIMITS, PRESENT, st.none() | NEEDS, st.booleans())
def test_nothing_goes_that_must_stay_and_nobody_waits_while_something_may_go(
    limits: Resident, present: dict[int, Candidate], coming: Need | None, is_member: bool
) -> None:
    verdict = decide(limits, sieve_of(present), present, coming, is_member=is_member)

    needs = [each.need for each in present.values()]
    is_short = bool(shortage(limits, needs if coming is None else [*needs, coming]))
    if verdict.act is Act.EVICT:
        assert is_short
        assert verdict.victim is not None
        assert present[verdict.victim].may_go
    elif verdict.act is Act.WAIT:
        assert is_short
        assert not any(each.may_go for each in present.values())
        assert "are in use" in verdict.reason
    elif is_short:
        # Alone, or together with the model that waits for it.
        assert not present or is_member or (coming is None and len(present) == 1)


@given(LIMITS, PRESENT, st.none() | NEEDS)
def test_processes_stay_only_if_memory_of_gpus_alone_is_short(
    limits: Resident, present: dict[int, Candidate], coming: Need | None
) -> None:
    verdict = decide(limits, sieve_of(present), present, coming)
    if verdict.act is not Act.EVICT or verdict.victim is None:
        assert not verdict.may_stay
        return
    needs = [each.need for each in present.values()] + ([] if coming is None else [coming])
    is_gpu_alone = not shortage(Resident(models=limits.models, memory=limits.memory), needs)
    is_dormant = present[verdict.victim].is_dormant
    others = {each.is_dormant for each in present.values() if each.may_go}
    # A dormant model has freed what it can, and takes memory and a place for nothing.
    assert is_dormant is (others == {True} if is_gpu_alone else True in others)
    assert verdict.may_stay is (is_gpu_alone and not is_dormant)


@given(LIMITS, PRESENT, NEEDS)
def test_evicting_until_it_fits_ends_within_the_limits(
    limits: Resident, present: dict[int, Candidate], coming: Need
) -> None:
    present = {key: each._replace(may_go=True) for key, each in present.items()}
    sieve = sieve_of(present)
    for _ in range(len(present) + 1):
        verdict = decide(limits, sieve, present, coming)
        if verdict.act is Act.ADMIT:
            break
        assert verdict.act is Act.EVICT
        assert verdict.victim is not None
        del present[verdict.victim]
        sieve.remove(verdict.victim)
    else:
        raise AssertionError("it never fits")
    assert not present or not shortage(limits, [*(e.need for e in present.values()), coming])


class SieveAgainstAList(RuleBasedStateMachine):
    """A sieve and the plainest form of the same rule, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.sieve: Sieve[int] = Sieve()
        self.uses: dict[int, int] = {}
        self.order: list[int] = []
        self.marked: set[int] = set()
        self.hand = 0

    @rule(key=KEYS)
    def ask(self, key: int) -> None:
        """Ask for a model, which comes if it is not there."""
        if key in self.order:
            self.uses[key] += 1
            self.marked.add(key)
        else:
            self.uses[key] = self.uses.get(key, 0) + 1
            self.sieve.add(key, self.uses[key])
            self.order.append(key)

    @rule(stays=st.sets(KEYS))
    def evict(self, stays: set[int]) -> None:
        chosen = self.sieve.choose(self.uses.__getitem__, lambda key: key not in stays)
        if set(self.order) <= stays:
            assert chosen is None
            return
        while True:
            self.hand %= len(self.order)
            key = self.order[self.hand]
            if key not in stays and key not in self.marked:
                break
            if key not in stays:
                self.marked.discard(key)
            self.hand += 1
        assert chosen == key
        self.sieve.remove(chosen)
        self.order.remove(key)

    @invariant()
    def holds_the_same(self) -> None:
        assert len(self.sieve) == len(self.order)
        assert all(key in self.sieve for key in self.order)


TestSieve = SieveAgainstAList.TestCase


def hits(keys: list[int], room: int) -> int:
    """Count the requests that a sieve answers from so many places."""
    sieve: Sieve[int] = Sieve()
    uses: dict[int, int] = {}
    found = 0
    for key in keys:
        uses[key] = uses.get(key, 0) + 1
        if key in sieve:
            found += 1
            continue
        if len(sieve) == room:
            victim = sieve.choose(uses.__getitem__, lambda _: True)
            assert victim is not None
            sieve.remove(victim)
        sieve.add(key, uses[key])
    return found


def test_models_that_are_asked_for_once_do_not_drive_out_those_that_are_asked_for_always() -> None:
    always = [0, 1, 2]
    keys = [key for once in range(100, 200) for key in (*always, once)]

    # All but the first of each of the three: a fourth place is enough for all others in turn.
    assert hits(keys, 4) == 3 * 100 - 3


@pytest.mark.parametrize("wrong", [{"models": 0}, {"memory": -1}, {"gpu_memory": 1.5}, {"patience_s": -1.0}])
def test_wrong_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Resident(**wrong)


@given(st.lists(st.sampled_from(Residence), max_size=12))
def test_a_residence_has_processes_only_between_a_start_and_an_end(steps: list[Residence]) -> None:
    machine = Machine("m", RESIDENCE, 0.0)
    starts = ends = 0
    for step in steps:
        before = machine.state
        try:
            machine.move(step, "because", 0.0)
        except InvalidMove:
            assert machine.state is before
            continue
        starts += step is Residence.AWAKE and before is not Residence.LEAVING
        ends += step is Residence.ASLEEP and before is Residence.LEAVING
        assert starts - ends == (step in (Residence.AWAKE, Residence.LEAVING))
