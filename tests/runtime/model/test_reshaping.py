"""Shapes of clients and shapes of models, where a configuration has both."""

from __future__ import annotations

import pytest

from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.reshaping import Reshaping, of_inputs, of_outputs

pytestmark = pytest.mark.promise(
    "Requests",
    "If a configuration has a `reshape`, the model and its clients each have their own shape of "
    "the tensor, as in Triton. Models that call others are clients.",
)


@pytest.mark.parametrize(
    ("given", "wanted", "shape", "there"),
    [
        ((6,), (2, 3), [6], [2, 3]),
        ((1,), (), [1], []),
        ((), (1,), [], [1]),
        ((-1, 4), (-1, 2, 2), [5, 4], [5, 2, 2]),
        ((2, 2, -1), (4, -1), [2, 2, 7], [4, 7]),
        ((-1, -1), (1, -1, 1, -1), [3, 0], [1, 3, 1, 0]),
    ],
)
def test_a_shape_is_carried_over_with_its_rows_and_its_variable_sizes(
    given: tuple[int, ...], wanted: tuple[int, ...], shape: list[int], there: list[int]
) -> None:
    assert Reshaping(given, wanted, has_rows=False).of(shape) == there
    assert Reshaping(given, wanted, has_rows=True).of([8, *shape]) == [8, *there]


@pytest.mark.parametrize("shape", [[], [5], [6, 1], [3, 2]])
def test_a_shape_of_another_form_stays_as_it_is(shape: list[int]) -> None:
    assert Reshaping((6,), (2, 3), has_rows=False).of(shape) == shape


def test_inputs_and_outputs_go_opposite_ways() -> None:
    tensor = {"data_type": "TYPE_FP32", "dims": [4], "reshape": {"shape": [2, 2]}}
    plain = {"data_type": "TYPE_FP32", "dims": [4]}
    config = ModelConfig.from_dict(
        {
            "name": "m",
            "backend": "python",
            "input": [{"name": "A", **tensor}, {"name": "B", **plain}],
            "output": [{"name": "C", **tensor}, {"name": "D", **plain}],
        }
    )

    assert of_inputs(config) == {"A": Reshaping((4,), (2, 2), has_rows=False)}
    assert of_outputs(config) == {"C": Reshaping((2, 2), (4,), has_rows=False)}
