"""Pipelines of models through ordinary memory and that of a device, with models that others are to run on a card."""

from __future__ import annotations

import numpy as np
import pytest
from tests.e2e.hosting import MODELS
from tests.runtime.devices.conftest import Foreign, Host, on_host

X = np.arange(1, 9, dtype=np.float32)
FP32 = {"data_type": "TYPE_FP32", "dims": [-1]}
INPUTS = [{"name": "INPUT0", **FP32}, {"name": "INPUT1", **FP32}]
OUTPUTS = [{"name": "OUTPUT0", **FP32}, {"name": "OUTPUT1", **FP32}]
TAKES_ALL = {"FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "no"}}


@pytest.fixture
def swap(host: Host) -> Host:
    """A model on the device that others ask: it gives back INPUT1 and INPUT0."""
    config = {"input": INPUTS, "output": OUTPUTS, "instance_group": [{"kind": "KIND_GPU"}], "parameters": TAKES_ALL}
    host.runtime.load("swap", MODELS / "gpu_swap.py", config=config)
    return host


@pytest.mark.promise(
    "Device memory in a model",
    "Pipelines go through ordinary memory and that of a device, and models on a device ask each other there.",
)
def test_a_pipeline_goes_through_ordinary_memory_the_device_and_back(swap: Host) -> None:
    config = {
        "input": [{"name": "X", **FP32}],
        "output": [{"name": "Y", **FP32}],
        "instance_group": [{"kind": "KIND_CPU"}],
        "parameters": {"callee": {"string_value": "swap"}},
    }
    swap.runtime.load("pipeline", MODELS / "gpu_pipeline.py", config=config)
    y = swap.runtime.infer("pipeline", {"X": X}, timeout_s=60)["Y"]
    assert isinstance(y, np.ndarray)
    assert (y == 2 * X + 1).all()


@pytest.mark.promise("Device memory in a model", "Pipelines go through ordinary memory and …")
@pytest.mark.parametrize("there", [True, False])
def test_a_model_on_the_device_asks_another_one_there(swap: Host, *, there: bool) -> None:
    config = {
        "input": INPUTS,
        "output": [*OUTPUTS, {"name": "SEEN", "data_type": "TYPE_STRING", "dims": [1]}],
        "instance_group": [{"kind": "KIND_GPU"}],
        "parameters": {"callee": {"string_value": "swap"}, **TAKES_ALL},
    }
    swap.runtime.load("asks", MODELS / "gpu_bls.py", config=config)
    a, b = (Foreign(X), Foreign(X + 1)) if there else (X, X + 1)
    outputs = swap.runtime.infer("asks", {"INPUT0": a, "INPUT1": b}, timeout_s=60)
    seen = ["gpu" if there else "cpu"] * 2 + ["gpu", "gpu"]
    assert outputs["SEEN"].tolist() == [" ".join(seen).encode()]
    assert (on_host(outputs["OUTPUT0"]) == X + 1).all()
    assert (on_host(outputs["OUTPUT1"]) == X).all()
