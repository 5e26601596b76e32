"""Tests that requests which take the quick way, and requests that differ in nothing that counts, get the same.

Most requests are alike: their arrays are copied into one block, they have no details, and the answer has nothing but
outputs, with bytes that the runtime has met before. The runtime does less for those. The same requests are sent to two
models here. To one they go as they are. To the other one they go with a parameter, and it answers with a parameter, so
nothing of that applies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.e2e.hosting import Config, hosted, same, tensor
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import MoonpoolError
from moonpool.runtime.stubs.link import Link

PATIENCE_S = 60.0
# Answers an error for each negative first value, and gives its input back in place where the second value asks for
# that. Every row of an input has both. `USUAL` says whether an answer has a parameter.
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X")
        values = x.as_numpy()
        if values[0, 0] < 0:
            error = pb_utils.TritonError(f"refused: {values[0, 0]}", pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse([], error)
        y = values if values[0, 1] else values * 2
        names = np.array([[str(row[0]).encode()] for row in values], object)
        outputs = [pb_utils.Tensor("Y", y), pb_utils.Tensor("SUM", values.sum(1, keepdims=True))]
        if values[0, 1] > 1:
            outputs.append(pb_utils.Tensor("NAMES", names))
        if USUAL:
            return pb_utils.InferenceResponse(outputs)
        return pb_utils.InferenceResponse(outputs, parameters={"p": 1})
"""
CONFIG: Config = {
    "max_batch_size": 4,
    "input": [tensor("X", "FP32", -1)],
    "output": [tensor("Y", "FP32", -1), tensor("SUM", "FP32", 1), tensor("NAMES", "STRING", 1)],
}


class Asked(NamedTuple):
    """One request."""

    rows: int
    columns: int
    # The first two values, which tell the model what to do.
    value: int
    kind: int
    way: str
    form: str
    # The number of later requests for which its outputs are kept.
    kept: int


asked = st.builds(
    Asked,
    st.integers(1, 5),
    st.integers(2, 40),
    st.integers(-1, 3),
    st.integers(0, 2),
    st.sampled_from(["infer", "timeout", "submit", "stream", "ainfer", "tasks"]),
    st.sampled_from(["plain", "view", "strided", "in place", "double", "list", "missing"]),
    st.integers(0, 3),
)


@pytest.fixture(scope="module")
def models(runtime: moonpool.Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[moonpool.Runtime]:
    folder = tmp_path_factory.mktemp("models")
    files = {}
    for name, is_usual in (("usual", True), ("unusual", False)):
        files[name] = folder / f"{name}.py"
        files[name].write_text(f"USUAL = {is_usual}\n{MODEL}")
    with hosted(runtime, "usual", files["usual"], CONFIG), hosted(runtime, "unusual", files["unusual"], CONFIG):
        # The memory for arrays in place is there for as long as the models.
        for name in files:
            array = runtime.empty(name, "X", (1, 2))
            array[...] = 0
            runtime.infer(name, {"X": array})
        yield runtime


def array_of(runtime: moonpool.Runtime, model: str, each: Asked) -> Any:
    """Make the input of a request in its form."""
    values: NDArray[Any] = np.arange(each.rows * each.columns, dtype=np.float32)
    values = values.reshape(each.rows, each.columns)
    values[:, 0], values[:, 1] = each.value, each.kind
    if each.form == "view":
        return np.concatenate([values, values])[each.rows :]
    if each.form == "strided":
        return np.asfortranarray(values)
    if each.form == "in place":
        array = runtime.empty(model, "X", values.shape)
        array[...] = values
        return array
    if each.form == "double":
        return values.astype(np.float64)
    return values.tolist() if each.form == "list" else values


async def asked_by_tasks(ask: Callable[[], Any]) -> Any:
    """Ask three times at once, and return the last outcome."""
    outcomes = await asyncio.gather(ask(), ask(), ask(), return_exceptions=True)
    if isinstance(outcomes[-1], BaseException):
        raise outcomes[-1]
    return outcomes[-1]


def outcome_of(runtime: moonpool.Runtime, model: str, each: Asked, **options: Any) -> dict[str, NDArray[Any]] | str:
    """Send a request, and return its outputs, or the text of its error."""
    try:
        inputs = {} if each.form == "missing" else {"X": array_of(runtime, model, each)}
        if each.way == "infer":
            return runtime.infer(model, inputs, **options)
        if each.way == "timeout":
            return runtime.infer(model, inputs, timeout_s=PATIENCE_S, **options)
        if each.way == "submit":  # takes no options
            return runtime.submit(model, inputs).result(PATIENCE_S).outputs
        if each.way == "stream":
            (response,) = runtime.stream(model, inputs, **options)
            return response.outputs
        if each.way == "ainfer":
            return asyncio.run(runtime.ainfer(model, inputs, **options))
        return asyncio.run(asked_by_tasks(lambda: runtime.ainfer(model, inputs, **options)))  # type: ignore[no-any-return]
    except MoonpoolError as error:
        return f"{type(error).__name__}: {error}".replace("unusual", "usual")


def link_of(runtime: moonpool.Runtime, model: str) -> Link:
    (record,) = hosted_in(runtime, model).supervisor.records
    link: Link = record.instance.state.link
    return link


def has_nothing_lent(link: Link) -> bool:
    return not link.borrowed_blocks.used_bytes and not link.borrowed_blocks.count


REQUESTS = ("nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count")


def counts(runtime: moonpool.Runtime, model: str) -> Any:
    """Return the counts of requests in the statistics and metrics of a model. How many a batch has is a matter of
    chance.
    """

    def without_times(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_times(each) for key, each in value.items() if key != "ns"}
        return [without_times(each) for each in value] if isinstance(value, list) else value

    statistics = runtime.statistics(model)
    metrics = [
        line.replace("unusual", "usual")
        for line in runtime.metrics().splitlines()
        if line.startswith(REQUESTS) and f'model="{model}"' in line
    ]
    figures = [without_times(statistics[each]) for each in ("inference_count", "inference_stats")]
    return figures, metrics


@settings(max_examples=25)
@given(st.lists(asked, min_size=1, max_size=12))
def test_the_quick_way_and_the_long_way_give_the_same(models: moonpool.Runtime, requests: list[Asked]) -> None:
    kept: list[tuple[int, Any, Any]] = []
    for number, each in enumerate(requests):
        usual = outcome_of(models, "usual", each)
        unusual = outcome_of(models, "unusual", each, parameters={"a": 1})
        if isinstance(usual, str) or isinstance(unusual, str):
            assert usual == unusual
        else:
            assert list(usual) == list(unusual)
            kept.append((number + each.kept, usual, unusual))
        # Nothing that came later was written over the outputs that are still here.
        assert all(same(one[name], other[name]) for _, one, other in kept for name in one)
        kept = [pair for pair in kept if pair[0] > number]
        usual = unusual = ""
    del kept
    assert counts(models, "usual") == counts(models, "unusual")
    for model in ("usual", "unusual"):
        # A model that gave its input back may have it until it gets another one.
        models.infer(model, {"X": np.zeros((1, 2), np.float32)})
        wait_until(partial(has_nothing_lent, link_of(models, model)), PATIENCE_S)
