"""A test sees the same of a model in its own process and of one in a stub."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_until

import moonpool
from moonpool import testing

pytestmark = [
    pytest.mark.promise("Testing models", "If a runtime would refuse …"),
    pytest.mark.promise("Testing models", "A test of a model need not change for the model to run in a stub."),
]

ROW = np.array([[1, 2]], np.float32)

# The model does what its input says.
MODEL = """
import asyncio
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
READY = True


def y(value, dtype=np.float32):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.full((1, 2), value, dtype))])


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(
            json.loads(args["model_config"])
        )

    def execute(self, requests):
        returned = [self.answer(request) for request in requests]
        return None if self.decoupled else returned

    def is_ready(self):
        if isinstance(READY, Exception):
            raise READY
        return READY

    def answer(self, request):
        wish = pb_utils.get_input_tensor_by_name(request, "WISH").as_numpy()[0][0].decode()
        sender = request.get_response_sender()
        if wish == "details":
            return pb_utils.InferenceResponse([], parameters={"said": str((
                request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
                request.parameters(), sorted(request.requested_output_names()),
                request.trace().get_context(),
            ))})
        if wish == "answer":
            return y(1)
        if wish == "error":
            error = pb_utils.TritonError("as you wish", pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse(error=error)
        if wish == "raise":
            raise ValueError("as you wish")
        if wish == "text":
            return "text"
        if wish == "other datatype":
            return y(1, np.float64)
        if wish == "parameters":
            return pb_utils.InferenceResponse([], parameters={"a": 1, "b": "c"})
        if wish == "three":
            for number in range(3):
                sender.send(y(number))
            sender.send(flags=FINAL)
        if wish == "thread":
            def later():
                sender.send(y(1))
                sender.send(flags=FINAL)
            threading.Thread(target=later).start()
        if wish == "closed":
            sender.send(y(1), FINAL)
            sender.send(y(1))
        if wish == "one":
            sender.send(y(1))
        if wish.endswith("until cancelled"):
            def on():
                while not sender.is_cancelled():
                    if not wish.startswith("nothing"):
                        sender.send(y(1))
                sender.send(flags=FINAL)
            threading.Thread(target=on).start()
        return None
"""
CONFIG: dict[str, Any] = {
    "input": [{"name": "WISH", "data_type": "TYPE_STRING", "dims": [1]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
    "max_batch_size": 4,
}
DECOUPLED = {**CONFIG, "model_transaction_policy": {"decoupled": True}}

Shown = list[tuple[str, ...]]


def shown(responses: list[testing.Response]) -> Shown:
    """Return all that a test can see of responses, without places in files."""
    return [
        (str({name: array.tolist() for name, array in r.outputs.items()}), str(r.parameters))
        if r.error is None
        else (r.error.message().split("\n\nAt:")[0], r.error.code().name)
        for r in responses
    ]


WISHES = [
    *("answer", "error", "raise", "text", "other datatype", "parameters"),
    *("three", "thread", "closed", "nothing", "one"),
]
KINDS = {"default": CONFIG, "decoupled": DECOUPLED}


def outcome(model: testing.LoadedModel, wish: str) -> object:
    try:
        return shown(model.responses(WISH=[[wish]]))
    except moonpool.MoonpoolError as error:
        return type(error), str(error)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], object]:
    """The outcomes, by the function that loads, the kind of model and the wish."""
    path = tmp_path_factory.mktemp("wishes") / "model.py"
    path.write_text(MODEL)
    loads: list[Callable[..., testing.LoadedModel]] = [testing.load, testing.load_in_stub]
    found = {}
    for load in loads:
        for kind, config in KINDS.items():
            with load(path, name="m", config=config) as model:
                for wish in WISHES:
                    found[load.__name__, kind, wish] = outcome(model, wish)
    return found


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_outcome_is_the_same(outcomes: dict[tuple[str, str, str], object], kind: str, wish: str) -> None:
    assert outcomes["load", kind, wish] == outcomes["load_in_stub", kind, wish]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(params=[testing.load, testing.load_in_stub], ids=["here", "stub"])
def load(request: pytest.FixtureRequest) -> Callable[..., testing.LoadedModel]:
    found: Callable[..., testing.LoadedModel] = request.param
    return found


@pytest.mark.parametrize("ready", ["True", "False", "1", "ValueError('no')"])
def test_readiness_is_the_same(file: Path, ready: str) -> None:
    file.write_text(MODEL.replace("READY = True", f"READY = {ready}"))
    said = []
    for load in (testing.load, testing.load_in_stub):
        with load(file, name="m", config=CONFIG) as model:
            said.append(model.why_not_ready())

    assert said[0] == said[1]
    assert (said[0] is None) == (ready == "True")


def test_requests_that_do_not_fit_are_refused(load: Callable[..., testing.LoadedModel], file: Path) -> None:
    with load(file, name="m", config=CONFIG) as model:
        for inputs in ({"WISH": ROW}, {"OTHER": [["a"]]}, {"WISH": [["a"]] * 5}, {"WISH": ["a"]}):
            with pytest.raises(moonpool.InvalidRequest):
                model.infer(inputs)
        with pytest.raises(moonpool.InvalidRequest):
            model.infer(testing.request({"WISH": [["a"]]}, outputs=["Z"]))


def test_a_request_that_may_not_wait_never_reaches_the_model(
    load: Callable[..., testing.LoadedModel], file: Path
) -> None:
    policy = {"allow_timeout_override": True, "default_timeout_microseconds": 3_600_000_000}
    config = {**CONFIG, "dynamic_batching": {"default_queue_policy": policy}}
    with load(file, name="m", config=config) as model:
        with pytest.raises(moonpool.QueueTimeout, match=r"^Request timeout expired$"):
            model.infer(testing.request({"WISH": [["raise"]]}, timeout_us=5))
        patient = testing.request({"WISH": [["answer"]]}, timeout_us=3_000_000_000)
        assert model.infer(patient)["Y"].tolist() == [[1, 1]]


def test_a_model_reads_the_same_of_a_request(file: Path) -> None:
    request = testing.request(
        {"WISH": [["details"]]},
        outputs=["Y"],
        request_id="r",
        correlation_id="c",
        flags=1,
        timeout_us=60_000_000,
        parameters={"a": 1, "b": "c", "d": True},
        trace_context='{"traceparent": "00-1-2-01"}',
    )
    said = []
    for load in (testing.load, testing.load_in_stub):
        with load(file, name="m", config=CONFIG) as model:
            said.append([model.infer(each).parameters for each in (request, {"WISH": [["details"]]})])

    assert said[0] == said[1]
    assert "traceparent" in str(said[0][0]["said"])


def test_batches_and_streams(load: Callable[..., testing.LoadedModel], file: Path) -> None:
    with load(file, name="m", config=DECOUPLED) as model:
        assert [len(each) for each in model.responses_batch([{"WISH": [["three"]]}] * 2)] == [3, 3]
        with pytest.raises(testing.NotOneResponse):
            model.infer(WISH=[["three"]])
        stream: Any = model.stream(WISH=[["three"]])
        assert next(stream)["Y"].tolist() == [[0, 0]]
        stream.close()
        for count in (0, 2):
            request = testing.request({"WISH": [["until cancelled"]]}, cancel_after=count)
            assert len(model.responses(request)) == count


def test_a_client_may_go_away_while_it_waits(load: Callable[..., testing.LoadedModel], file: Path) -> None:
    request = testing.request({"WISH": [["nothing until cancelled"]]})
    with load(file, name="m", config=DECOUPLED) as model:
        found: list[object] = []
        asking = threading.Thread(target=lambda: found.append(model.responses(request)))
        asking.start()
        wait_until(lambda: request.executions)
        request.cancel()
        asking.join(60)

        assert found == [[]]


def test_the_models_own_version_is_chosen(load: Callable[..., testing.LoadedModel], tmp_path: Path) -> None:
    for version in (1, 2):
        folder = tmp_path / "m" / str(version)
        folder.mkdir(parents=True)
        code = f"class M:\n    def __call__(self, WISH):\n        return [[{version}, 0]] * len(WISH)\n"
        (folder / "model.py").write_text(code)
    for wanted, found in ((None, 2), (1, 1)):
        with load(tmp_path / "m", config=CONFIG, version=wanted) as model:
            assert model.infer(WISH=[["a"]])["Y"].tolist() == [[found, 0]]


def test_a_function_cannot_stand_for_a_model_of_a_stub(file: Path) -> None:
    models: Any = {"other": lambda X: {"Y": X}}  # noqa: N803 - an input's name
    with pytest.raises(moonpool.LoadFailed, match="what is in the test's own process"):
        testing.load_in_stub(file, config=CONFIG, models=models)
