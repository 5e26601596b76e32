"""A model gets the same answers from its host in a test's process and in a stub."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool import testing

pytestmark = pytest.mark.promise(
    "Testing models", "A model gets the same responses and facts of other models in a test's process as in a stub."
)

EXAMPLES = Path(moonpool.__path__[0]) / "examples" / "models"

# The model evaluates its input, an expression, and answers with the result.
MODEL = """
import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils

ONES = np.ones((1, 4), np.float32)
COUNTER, GAUGE, HISTOGRAM = (
    pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.HISTOGRAM
)


def family(name, kind=COUNTER):
    return pb_utils.MetricFamily(name, "of tests", kind)


def counted(metric):
    metric.increment(2.5)
    metric.increment(1)
    return metric.value()


def to(model, *outputs, **inputs):
    details = inputs.pop("details", {})
    tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(outputs), inputs=tensors, **details
    )


def add(*outputs, **inputs):
    return to("add_sub", *outputs, **{"INPUT0": ONES, "INPUT1": ONES, **inputs})


def count(number=2):
    return to("count", FROM=np.array([number], np.int32))


def shown(response):
    if response.has_error():
        return [response.error().message().split("\\\\n\\\\nAt:")[0], response.error().code().name]
    return [{t.name(): t.as_numpy().tolist() for t in response.output_tensors()}, response.parameters()]


def all_of(responses):
    return [shown(response) for response in responses]


class TritonPythonModel:
    def initialize(self, args):
        try:
            add().exec()
        except pb_utils.TritonModelException as error:
            self.early = str(error)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        code = request.inputs()[0].as_numpy()[0].decode()
        try:
            said = eval(code, {**globals(), "early": self.early})
        except pb_utils.TritonModelException as error:
            said = ["raised", str(error)]
        text = np.array([repr(said)], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", text)])
"""
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            start = int(request.inputs()[0].as_numpy()[0])
            for number in range(start, 0, -1):
                output = pb_utils.Tensor("NUMBER", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([output], parameters={"n": number}))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNT_CONFIG = """
backend: "python"
input { name: "FROM" data_type: TYPE_INT32 dims: 1 }
output { name: "NUMBER" data_type: TYPE_INT32 dims: 1 }
model_transaction_policy { decoupled: true }
"""
CONFIG = {
    "input": [{"name": "CODE", "data_type": "TYPE_STRING", "dims": [1]}],
    "output": [{"name": "SAID", "data_type": "TYPE_STRING", "dims": [1]}],
}
SNIPPETS = [
    "shown(add().exec())",
    'shown(add("OUTPUT1").exec())',
    'shown(add("OUTPUT2").exec())',
    "shown(add(INPUT2=ONES).exec())",
    'shown(to("add_sub", INPUT0=ONES).exec())',
    "shown(add(INPUT0=np.ones((1, 3), np.float32)).exec())",
    "shown(add(INPUT0=np.ones((1, 4))).exec())",
    "shown(add(INPUT0=np.ones((65, 4), np.float32), INPUT1=np.ones((65, 4), np.float32)).exec())",
    'shown(to("nothing").exec())',
    'all_of(to("nothing").exec(decoupled=True))',
    'shown(to("crashes", WISH=np.array([[b"raise"]])).exec())',
    'shown(to("crashes", WISH=np.array([[b"hello"]])).exec())',
    'all_of(add("OUTPUT0").exec(decoupled=True))',
    "shown(count().exec())",
    "all_of(count().exec(decoupled=True))",
    "all_of(count(0).exec(decoupled=True))",
    "[len(all_of(it)) for it in [count().exec(decoupled=True)] for _ in range(2)]",
    "early",
    'pb_utils.is_model_ready("add_sub")',
    'pb_utils.is_model_ready("add_sub", "1")',
    'pb_utils.is_model_ready("add_sub", "2")',
    'pb_utils.is_model_ready("add_sub", "one")',
    'pb_utils.load_model("add_sub", files={"file:1/model.py": b""})',
    'pb_utils.load_model("add_sub", config="{")',
    'pb_utils.load_model("add_sub", config="{}", files={"1/model.py": b""})',
    'pb_utils.load_model("add_sub", files=[])',
    'pb_utils.unload_model("nothing")',
    '[counted(each.Metric(labels={"k": "v"})) for each in [family("a"), family("a")] for _ in "12"]',
    'family("b", GAUGE).Metric().set(1)',
    'family("c").Metric().increment(-1)',
    'family("")',
    '[family("d", kind) for kind in (COUNTER, GAUGE)]',
    'family("e").Metric(labels={"": "v"})',
    'family("f").Metric(labels={"k": 1})',
    'family("g", HISTOGRAM).Metric(buckets=[2, 1])',
    'family("h", HISTOGRAM).Metric(buckets=[1, 2]).value()',
    'pb_utils.is_model_ready("nothing")',
    'shown(add(details={"model_version": 1}).exec())',
    'shown(add(details={"model_version": 2}).exec())',
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """The result of every snippet, by the function that loads the model."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "asker.py").write_text(MODEL)
    (folder / "count" / "1").mkdir(parents=True)
    (folder / "count" / "1" / "model.py").write_text(COUNT)
    (folder / "count" / "config.pbtxt").write_text(COUNT_CONFIG)
    models = {name: EXAMPLES / name for name in ("add_sub", "crashes")}
    loads: list[Callable[..., testing.LoadedModel]] = [testing.load, testing.load_in_stub]
    found: dict[str, dict[str, object]] = {}
    for load in loads:
        with load(folder / "asker.py", config=CONFIG, models={**models, "count": folder / "count"}) as model:
            found[load.__name__] = {code: _said(model, code) for code in SNIPPETS}
    return found


def _said(model: testing.LoadedModel, code: str) -> object:
    said: Any = model.infer(CODE=np.array([code], object))["SAID"][0]
    return ast.literal_eval(said.decode())


@pytest.mark.parametrize("code", SNIPPETS)
def test_the_answer_is_the_same(said: dict[str, dict[str, object]], code: str) -> None:
    assert said["load"][code] == said["load_in_stub"][code]
