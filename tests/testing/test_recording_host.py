"""A model in the process of a test uses its host: other models, model control, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moonpool
import moonpool.stub.pb_utils as pb_utils
from moonpool import testing

pytestmark = [
    pytest.mark.promise("Readiness", "A model that asks a model …"),
    pytest.mark.promise(
        "Testing models",
        "Functions, models and directories stand for other models; model control and metrics can be read.",
    ),
]

EXAMPLES = Path(moonpool.__path__[0]) / "examples" / "models"
CONFIG = {
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [4]}],
    "max_batch_size": 8,
}
ROW = np.array([[1, 2, 3, 4]], np.float32)


def asker(
    ask: Callable[[pb_utils.InferenceRequest], object], models: Any = None, **options: Any
) -> testing.InProcessModel:
    """A model that calls `ask` in `execute`, and answers with what that returns."""

    class TritonPythonModel:
        def execute(self, requests: list[pb_utils.InferenceRequest]) -> object:
            return [self.answer(request) for request in requests]

        def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
            answer = ask(request)
            if isinstance(answer, pb_utils.InferenceResponse):
                return answer
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.asarray(answer))])

    return testing.load(TritonPythonModel, name="m", config=CONFIG, models=models, **options)


def to(model: str, *outputs: str, **inputs: Any) -> pb_utils.InferenceRequest:
    return pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=list(outputs),
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
    )


def doubled(_: object) -> object:
    response: Any = to("double", "Z", a=ROW).exec()
    if response.has_error():
        return pb_utils.InferenceResponse(error=response.error())
    return response.output_tensors()[0].as_numpy()


def test_a_function_stands_for_another_model() -> None:
    with asker(doubled, {"double": lambda a: {"Z": 2 * a, "REST": a}}) as model:
        assert model.infer(X=ROW)["Y"].tolist() == [[2, 4, 6, 8]]
        (request,) = model.host.requests
        assert [tensor.name() for tensor in request.inputs()] == ["a"]


def test_the_models_of_directories_may_ask_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "middle.py").write_text(MIDDLE)

    def ask(_: object) -> object:
        response: Any = to("middle", "Y", X=ROW).exec()
        pb_utils.Logger.log_warn("said behind")
        return response.output_tensors()[0].as_numpy()

    models = {"middle": tmp_path / "middle.py", "add_sub": EXAMPLES / "add_sub"}
    with asker(ask, models) as model:
        assert model.infer(X=ROW)["Y"].tolist() == [[2, 4, 6, 8]]
        assert len(model.host.requests) == 1
    said = [record.getMessage().partition(" (")[0] for record in caplog.records]
    assert [each for each in said if "said" in each] == ["[middle] said inside", "[m] said behind"]


MIDDLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [1, 4]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [1, 4]})
        return config

    def execute(self, requests):
        pb_utils.Logger.log_warn("said inside")
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, x):
        inputs = [pb_utils.Tensor(name, x) for name in ("INPUT0", "INPUT1")]
        response = pb_utils.InferenceRequest(
            model_name="add_sub", requested_output_names=["OUTPUT0"], inputs=inputs
        ).exec()
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("Y", response.output_tensors()[0].as_numpy())]
        )
"""


def test_a_loaded_model_stands_for_another_model() -> None:
    def ask(_: object) -> object:
        response: Any = to("add_sub", INPUT0=ROW, INPUT1=ROW).exec()
        return response.output_tensors()[1].as_numpy()

    with testing.load(EXAMPLES / "add_sub") as add_sub, asker(ask, {"add_sub": add_sub}) as model:
        assert model.infer(X=ROW)["Y"].tolist() == [[0, 0, 0, 0]]


def fails(a: Any) -> object:
    raise ValueError(f"not {a.shape}")


@pytest.mark.parametrize(
    ("models", "why", "code"),
    [
        (
            {"double": fails},
            "Failed to process the request(s) for model 'double_0', message: ValueError: not (1, 4)",
            "INTERNAL",
        ),
        (
            {
                "double": lambda a: pb_utils.InferenceResponse(
                    error=pb_utils.TritonError(f"{a.ndim}", pb_utils.TritonError.NOT_FOUND)
                )
            },
            "2",
            "NOT_FOUND",
        ),
    ],
)
def test_errors_of_other_models_are_in_the_response(models: Any, why: str, code: str) -> None:
    with asker(doubled, models) as model:
        (response,) = model.responses(X=ROW)

        assert response.error is not None
        assert response.error.message().startswith(why)
        assert response.error.code().name == code


def counts(a: Any) -> Iterator[dict[str, Any]]:
    for number in range(3):
        yield {"Z": a * number}


