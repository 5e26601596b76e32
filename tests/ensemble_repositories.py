"""Repositories with ensembles, written for tests: models, steps between them, and configurations of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Io(NamedTuple):
    """An input or an output: a vector of three numbers if nothing else is said."""

    name: str
    datatype: str = "FP32"
    dims: str = "3"
    more: str = ""


IN, OUT = (Io("X"),), (Io("Y"),)
A, B = (Io("A"),), (Io("B"),)

# Adds 1 to X.
ADDS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + 1)]))
        return responses
"""
# Sends X, X + 1, … as many times as the first number of X says.
REPEATS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            sender = request.get_response_sender()
            for number in range(int(x.flat[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + number)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("not today", pb_utils.TritonError.NOT_FOUND)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
# Answers with Y and never with Z.
LEAVES_OUT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        y = pb_utils.Tensor("Y", np.zeros(3, np.float32))
        return [pb_utils.InferenceResponse([y]) for _ in requests]
"""
# Says in Y what it got.
TELLS = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            got = {each.name(): each.as_numpy().tolist() for each in request.inputs()}
            told = {
                "inputs": dict(sorted(got.items())),
                "id": request.request_id(),
                "sequence": request.correlation_id(),
                "flags": request.flags(),
                "timeout": request.timeout(),
                "parameters": json.loads(request.parameters() or "{}"),
                "outputs": sorted(request.requested_output_names()),
            }
            text = np.array([json.dumps(told, sort_keys=True).encode()], object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", text)]))
        return responses
"""
TEXT = (Io("Y", "STRING", "1"),)


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int = -1) -> str:
    """Return the text of a step. `inputs` and `outputs` map tensors of the model to those of the ensemble."""
    maps = [
        f'{kind} {{ key: "{key}" value: "{value}" }}'
        for kind, pairs in (("input_map", inputs), ("output_map", outputs))
        for key, value in pairs.items()
    ]
    return f'{{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}'


def chain(models: Sequence[str], first: str = "A", last: str = "B") -> list[str]:
    """Return steps of models with one input X and one output Y, each of which reads what the one before wrote."""
    between = [first, *(f"t{number}" for number in range(1, len(models))), last]
    return [step(model, {"X": between[number]}, {"Y": between[number + 1]}) for number, model in enumerate(models)]


def write_model(
    repository: Path,
    name: str,
    code: str = ADDS,
    inputs: Sequence[Io] = IN,
    outputs: Sequence[Io] = OUT,
    more: str = "",
) -> None:
    """Write a Python model."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    text = f'backend: "python"\n{_tensors(inputs, outputs)}{more}\n'
    (repository / name / "config.pbtxt").write_text(text)


def ensemble_text(steps: Sequence[str], inputs: Sequence[Io] = A, outputs: Sequence[Io] = B, more: str = "") -> str:
    """Return the configuration of an ensemble."""
    scheduling = "".join(f"  step {each}\n" for each in steps)
    return f'platform: "ensemble"\n{_tensors(inputs, outputs)}ensemble_scheduling {{\n{scheduling}}}\n{more}\n'


def write_ensemble(
    repository: Path,
    name: str,
    steps: Sequence[str],
    inputs: Sequence[Io] = A,
    outputs: Sequence[Io] = B,
    more: str = "",
) -> None:
    """Write an ensemble."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(ensemble_text(steps, inputs, outputs, more))


def _tensors(inputs: Sequence[Io], outputs: Sequence[Io]) -> str:
    return "".join(
        f'{kind} {{ name: "{io.name}" data_type: TYPE_{io.datatype} dims: [ {io.dims} ] {io.more} }}\n'
        for kind, tensors in (("input", inputs), ("output", outputs))
        for io in tensors
    )
