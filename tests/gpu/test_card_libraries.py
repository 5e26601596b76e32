"""PyTorch and CuPy on both sides of a model: on a card alone, as they take no other driver."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, tensor
from tests.gpu.libraries import Cupy, Library, Torch, warmed
from tests.runtime.devices.conftest import Host

import moonpool

# Warnings of libraries are not errors here.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.promise(
        "Device memory",
        "Callers and models in PyTorch and CuPy share arrays on the card, in the order of their "
        "streams, without waiting on the processor (on a card alone).",
    ),
]

A = np.arange(1, 9, dtype=np.float32)
B = np.full(8, 2, np.float32)
NAMES = ("torch", "cupy")


@pytest.fixture(scope="module", params=[Torch, Cupy], ids=NAMES)
def library(request: pytest.FixtureRequest) -> Library:
    """The caller's library."""
    return warmed(request.param())


@pytest.fixture(params=NAMES)
def model_library(request: pytest.FixtureRequest) -> str:
    """The model's library. The tests' interpreter must have it."""
    name: str = request.param
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


def load(host: Host, name: str, file: str, inputs: str, outputs: str, *, kind: str = "GPU", callee: str = "") -> None:
    """A model whose inputs stay where they are; the names of its tensors are in `inputs` and `outputs`."""
    parameters = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", "callee": callee}
    config = {
        "input": [tensor(each, "FP32", -1) for each in inputs.split()],
        "output": [
            tensor(each, "STRING", 1) if each == "SEEN" else tensor(each, "FP32", -1) for each in outputs.split()
        ],
        "instance_group": [{"kind": f"KIND_{kind}"}],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    host.runtime.load(name, MODELS / file, config=config)


def load_add_sub(host: Host, model_library: str) -> None:
    load(host, "add_sub", f"gpu_add_sub_{model_library}.py", "INPUT0 INPUT1", "OUTPUT0 OUTPUT1")


def infer(host: Host, a: object, b: object, model: str = "add_sub", **options: Any) -> Any:
    inputs = {"INPUT0": a, "INPUT1": b}
    return host.runtime.infer(model, inputs, timeout_s=120, **options)


def test_a_model_of_one_library_and_a_caller_of_another_share_arrays(
    card_host: Host, library: Library, model_library: str
) -> None:
    load_add_sub(card_host, model_library)
    for a, b in ((library.array(A), library.array(B)), (A, library.array(B)), (A, B)):
        outputs = infer(card_host, a, b)

        assert all(isinstance(each, moonpool.DeviceArray) for each in outputs.values())
        total, difference = (library.take(outputs[name]) for name in ("OUTPUT0", "OUTPUT1"))
        assert (library.values(total) == A + B).all()
        assert (library.values(difference) == A - B).all()


def test_an_answer_can_be_the_next_input(card_host: Host, library: Library, model_library: str) -> None:
    load_add_sub(card_host, model_library)
    total: Any = library.array(A)
    b = library.array(B)

    for _ in range(200):
        total = infer(card_host, total, b)["OUTPUT0"]

    assert (library.values(library.take(total)) == A + 200 * B).all()


def test_outputs_on_the_gpu_come_in_ordinary_memory_where_that_is_wanted(
    card_host: Host, library: Library, model_library: str
) -> None:
    load_add_sub(card_host, model_library)

    outputs = infer(card_host, library.array(A), library.array(B), outputs_in="cpu")

    assert isinstance(outputs["OUTPUT0"], np.ndarray)
    assert (outputs["OUTPUT0"] == A + B).all()
    assert (outputs["OUTPUT1"] == A - B).all()


def test_memory_of_the_runtime_s_that_a_library_fills_is_not_copied(card_host: Host, library: Library) -> None:
    card_host.load()
    with library.on_stream(0):
        x = library.take(card_host.runtime.empty("m", "X", A.shape, device=0))
        library.be_slow()
        library.fill(x, 7)

        y, on_cpu = card_host.infer(x)

    assert not on_cpu
    assert y.address == library.address(x)
    assert (y.to_host() == 7).all()


def test_late_work_of_a_caller_s_stream_is_waited_for_on_the_card(
    card_host: Host, library: Library, model_library: str
) -> None:
    load_add_sub(card_host, model_library)
    with library.on_stream(0):
        a, b = library.array(A), library.array(B)
        # The first request makes the model load its kernels.
        infer(card_host, a, b)
        for step in (3, 4):
            library.be_slow()
            library.fill(a, step)
            outputs = infer(card_host, a, b)
            # The model must have read the array before this overwrites it.
            library.fill(a, 100)

            assert library.is_busy()
            with library.on_stream(1):
                total = library.values(library.take(outputs["OUTPUT0"]))
            assert (total == step + B).all()


def test_a_pipeline_goes_through_both_kinds_of_memory(card_host: Host, library: Library, model_library: str) -> None:
    load_add_sub(card_host, model_library)
    load(card_host, "pipeline", "gpu_pipeline.py", "X", "Y", kind="CPU", callee="add_sub")

    for x in (A, A + 1):
        y = card_host.runtime.infer("pipeline", {"X": x}, timeout_s=120)["Y"]

        assert isinstance(y, np.ndarray)
        assert (y == 4 * x).all()
    outputs = infer(card_host, library.array(A), B)
    assert (library.values(library.take(outputs["OUTPUT0"])) == A + B).all()


def test_tensors_stay_on_the_gpu_from_model_to_model(card_host: Host, library: Library, model_library: str) -> None:
    load_add_sub(card_host, model_library)
    outputs = "OUTPUT0 OUTPUT1 SEEN"
    load(card_host, "asks", "gpu_bls.py", "INPUT0 INPUT1", outputs, callee="add_sub")

    found = infer(card_host, library.array(A), library.array(B), "asks")

    assert found["SEEN"].tolist() == [b"gpu gpu gpu gpu"]
    assert (library.values(library.take(found["OUTPUT0"])) == A + B).all()
    assert (library.values(library.take(found["OUTPUT1"])) == A - B).all()


def test_a_stub_has_one_context_which_its_library_shares(card_host: Host, library: Library, model_library: str) -> None:
    load(card_host, "contexts", f"gpu_context_{model_library}.py", "X", "IS_SHARED")

    said = card_host.runtime.infer("contexts", {"X": library.array(A)}, timeout_s=120)

    assert said["IS_SHARED"].tolist() == [1]