def test_a_generator_stands_for_a_decoupled_model() -> None:
    def ask(_: object) -> object:
        responses: Any = to("double", "Z", a=ROW).exec(decoupled=True)
        first = [tensor.as_numpy() for each in responses for tensor in each.output_tensors()]
        # Like most decoupled models, it sends the final flag after its last response.
        assert len(list(responses)) == 4
        return sum(first)

    with asker(ask, {"double": counts}) as model:
        assert model.infer(X=ROW)["Y"].tolist() == [[3, 6, 9, 12]]
    with asker(ask, {"double": lambda a: {"Z": a}}) as model:
        (response,) = model.responses(X=ROW)
        assert response.error is not None  # the model's assert failed, because there is one response only
    with asker(doubled, {"double": counts}) as model:
        (response,) = model.responses(X=ROW)
        assert response.error is not None
        assert "Please use 'decoupled=True'" in response.error.message()


def test_requests_to_other_models_may_be_awaited() -> None:
    async def double(a: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"Z": 2 * a}

    class TritonPythonModel:
        async def execute(self, requests: list[pb_utils.InferenceRequest]) -> object:
            calls: Any = [to("double", a=r.inputs()[0].as_numpy()).async_exec() for r in requests]
            answers = await asyncio.gather(*calls)
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer.output_tensors()[0].as_numpy())])
                for answer in answers
            ]

    for target in (double, lambda a: {"Z": 2 * a}):
        with testing.load(TritonPythonModel, config=CONFIG, models={"double": target}) as model:
            for response in model.infer_batch([{"X": ROW}] * 2):
                assert response["Y"].tolist() == [[2, 4, 6, 8]]


def test_models_are_loaded_and_unloaded() -> None:
    seen = []

    def ask(_: object) -> object:
        seen.append(pb_utils.is_model_ready("double"))
        pb_utils.unload_model("double")
        seen.append(pb_utils.is_model_ready("double"))
        pb_utils.load_model("double", config="{}", files={"file:1/model.py": b"code"})
        seen.append(pb_utils.is_model_ready("double"))
        with pytest.raises(pb_utils.TritonModelException, match=r"Failed to load model: .*'other' in the `models`"):
            pb_utils.load_model("other")
        seen.append(pb_utils.is_model_ready("other"))
        return ROW

    with asker(ask, {"double": lambda a: {"Z": a}}) as model:
        model.infer(X=ROW)

        assert seen == [True, False, True, False]
        assert model.host.unloads == ["double"]
        assert model.host.loads == [
            testing.Load("double", "{}", {"file:1/model.py": b"code"}),
            testing.Load("other", "", {}),
        ]


def test_metrics_can_be_read() -> None:
    class TritonPythonModel:
        def initialize(self, args: dict[str, str]) -> None:
            self.family = pb_utils.MetricFamily("rows", "so many", pb_utils.MetricFamily.COUNTER)
            self.metric = self.family.Metric(labels={"model": args["model_name"]})
            with pytest.raises(pb_utils.TritonModelException, match="message: Family name already"):
                pb_utils.MetricFamily("rows", "so many", pb_utils.MetricFamily.GAUGE)

        def execute(self, requests: list[pb_utils.InferenceRequest]) -> object:
            self.metric.increment(len(requests))
            assert self.metric.value() == model.host.metrics['rows{model="m"}']
            return [pb_utils.InferenceResponse([]) for _ in requests]

    with testing.load(TritonPythonModel, name="m", config=CONFIG) as model:
        model.infer_batch([{"X": ROW}] * 3)

        assert model.host.metrics['rows{model="m"}'] == 3
        assert "# TYPE rows counter" in model.host.metrics.text()
        with pytest.raises(KeyError, match="columns"):
            model.host.metrics["columns"]


@pytest.mark.promise("Metrics", "No metric of a model, and …")
@pytest.mark.parametrize(
    ("level", "name", "words"),
    [
        ("standard", "process_cpu_seconds_total", "Family name already exists"),
        ("strict", "process_of_mine", "would pass for one of the runtime's"),
    ],
)
def test_a_metric_has_no_name_of_the_runtimes_own(level: str, name: str, words: str) -> None:
    class TritonPythonModel:
        def initialize(self, _: dict[str, str]) -> None:
            pb_utils.MetricFamily(name, "mine", pb_utils.MetricFamily.COUNTER)

        def execute(self, _: list[pb_utils.InferenceRequest]) -> object:
            return []

    config = {**CONFIG, "parameters": {"MOONPOOL_SANDBOX": {"string_value": level}}}
    with pytest.raises(moonpool.LoadFailed, match=words):
        testing.load(TritonPythonModel, name="m", config=config)
