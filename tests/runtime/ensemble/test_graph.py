"""The graph of an ensemble against its members, with Triton's texts, and the part of it that a request needs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.ensemble_repositories import A, B, Io, chain, ensemble_text, step

from moonpool.runtime.ensemble.graph import EnsembleGraph, Unfit, fits
from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.ensembles import EnsembleStep
from moonpool.runtime.model.config.model import ModelConfig


def member(
    name: str,
    inputs: Sequence[tuple[str, str, list[int]]] = (("X", "FP32", [3]),),
    outputs: Sequence[tuple[str, str, list[int]]] = (("Y", "FP32", [3]),),
    *,
    optional: str = "",
    rows: int = 0,
    decoupled: bool = False,
) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "name": name,
            "backend": "python",
            "max_batch_size": rows,
            "model_transaction_policy": {"decoupled": decoupled},
            "input": [
                {"name": n, "data_type": f"TYPE_{t}", "dims": d, "optional": n == optional}
                for n, t, d in inputs
            ],
            "output": [{"name": n, "data_type": f"TYPE_{t}", "dims": d} for n, t, d in outputs],
        }
    )


TWO = (("X", "FP32", [3]), ("X2", "FP32", [3]))
MEMBERS = {
    each.name: each
    for each in (
        member("m"),
        member("n"),
        member("b4", rows=4),
        member("b8", rows=8),
        member("int", outputs=[("Y", "INT32", [3])]),
        member("text", outputs=[("Y", "STRING", [3])]),
        member("d4", outputs=[("Y", "FP32", [4])]),
        member("d24", outputs=[("Y", "FP32", [2, 4])]),
        member("any", inputs=[("X", "FP32", [-1])], outputs=[("Y", "FP32", [-1])]),
        member("rows", inputs=[("X", "FP32", [-1, 3])], outputs=[("Y", "FP32", [-1, 3])]),
        member("two", inputs=TWO),
        member("optional", inputs=TWO, optional="X2"),
        member("dec", decoupled=True),
        member("dec2", decoupled=True),
    )
}


def of(step: EnsembleStep) -> ModelConfig:
    return MEMBERS[step.model]


def graph(
    steps: Sequence[str],
    inputs: Sequence[Io] = A,
    outputs: Sequence[Io] = B,
    rows: int = 0,
) -> EnsembleGraph:
    text = ensemble_text(steps, inputs, outputs, f'max_batch_size: {rows} name: "e"')
    raw, source = pbtxt.parse(text, "config.pbtxt")
    config = ModelConfig.from_dict(raw, source=source)
    assert config.ensemble is not None
    return EnsembleGraph(config, config.ensemble)


ORIGINS = (
    "in ensemble e, step of model 'e' receives inputs originated from different decoupled models"
)
BC = (*B, Io("C"))


@pytest.mark.promise(
    "Ensembles",
    "An ensemble whose models do not fit together is not loaded, and the error has Triton's text.",
)
@pytest.mark.parametrize(
    ("given", "what"),
    [
        (
            graph(chain(["int", "m"])),
            "in ensemble e, ensemble tensor t1: inconsistent data type: TYPE_INT32 is inferred from model int while "
            "TYPE_FP32 is inferred from model m",
        ),
        (
            graph(chain(["text", "m"])),
            "in ensemble e, ensemble tensor t1: inconsistent data type: TYPE_STRING is inferred from model text while "
            "TYPE_FP32 is inferred from model m",
        ),
        (
            graph(chain(["d4", "m"])),
            "in ensemble e, ensemble tensor t1: inconsistent shape: [4] is inferred from model d4 while [3] is inferred "
            "from model m",
        ),
        (
            graph(chain(["d24", "m"])),
            "in ensemble e, ensemble tensor t1: inconsistent shape: [2,4] is inferred from model d24 while [3] is inferred "
            "from model m",
        ),
        (
            graph(chain(["d4"])),
            "in ensemble e, ensemble tensor B: inconsistent shape: [3] is inferred from model e while [4] is inferred from "
            "model d4",
        ),
        (
            graph(chain(["b4"]), rows=8),
            "ensemble e allows maximum batch size 8, but it contains model b4 which only allows maximum batch size to be 4",
        ),
        (
            graph([step("m", {"W": "A"}, {"Y": "B"})]),
            "in ensemble e, ensemble tensor A is mapping to non-existing input W in model m",
        ),
        (
            graph([step("m", {"X": "A"}, {"W": "B"})]),
            "in ensemble e, ensemble tensor B is mapped from non-existing output W in model m",
        ),
        (
            graph([step("two", {"X": "A"}, {"Y": "B"})]),
            "in ensemble e, input X2 in model two is not mapped to any ensemble tensors",
        ),
        (
            graph(
                [
                    step("dec", {"X": "A"}, {"Y": "t"}),
                    step("dec2", {"X": "A"}, {"Y": "u"}),
                    step("two", {"X": "t", "X2": "u"}, {"Y": "B"}),
                ]
            ),
            ORIGINS,
        ),
        (
            graph([step("dec", {"X": "A"}, {"Y": "t"}), step("two", {"X": "t", "X2": "A"}, {"Y": "B"})]),
            ORIGINS,
        ),
        (
            graph(
                [
                    step("dec", {"X": "A"}, {"Y": "t"}),
                    step("dec2", {"X": "t"}, {"Y": "u"}),
                    step("two", {"X": "t", "X2": "u"}, {"Y": "B"}),
                ]
            ),
            ORIGINS,
        ),
        (
            graph([step("dec", {"X": "A"}, {"Y": "B"}), step("m", {"X": "A"}, {"Y": "C"})], outputs=BC),
            ORIGINS,
        ),
    ],
)  # fmt: skip
def test_models_that_do_not_fit_are_refused(given: EnsembleGraph, what: str) -> None:
    with pytest.raises(Unfit) as caught:
        given.check(of)

    assert str(caught.value) == what
    assert caught.value.code == "INVALID_ARG"


@pytest.mark.parametrize(
    "given",
    [
        graph(chain(["m", "n"])),
        graph(chain(["any", "m", "any"])),
        graph([step("optional", {"X": "A"}, {"Y": "B"})]),
        graph(chain(["b8", "b4"]), rows=4),
        # A model that does not batch, between those that do, and the other way round.
        graph(chain(["b4", "m", "b8"]), rows=4),
        graph(chain(["m", "b4", "m"])),
        graph(chain(["rows", "b4"]), inputs=(Io("A", dims="-1, 3"),)),
    ],
)
def test_models_that_fit_make_an_ensemble(given: EnsembleGraph) -> None:
    assert given.check(of) is False


@pytest.mark.promise(
    "Ensembles", "An ensemble is decoupled if one of its models is, whatever it says."
)
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
    both = member("both", outputs=[("Y", "FP32", [3]), ("Z", "FP32", [3])])
    given = graph([step(both.name, {"X": "A"}, {"Y": "B", "Z": "C"})], outputs=BC)

    assert given.flow(["B"]).outputs == [(("Y", "B"),)]
    assert given.flow().outputs == [(("Y", "B"), ("Z", "C"))]


@pytest.mark.parametrize(
    ("dims", "others", "agree"),
    [([3], [3], True), ([3], [4], False), ([-1], [4], True), ([3], [-1], True), ([1, 3], [3], False)],
)  # fmt: skip
def test_variable_sizes_fit_any(dims: list[int], others: list[int], agree: bool) -> None:
    assert fits(dims, others) is agree
