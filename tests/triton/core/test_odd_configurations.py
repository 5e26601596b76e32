"""Configurations that are odd: whether such a model loads, and with which inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.triton.core.conftest import Core, Loads

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]

ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]) for x in inputs]
"""
PYTHON = 'backend: "python"\n'


def tensor(side: str, name: str, datatype: str = "FP32", dims: str = "-1", more: str = "") -> str:
    return f'{side} {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ] {more} }}\n'


X, Y = tensor("input", "X"), tensor("output", "Y")
ODD = {
    "input_twice": PYTHON + X + tensor("input", "X", "INT32", "3") + Y,
    "output_twice": PYTHON + X + Y + tensor("output", "Z") + tensor("output", "Y", "INT32", "3"),
    "an_input_and_an_output": PYTHON + tensor("input", "Y") + Y,
    "n" * 150: PYTHON + X + Y,
    "signs_+,=@:": PYTHON + X + Y,
    "no_such_labels": PYTHON + X + tensor("output", "Y", more='label_filename: "none.txt"'),
    "format_of_one_dim": PYTHON + tensor("input", "X", more="format: FORMAT_NCHW") + Y,
    "format": PYTHON + tensor("input", "X", dims="3, 3, 3", more="format: FORMAT_NHWC") + Y,
    "shape_input": PYTHON + tensor("input", "X", more="is_shape_tensor: true") + Y,
    "shape_output": PYTHON + X + tensor("output", "Y", more="is_shape_tensor: true"),
    "not_linear": PYTHON + tensor("input", "X", more="is_non_linear_format_io: true") + Y,
    "tensorrt": 'platform: "tensorrt_plan"\n' + X + Y,
    "savedmodel": 'platform: "tensorflow_savedmodel"\n' + X + Y,
    "graphdef": 'platform: "tensorflow_graphdef"\n' + X + Y,
    "other_backend": 'backend: "openvino"\n' + X + Y,
    "no_backend": X + Y,
    "no_inputs": PYTHON + Y,
    "group_of_kind_cpu_with_gpus": PYTHON + X + Y + "instance_group { kind: KIND_CPU gpus: 0 }",
    "reshaped": PYTHON + tensor("input", "X", dims="3", more="reshape { shape: [ 2 ] }") + Y,
}
# They load in Triton alone, or here alone: docs/FIDELITY.md says why.
HERE_REFUSED = {
    "neither": PYTHON,
    "batches_of_nothing": PYTHON + "max_batch_size: 2\n" + Y,
    "groups_of_one_name": PYTHON + X + Y + 'instance_group [ { name: "g" }, { name: "g" } ]',
    "negative_count": PYTHON + X + Y + "instance_group { count: -1 }",
    "passive": PYTHON + X + Y + "instance_group { kind: KIND_CPU passive: true }",
}
HERE_ALONE = {"latest_of_none": PYTHON + X + Y + "version_policy { latest { } }"}


@pytest.fixture(scope="module")
def odd(core: Core) -> Iterator[Loads]:
    models = ODD | HERE_REFUSED | HERE_ALONE
    for name, config in models.items():
        core.write(name, config, ECHO)
    loads = Loads(core, __name__, list(models))
    yield loads
    loads.unload()


def reason(text: str) -> str:
    """The reason alone: without the place of the mistake, and what each side adds."""
    text = re.sub(r"^.*?\.pbtxt(:\d+)?: [\w.\[\]]+: ", "", text)
    return re.sub(r"^(Internal|Invalid argument): ", "", text).partition(" (There is no ")[0]


@pytest.mark.promise("Fidelity", "Odd configurations load or fail as in a real Triton.")
@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_loads_or_fails_alike(core: Core, odd: Loads, name: str) -> None:
    theirs, ours = odd.of(name)

    if theirs is None:
        assert ours is None
        assert core.moonpool.metadata(name) == core.triton.metadata(name)
    else:
        assert ours is not None
        assert reason(ours.text) == reason(theirs.text)


@pytest.mark.parametrize("name", HERE_REFUSED)
def test_some_are_refused_here_alone(odd: Loads, name: str) -> None:
    theirs, ours = odd.of(name)

    assert theirs is None
    assert ours is not None


@pytest.mark.parametrize("name", HERE_ALONE)
def test_some_load_here_alone(odd: Loads, name: str) -> None:
    theirs, ours = odd.of(name)

    assert theirs is not None
    assert ours is None
