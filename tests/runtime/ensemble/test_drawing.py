"""The steps of an ensemble as a drawing."""

from __future__ import annotations

from moonpool.runtime.ensemble.drawing import drawn
from moonpool.runtime.model.config.ensembles import EnsembleScheduling, EnsembleStep


def test_steps_stand_behind_those_that_they_wait_for() -> None:
    joins = EnsembleStep("joins", 2, (("X", "t"), ("u", "u")), (("Y", "B"),))
    first = EnsembleStep("first", None, (("X", "A"),), (("Y", "t"),))
    second = EnsembleStep("b", None, (("X", "A"),), (("Y", "u"),))

    assert drawn(EnsembleScheduling((joins, first, second))) == [
        "      1  first    [A → X] → [Y → t]",
        "      2  b        [A → X] → [Y → u]",
        "1+2 → 3  joins:2  [t → X, u] → [Y → B]",
    ]


def test_a_chain_has_one_step_before_each() -> None:
    steps = tuple(EnsembleStep("m", None, (("X", f"t{number}"),), (("Y", f"t{number + 1}"),)) for number in range(2))

    assert drawn(EnsembleScheduling(steps)) == ["    1  m  [t0 → X] → [Y → t1]", "1 → 2  m  [t1 → X] → [Y → t2]"]
