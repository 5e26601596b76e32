"""What a type checker knows of a model's imports where moonpool is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import moonpool

SOURCE = Path(moonpool.__path__[0]).parent
STUBS = ["triton_python_backend_utils-stubs", "c_python_backend_utils-stubs"]

# As Triton's own documents write models.
MODEL = """
import json

import numpy as np
import c_python_backend_utils as c
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(8)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "Y")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])

    def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if (x < 0).any():
                error = pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            output = c.Tensor("Y", np.sqrt(x + 1).astype(self.dtype))
            response = pb_utils.InferenceResponse(output_tensors=[output])
            if response.has_error():
                raise c.TritonModelException(response.error().message())
            responses.append(response)
        pb_utils.Logger.log("executed", pb_utils.Logger.INFO)
        return responses
"""
# With everything that a model may ask of its host.
ASKER = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.family = pb_utils.MetricFamily(
            name="n", description="d", kind=pb_utils.MetricFamily.COUNTER
        )
        self.metric = self.family.Metric(labels={"model": args["model_name"]})
        self.histogram = pb_utils.MetricFamily("h", "d", pb_utils.MetricFamily.HISTOGRAM).Metric(labels={}, buckets=[1.0, 2])
        if not pb_utils.is_model_ready(model_name="other", model_version="1"):
            pb_utils.load_model(model_name="other", config="{}", files={"file:1/model.py": b""})

    async def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            self.metric.increment(1)
            sender = request.get_response_sender()
            if request.is_cancelled() or sender.is_cancelled():
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            ask = pb_utils.InferenceRequest(
                model_name="other",
                requested_output_names=["Y"],
                inputs=[pb_utils.Tensor("X", np.ones(3, np.float32)), *request.inputs()],
                request_id=request.request_id(),
                correlation_id=request.correlation_id(),
                preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
                trace=request.trace(),
                parameters={"a": 1, "b": "c", "d": True},
                timeout=5,
            )
            response = ask.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            y = pb_utils.get_output_tensor_by_name(response, "Y").as_numpy() + 1
            for each in ask.exec(decoupled=True):
                if len(each.output_tensors()) > 0:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
            one, two = await asyncio.gather(ask.async_exec(), ask.async_exec())
            one.output_tensors(), two.parameters()
            stream = await ask.async_exec(decoupled=True)
            stream.cancel()
            for each in stream:
                each.has_error()
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            sender.send(pb_utils.InferenceResponse(), flags=1)
            names: set[str] = request.requested_output_names()
            request.timeout() + len(names) + request.flags()
"""
MISTAKES = """
import c_python_backend_utils
import triton_python_backend_utils as pb_utils

pb_utils.Tensor("X", [1, 2])
pb_utils.Tenser
number: int = c_python_backend_utils.TritonError("text").message()
"""


def test_every_name_of_the_module_is_known_to_type_checkers() -> None:
    for name in STUBS:
        text = (SOURCE / name / "__init__.pyi").read_text()

        # A star takes what `__all__` lists, so there is no second list that could be an older one.
        assert text.splitlines()[-1] == "from moonpool.stub.pb_utils import *"


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that has moonpool installed, as a wheel would, and what this one has."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    packages = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    for name in ["moonpool", *STUBS]:
        os.symlink(SOURCE / name, Path(packages) / name)
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")


def mypy(python: str, folder: Path, text: str) -> list[str]:
    (folder / "model.py").write_text(text)
    (folder / "mypy.ini").write_text("[mypy]\n")
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "model.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
    )
    return (ended.stdout + ended.stderr).splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="mypy is not installed")
def test_a_model_is_type_checked(python: str, tmp_path: Path) -> None:
    assert mypy(python, tmp_path, MODEL) == ["Success: no issues found in 1 source file"]

    assert mypy(python, tmp_path, ASKER) == ["Success: no issues found in 1 source file"]
    *mistakes, _ = mypy(python, tmp_path, MISTAKES)
    assert [line.rsplit("[", 1)[1] for line in mistakes if "error:" in line] == [
        "arg-type]",
        "attr-defined]",
        "assignment]",
    ]
