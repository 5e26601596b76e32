"""Tests of the `pytorch` backend, with real TorchScript files and exported programs in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.e2e.made import made_by, missing
from tests.inside import registry_of

import moonpool
from moonpool.runtime.repository.loading import HostingRules

pytestmark = [
    missing("torch"),
    pytest.mark.promise(
        "Backends",
        "TorchScript and exported programs are served, tensors found by index, name or order, and inputs not copied.",
    ),
]

A, B = np.arange(3, dtype=np.float32), np.full(3, 10, np.float32)
THREES = np.ones((3, 3), np.float32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_by("make_torch.py", tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="module")
def runtime(repository: Path) -> Iterator[moonpool.Runtime]:
    # One after the other, and without completing: each process needs a processor for some seconds to import PyTorch.
    with moonpool.Runtime(repository, models=[]) as runtime:
        registry_of(runtime).rules = HostingRules(completes=False)
        yield runtime


@pytest.fixture
def loaded(runtime: moonpool.Runtime, request: pytest.FixtureRequest) -> Iterator[str]:
    runtime.load(request.param)
    yield request.param
    runtime.unload(request.param)


def infer(runtime: moonpool.Runtime, model: str, **inputs: object) -> dict[str, list[object]]:
    outputs = runtime.infer(model, inputs, timeout_s=60.0)
    return {name: array.tolist() for name, array in outputs.items()}


@pytest.mark.parametrize("loaded", ["indexed"], indirect=True)
def test_tensors_are_found_by_index_and_requests_are_joined(runtime: moonpool.Runtime, loaded: str) -> None:
    futures = [
        runtime.submit(loaded, {"INPUT__1": np.ones((n, 3), np.float32), "INPUT__0": np.full_like(THREES[:n], n)})
        for n in (1, 2, 3)
    ]
    for n, future in zip((1, 2, 3), futures, strict=True):
        outputs = future.result(60.0).outputs
        assert outputs["OUTPUT__0"].tolist() == np.full((n, 3), n + 1).tolist()
        assert outputs["OUTPUT__1"].tolist() == np.full((n, 3), n - 1).tolist()
    assert runtime.statistics(loaded)["execution_count"] == 1
    response = runtime.request(
        loaded, {"INPUT__0": A[None], "INPUT__1": B[None]}, outputs=["OUTPUT__1"], timeout_s=60.0
    )
    assert list(response.outputs) == ["OUTPUT__1"]


@pytest.mark.parametrize("loaded", ["by_argument"], indirect=True)
def test_inputs_are_found_by_the_names_of_the_arguments_and_outputs_in_order(
    runtime: moonpool.Runtime, loaded: str
) -> None:
    assert infer(runtime, loaded, b=B, a=A) == {"SUM": (A + B).tolist(), "DIFFERENCE": (A - B).tolist()}


@pytest.mark.parametrize("loaded", ["dicts"], indirect=True)
def test_a_dict_of_tensors_goes_in_and_out_by_name(runtime: moonpool.Runtime, loaded: str) -> None:
    assert infer(runtime, loaded, A=A[None], B=B[None]) == {"PRODUCT": [(A * B).tolist()], "SUM": [(A + B).tolist()]}


@pytest.mark.parametrize("loaded", ["in_place"], indirect=True)
def test_an_input_is_the_caller_s_own_memory(runtime: moonpool.Runtime, loaded: str) -> None:
    x = runtime.empty(loaded, "x", 3)
    x[...] = A
    y = runtime.infer(loaded, {"x": x}, timeout_s=60.0)["y"]
    assert y.tolist() == (A * 2).tolist()
    # The model multiplies in place, so nothing was copied.
    assert x.tolist() == (A * 2).tolist()


@pytest.mark.parametrize("loaded", ["half"], indirect=True)
def test_bf16_is_served(runtime: moonpool.Runtime, loaded: str) -> None:
    x = A.astype(ml_dtypes.bfloat16)
    y = runtime.infer(loaded, {"x": x}, timeout_s=60.0)["y"]
    assert y.dtype == x.dtype
    assert y.astype(np.float32).tolist() == (A * 2).tolist()


@pytest.mark.parametrize("loaded", ["linear"], indirect=True)
def test_the_platform_names_the_backend(runtime: moonpool.Runtime, loaded: str) -> None:
    assert runtime.config(loaded).backend == "pytorch"
    assert infer(runtime, loaded, x=THREES) == {"y": [[7.0, 7.0]] * 3}


@pytest.mark.parametrize("loaded", ["mode"], indirect=True)
def test_the_inference_mode_is_a_parameter(runtime: moonpool.Runtime, loaded: str) -> None:
    assert infer(runtime, loaded, x=A) == {"y": [1.0] * 3}
    runtime.load(loaded, config={"parameters": {"INFERENCE_MODE": {"string_value": "false"}}})
    assert infer(runtime, loaded, x=A) == {"y": [0.0] * 3}


@pytest.mark.parametrize("loaded", ["exported"], indirect=True)
def test_an_exported_program_is_served_in_batches(runtime: moonpool.Runtime, loaded: str) -> None:
    for rows in (1, 3):
        assert infer(runtime, loaded, x=THREES[:rows]) == {"y": [[7.0, 7.0]] * rows}


@pytest.mark.parametrize("loaded", ["exported_two"], indirect=True)
def test_an_exported_program_is_known_by_its_file_and_takes_its_arguments_by_name(
    runtime: moonpool.Runtime, loaded: str
) -> None:
    assert runtime.config(loaded).backend == "pytorch"
    assert infer(runtime, loaded, a=A, b=B) == {"OUTPUT__0": (A + B).tolist(), "OUTPUT__1": (A - B).tolist()}


@pytest.mark.parametrize("loaded", ["exported_dicts"], indirect=True)
def test_an_exported_program_may_take_a_dict(runtime: moonpool.Runtime, loaded: str) -> None:
    assert infer(runtime, loaded, A=A, B=B) == {"SUM": (A + B).tolist()}


@pytest.mark.parametrize("loaded", ["misbehaves"], indirect=True)
def test_a_failed_batch_has_its_error_and_the_next_is_answered(runtime: moonpool.Runtime, loaded: str) -> None:
    before = runtime.instances(loaded)
    for what, text in (
        (1, "AssertionError: one is too many"),
        (2, "the model has 0 outputs and none for 'y'"),
        (3, "configuration expects datatype TYPE_FP32 for output 'y', model provides TYPE_INT64"),
        (4, "output 'y' has shape [1] for a batch of 2"),
    ):
        with pytest.raises(moonpool.ModelError) as caught:
            runtime.infer(loaded, {"x": np.full((2, 3), what, np.float32)}, timeout_s=60.0)
        assert text in str(caught.value)
        assert infer(runtime, loaded, x=THREES * 5) == {"y": (THREES * 5).tolist()}
    assert runtime.instances(loaded) == before


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("texts", "model 'texts', tensor 'x': PyTorch has no datatype TYPE_STRING"),
        ("too_many", "its forward takes (a, b); name them so, or <name>__<index>"),
    ],
)
def test_a_configuration_that_does_not_fit_the_module_is_refused(
    runtime: moonpool.Runtime, model: str, text: str
) -> None:
    with pytest.raises(moonpool.LoadFailed) as caught:
        runtime.load(model)
    assert text in str(caught.value)


@pytest.mark.promise("Sequences", "A model gets the states of …")
@pytest.mark.parametrize("loaded", ["totals"], indirect=True)
@pytest.mark.usefixtures("loaded")
def test_a_module_has_states_and_controls_of_its_sequences(runtime: moonpool.Runtime) -> None:
    def ask(x: float, which: int, flags: int = 0) -> float:
        inputs = {"x": np.array([[x]], np.float32)}
        outputs = runtime.infer("totals", inputs, timeout_s=60.0, correlation_id=which, flags=flags)
        assert list(outputs) == ["y"]
        return float(outputs["y"][0, 0])

    assert [ask(1, 7, 1), ask(2, 7), ask(5, 8, 1), ask(4, 7, 2)] == [101, 3, 105, 7]


@pytest.mark.promise(
    "Backends",
    "Requests of different shapes are joined into one flat tensor, with the inputs that describe the batch, and flat "
    "outputs are cut as they were.",
)
@pytest.mark.parametrize("loaded", ["ragged"], indirect=True)
def test_a_module_gets_requests_of_different_shapes_as_one_tensor(runtime: moonpool.Runtime, loaded: str) -> None:
    given = [np.full((1, size), size, np.float32) for size in (4, 1, 3)]
    futures = [runtime.submit(loaded, {"x": array}) for array in given]

    for array, future in zip(given, futures, strict=True):
        outputs = future.result(60.0).outputs
        assert outputs["y"].tolist() == (array * 2).tolist()
        assert outputs["sum"].tolist() == [[array.sum()]]
    assert runtime.statistics(loaded)["execution_count"] == 1


@pytest.mark.promise("Sequences", "A model gets the states of …")
@pytest.mark.parametrize("loaded", ["history"], indirect=True)
def test_a_module_has_states_that_grow_each_in_its_sequence(runtime: moonpool.Runtime, loaded: str) -> None:
    def asked(which: int, values: list[float]) -> list[tuple[list[float], float]]:
        found = []
        for place, x in enumerate(values):
            flags = (place == 0) | (place == len(values) - 1) << 1
            inputs = {"x": np.array([[x]], np.float32)}
            outputs = runtime.infer(loaded, inputs, timeout_s=60.0, correlation_id=which, flags=flags)
            assert outputs["sum"].tolist() == outputs["now"].sum(1, keepdims=True).tolist()
            found.append((outputs["now"].tolist()[0], float(outputs["more"][0, 0])))
        return found

    # Sequences of different lengths are asked at the same time. Their states do not fit into one batch.
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(asked, (7, 8, 9), ([1, 2, 4], [5], [6, 1])))

    assert found == [[([0, 1], 1), ([0, 1, 2], 3), ([0, 1, 2, 4], 7)], [([0, 5], 5)], [([0, 6], 6), ([0, 6, 1], 7)]]


@pytest.mark.promise("Backends", "The backends that come with moonpool …")
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_the_log_has_no_word_of_the_backend(
    repository: Path, level: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (repository, *repository.rglob("*")):
        path.chmod(0o755)  # a contained instance may be another user
    with moonpool.Runtime(repository, models=["indexed"], sandbox=level) as runtime:
        outputs = infer(runtime, "indexed", INPUT__0=THREES, INPUT__1=THREES)
        assert outputs["OUTPUT__0"] == (THREES + THREES).tolist()

    assert [each.getMessage() for each in caplog.records if each.name == "moonpool.stub"] == []
    assert "[indexed" not in capfd.readouterr().out
