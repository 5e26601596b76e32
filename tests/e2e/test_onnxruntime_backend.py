"""Tests of the `onnxruntime` backend, with real graphs in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.made import made_by, missing

import moonpool

pytestmark = [
    missing("onnx", "onnxruntime"),
    pytest.mark.promise(
        "Backends", "An ONNX graph is served without a configuration; one that contradicts the graph is refused."
    ),
]

SERVED = [
    "add_sub",
    "by_platform",
    "fixed",
    "history",
    "narrow",
    "nonzero",
    "ragged",
    "texts",
    "totals",
    "tuned",
    "whole",
]
A = np.arange(6, dtype=np.float32).reshape(2, 3)
BOTH = {"A": A, "B": np.ones((2, 3), np.float32)}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_by("make_onnx.py", tmp_path_factory.mktemp("onnx"))


@pytest.fixture(scope="module")
def runtime(repository: Path) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(repository, models=SERVED) as runtime:
        yield runtime


def tensors(runtime: moonpool.Runtime, model: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    config = runtime.config(model)
    return {t.name: (t.datatype, t.dims) for t in (*config.inputs, *config.outputs)}


def test_a_graph_needs_no_configuration(runtime: moonpool.Runtime) -> None:
    config = runtime.config("add_sub")
    assert (config.backend, config.default_model_filename) == ("onnxruntime", "model.onnx")
    # All tensors begin with a variable dimension: that is the batch.
    assert config.max_batch_size == 4
    assert config.dynamic_batching is not None
    assert tensors(runtime, "add_sub") == dict.fromkeys(["A", "B", "SUM", "DIFFERENCE"], ("FP32", (3,)))
    outputs = runtime.infer("add_sub", BOTH, timeout_s=60.0)
    assert outputs["SUM"].tolist() == (A + 1).tolist()
    assert outputs["DIFFERENCE"].tolist() == (A - 1).tolist()


def test_the_platform_names_the_backend_and_requests_are_joined(runtime: moonpool.Runtime) -> None:
    futures = [
        runtime.submit("by_platform", {"A": np.full((rows, 3), rows, np.float32), "B": np.ones((rows, 3), np.float32)})
        for rows in (1, 2, 3)
    ]
    for rows, future in zip((1, 2, 3), futures, strict=True):
        outputs = future.result(60.0).outputs
        assert outputs["SUM"].tolist() == np.full((rows, 3), rows + 1).tolist()
        assert outputs["DIFFERENCE"].tolist() == np.full((rows, 3), rows - 1).tolist()
    assert runtime.statistics("by_platform")["execution_count"] == 1
    assert runtime.config("by_platform").backend == "onnxruntime"


def test_the_configuration_overrides_the_graph(runtime: moonpool.Runtime) -> None:
    # This configuration gives a tensor all dimensions of the graph, so none is left for the batch.
    assert runtime.config("whole").max_batch_size == 0
    assert tensors(runtime, "whole")["SUM"] == ("FP32", (-1, 3))
    assert runtime.infer("whole", BOTH, timeout_s=60.0)["SUM"].tolist() == (A + 1).tolist()
    # This configuration names one of two outputs.
    assert list(runtime.infer("narrow", BOTH, timeout_s=60.0)) == ["SUM"]


def test_shapes_that_only_the_data_decides_and_scalars_are_answered(runtime: moonpool.Runtime) -> None:
    assert tensors(runtime, "nonzero") == {"X": ("FP32", (4,)), "Y": ("INT64", (1, -1)), "S": ("FP32", (1,))}
    for values in ([1, 0, 0, 2], [0, 0, 0, 0], [1, 2, 3, 4]):
        x = np.array(values, np.float32)
        outputs = runtime.infer("nonzero", {"X": x}, timeout_s=60.0)
        assert outputs["Y"].tolist() == np.array(x.nonzero()).tolist()
        assert outputs["S"].tolist() == [x.sum()]


def test_texts_go_in_and_out(runtime: moonpool.Runtime) -> None:
    texts = np.array(["", "ä", "long " * 100], object)
    outputs = runtime.infer("texts", {"X": texts}, timeout_s=60.0)
    assert [text.decode() for text in outputs["Y"]] == texts.tolist()


def test_a_graph_of_fixed_size_is_served_without_batches(runtime: moonpool.Runtime) -> None:
    assert runtime.config("fixed").max_batch_size == 0
    assert runtime.infer("fixed", {"X": np.array([1, -2])}, timeout_s=60.0)["Y"].tolist() == [-1, 2]


def test_options_of_onnx_runtime_are_taken_from_the_configuration(runtime: moonpool.Runtime) -> None:
    assert runtime.infer("tuned", BOTH, timeout_s=60.0)["SUM"].tolist() == (A + 1).tolist()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            "contradicted",
            "unable to load model 'contradicted', configuration expects datatype TYPE_INT32 for "
            "input 'A', model provides TYPE_FP32",
        ),
        ("misnamed", "unexpected inference input 'C', allowed inputs are: A, B"),
        (
            "fixed_batches",
            "autofill failed for model 'fixed_batches': model does not support batching while "
            "non-zero max_batch_size is specified",
        ),
        ("level", "optimization.graph.level must be -1, 0, 1 or 2, not 7"),
        (
            "ragged_rows",
            "unable to load model 'ragged_rows', configuration expects model provides input with shape "
            "[-1] for ragged input 'X', model provides [-1, 2]",
        ),
        ("undescribed", "unexpected batch input 'COUNT', allowed inputs are: X"),
    ],
)
def test_a_configuration_that_does_not_fit_the_graph_is_refused(
    runtime: moonpool.Runtime, model: str, text: str
) -> None:
    with pytest.raises(moonpool.LoadFailed) as caught:
        runtime.load(model)
    assert text in str(caught.value)


def test_a_file_that_is_no_graph_is_told(runtime: moonpool.Runtime, repository: Path) -> None:
    folder = repository / "broken" / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(moonpool.LoadFailed, match=r"model\.onnx"):
        runtime.load("broken")


@pytest.mark.promise("Sequences", "A model gets the states of …")
def test_a_graph_has_states_and_controls_of_its_sequences(runtime: moonpool.Runtime) -> None:
    config = runtime.config("totals")
    assert [t.name for t in (*config.inputs, *config.outputs)] == ["X", "Y"]

    def ask(x: float, which: int, flags: int = 0) -> float:
        inputs = {"X": np.array([[x]], np.float32)}
        outputs = runtime.infer("totals", inputs, timeout_s=60.0, correlation_id=which, flags=flags)
        assert list(outputs) == ["Y"]
        return float(outputs["Y"][0, 0])

    assert [ask(1, 7, 1), ask(2, 7), ask(5, 8, 1), ask(4, 7, 2)] == [101, 3, 105, 7]


@pytest.mark.promise("Backends", "Requests of different shapes are joined …")
def test_a_graph_gets_requests_of_different_shapes_as_one_tensor(runtime: moonpool.Runtime) -> None:
    given = [np.full((1, size, 2), size, np.float32) for size in (1, 3, 2, 5)]
    futures = [runtime.submit("ragged", {"X": array}) for array in given]

    counts, sums = [2, 6, 4, 10], [2, 8, 12, 22]
    shapes = [1, 2, 3, 2, 2, 2, 5, 2]
    for array, future in zip(given, futures, strict=True):
        outputs = future.result(60.0).outputs
        assert outputs["Y"].tolist() == (array * 2).tolist()
        assert outputs["SHOWN"].tolist() == [[*counts, *sums, 0, *sums, *shapes, *shapes, 10]]
    assert runtime.statistics("ragged")["execution_count"] == 1


@pytest.mark.promise("Sequences", "A model gets the states of …")
def test_a_graph_has_states_that_grow_each_in_its_sequence(runtime: moonpool.Runtime) -> None:
    def asked(which: int, values: list[float]) -> list[list[float]]:
        rows = []
        for place, x in enumerate(values):
            flags = (place == 0) | (place == len(values) - 1) << 1
            inputs = {"X": np.array([[x]], np.float32)}
            outputs = runtime.infer("history", inputs, timeout_s=60.0, correlation_id=which, flags=flags)
            assert outputs["SUM"].tolist() == outputs["NOW"].sum(1, keepdims=True).tolist()
            rows += outputs["NOW"].tolist()
        return rows

    # Sequences of different lengths are asked at the same time. Their states do not fit into one batch.
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(asked, (7, 8, 9), ([1, 2, 4], [5], [6, 0])))

    # The first value comes from the file.
    assert found == [[[10, 1], [10, 1, 2], [10, 1, 2, 4]], [[10, 5]], [[10, 6], [10, 6, 0]]]


@pytest.mark.promise(
    "Backends",
    "The backends that come with moonpool log nothing of their own when a model loads and serves, at each level of the "
    "sandbox.",
)
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_the_log_has_no_word_of_the_backend(
    repository: Path, level: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (repository, *repository.rglob("*")):
        path.chmod(0o755)  # a contained instance may be another user
    with moonpool.Runtime(repository, models=["add_sub"], sandbox=level) as runtime:
        assert runtime.infer("add_sub", BOTH, timeout_s=60.0)["SUM"].tolist() == (A + 1).tolist()

    assert [each.getMessage() for each in caplog.records if each.name == "moonpool.stub"] == []
    assert "[add_sub" not in capfd.readouterr().out
