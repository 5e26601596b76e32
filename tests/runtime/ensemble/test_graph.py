"""The graph of an ensemble: if it is decoupled, and the part of it that a request needs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.ensemble_repositories import A, B, Io, chain, ensemble_text, step

from moonpool.runtime.ensemble.graph import EnsembleGraph, fits
from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.ensembles import EnsembleStep
from moonpool.runtime.model.config.model import ModelConfig


def member(name: str, outputs: Sequence[str] = "Y", *, decoupled: bool = False) -> ModelConfig:
    def tensor(tensor_name: str) -> dict[str, object]:
        return {"name": tensor_name, "data_type": "TYPE_FP32", "dims": [3]}

    return ModelConfig.from_dict(
        {
            "name": name,
            "backend": "python",
            "model_transaction_policy": {"decoupled": decoupled},
            "input": [tensor("X")],
            "output": [*map(tensor, outputs)],
        }
    )


MEMBERS = {
    each.name: each
    for each in (member("m"), member("n"), member("dec", decoupled=True), member("dec2", decoupled=True))
}


def of(step: EnsembleStep) -> ModelConfig:
    return MEMBERS[step.model]


def graph(steps: Sequence[str], outputs: Sequence[Io] = B) -> EnsembleGraph:
    text = ensemble_text(steps, A, outputs, 'name: "e"')
    raw, source = pbtxt.parse(text, "config.pbtxt")
    config = ModelConfig.from_dict(raw, source=source)
    assert config.ensemble is not None
    return EnsembleGraph(config, config.ensemble)


BC = (*B, Io("C"))


@pytest.mark.promise("Ensembles", "An ensemble is decoupled if one of its models is, whatever it says.")
def test_one_decoupled_model_makes_the_ensemble_decoupled() -> None:
    assert graph(chain(["m", "dec", "n"])).check(of) is True
    assert graph(chain(["dec", "dec2"])).check(of) is True


def test_a_flow_has_the_steps_behind_the_outputs_that_are_wanted() -> None:
    steps = [*chain(["m", "n"]), step("m", {"X": "A"}, {"Y": "C"})]
    given = graph(steps, outputs=BC)
    whole, for_c = given.flow(), given.flow(["C"])

    assert whole.readers == {"A": (0, 2), "t1": (1,), "B": (3,), "C": (3,)}
    assert list(whole.needs) == [1, 1, 1, 2]
    assert for_c.readers == {"A": (2,), "C": (3,)}
    assert list(for_c.needs) == [0, 0, 1, 1]
    assert [for_c.feeds_caller(number) for number in range(3)] == [False, False, True]
    assert given.flow(["C"]) is for_c


def test_a_flow_leaves_out_tensors_that_nobody_reads() -> None:
    both = member("both", "YZ")
    given = graph([step(both.name, {"X": "A"}, {"Y": "B", "Z": "C"})], outputs=BC)

    assert given.flow(["B"]).outputs == [(("Y", "B"),)]
    assert given.flow().outputs == [(("Y", "B"), ("Z", "C"))]


@pytest.mark.parametrize(
    ("dims", "others", "agree"),
    [([3], [3], True), ([3], [4], False), ([-1], [4], True), ([3], [-1], True), ([1, 3], [3], False)],
)  # fmt: skip
def test_variable_sizes_fit_any(dims: list[int], others: list[int], agree: bool) -> None:
    assert fits(dims, others) is agree
