"""Models in the process of a test: what they get, what the test gets back."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_until

import moonpool
import moonpool.stub.pb_utils as pb_utils
from moonpool import testing

pytestmark = pytest.mark.promise(
    "Testing models",
    "If a runtime would refuse a request, return value, output or send, the test's process "
    "refuses it in the same words.",
)

EXAMPLES = Path(moonpool.__path__[0]) / "examples" / "models"
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
X = {"name": "X", "data_type": "TYPE_FP32", "dims": [2]}
Y = {"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}
CONFIG = {"input": [X], "output": [Y], "max_batch_size": 8}
DECOUPLED = {**CONFIG, "model_transaction_policy": {"decoupled": True}}
ROW = np.array([[1, 2]], np.float32)


def y(array: Any = ROW) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.asarray(array))])


def load(execute: Callable[..., object], config: dict[str, Any] = CONFIG, **options: Any) -> testing.InProcessModel:
    """A model that is nothing but its `execute`, which gets the requests."""

    class TritonPythonModel:
        def execute(self, requests: list[pb_utils.InferenceRequest]) -> object:
            return execute(requests)

    return testing.load(TritonPythonModel, name="m", config=config, **options)


def test_a_model_of_a_directory_answers() -> None:
    with testing.load(EXAMPLES / "add_sub") as model:
        response = model.infer(INPUT0=[[1, 2, 3, 4]], INPUT1=[[4, 3, 2, 1]])

        assert response["OUTPUT0"].tolist() == [[5, 5, 5, 5]]
        assert response["OUTPUT1"].tolist() == [[-3, -1, 1, 3]]
        assert response["OUTPUT0"].dtype == np.float32
        with pytest.raises(KeyError, match="no output 'OUTPUT2'; it has"):
            response["OUTPUT2"]


@pytest.mark.promise("Testing models", "A model in the test's process …")
def test_the_imports_of_the_process_are_as_before() -> None:
    path, modules = list(sys.path), dict(sys.modules)
    with testing.load(EXAMPLES / "add_sub"):
        assert "1.model" in sys.modules
    with testing.load(EXAMPLES / "primes"):
        assert sys.modules["model"].Primes

    assert sys.path == path
    assert {n for n in set(sys.modules) ^ set(modules) if not n.startswith("moonpool")} == set()


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.promise("Testing models", "A model in the test's process …")
def test_neighbours_are_each_models_own(tmp_path: Path) -> None:
    code = (
        "import helper\nfrom . import other\nimport triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        import late\n"
        "        text = f'{helper.NAME} {other.NAME} {late.NAME} {pb_utils.get_model_dir()}'\n"
        "        return [pb_utils.InferenceResponse(error=pb_utils.TritonError(text))\n"
        "                for _ in requests]\n"
    )
    for name in ("a", "b"):
        said = f"NAME = {name!r}\n"
        files = {"model.py": code, "helper.py": said, "other.py": said, "late.py": said}
        write(tmp_path / name / "1", files)
    with testing.load(tmp_path / "a", config=CONFIG) as a, testing.load(tmp_path / "b", config=CONFIG) as b:
        for _ in range(2):
            for name, model in {"a": a, "b": b}.items():
                (response,) = model.responses(X=ROW)
                assert response.error is not None
                assert response.error.message() == f"{name} {name} {name} {tmp_path / name / '1'}"


def test_a_model_is_imported_anew_each_time(tmp_path: Path) -> None:
    for limit in (3, 5):
        write(tmp_path, {"scale.py": "class Scale:\n    def __call__(self, X):\n        return X\n"})
        config = {**CONFIG, "max_batch_size": limit}
        with testing.load(tmp_path / "scale.py", config=config) as model:
            assert model.config.max_batch_size == limit
            first = model.instance
        with testing.load(tmp_path / "scale.py", config=config) as model:
            assert type(model.instance) is not type(first)


@pytest.mark.promise(
    "Testing models",
    "A model in the test's process gets the configuration, arguments, imports and requests that "
    "a stub would give it, and leaves the process's imports as they were.",
)
def test_initialize_gets_what_a_stub_would_give_it() -> None:
    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
            config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [2]})
            config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [2]})
            config.set_max_batch_size(4)
            return config

        def initialize(self, args: dict[str, str]) -> None:
            self.args = args

        def finalize(self) -> None:
            self.args = {}

    with testing.load(TritonPythonModel, name="m") as model:
        args = model.instance.args
        assert args == model.args
        assert sorted(args) == [
            "model_config",
            "model_instance_device_id",
            "model_instance_kind",
            "model_instance_name",
            "model_name",
            "model_repository",
            "model_version",
        ]
        assert all(type(value) is str for value in args.values())
        config = json.loads(args["model_config"])
        assert (config["name"], config["max_batch_size"]) == ("m", 4)
        assert (args["model_name"], args["model_version"]) == ("m", "1")
        assert model.config.max_batch_size == 4
        found = model.instance
    assert found.args == {}


def test_clients_do_not_see_what_a_model_writes_into_its_inputs() -> None:
    def execute(requests: list[pb_utils.InferenceRequest]) -> object:
        requests[0].inputs()[0].as_numpy()[:] = 9
        return [y()]

    with load(execute) as model:
        array = ROW.copy()
        model.infer(X=array)
    assert array.tolist() == ROW.tolist()


def test_every_datatype_goes_in_and_out() -> None:
    arrays: dict[str, Any] = {
        "TYPE_BOOL": np.array([True, False]),
        "TYPE_INT8": np.array([-1, 2], np.int8),
        "TYPE_UINT64": np.array([1, 2**64 - 1], np.uint64),
        "TYPE_FP16": np.array([0.5, 2], np.float16),
        "TYPE_FP64": np.array([0.1, 2]),
        "TYPE_STRING": np.array([b"a", b"\xff"], np.object_),
    }

    def execute(requests: list[pb_utils.InferenceRequest]) -> object:
        (request,) = requests
        outputs = [pb_utils.Tensor(t.name() + "_OUT", t.as_numpy()) for t in request.inputs()]
        return [pb_utils.InferenceResponse(outputs)]

    config = {
        "input": [{"name": n, "data_type": n, "dims": [2]} for n in arrays],
        "output": [{"name": f"{n}_OUT", "data_type": n, "dims": [2]} for n in arrays],
    }
    with load(execute, config) as model:
        response = model.infer(arrays)

    for name, array in arrays.items():
        assert response[f"{name}_OUT"].tolist() == array.tolist()
        assert response[f"{name}_OUT"].dtype == array.dtype


def test_a_batch_is_one_call_of_execute() -> None:
    sizes = []

    def execute(requests: list[pb_utils.InferenceRequest]) -> object:
        sizes.append(len(requests))
        error = pb_utils.TritonError("no", pb_utils.TritonError.UNAVAILABLE)
        return [y(), pb_utils.InferenceResponse(error=error), y()]

    with load(execute) as model:
        good, bad, _ = model.infer_batch([{"X": ROW}] * 3)

        assert sizes == [3]
        assert good["Y"].tolist() == ROW.tolist()
        assert bad.error is not None
        assert (bad.error.message(), bad.error.code()) == ("no", pb_utils.TritonError.UNAVAILABLE)
        with pytest.raises(moonpool.ModelError, match=r"^no$") as raised:
            bad["Y"]
        assert raised.value.code == "UNAVAILABLE"
        with pytest.raises(moonpool.InvalidRequest, match="9 rows"):
            model.infer_batch([{"X": ROW}] * 9)


def test_an_output_that_no_client_would_get_fails_the_test() -> None:
    outputs = [pb_utils.Tensor("Y", ROW), pb_utils.Tensor("Z", ROW)]
    response = pb_utils.InferenceResponse(outputs)
    with (
        load(lambda _: [response]) as model,
        pytest.raises(testing.BadOutput, match=r"output 'Z', and the configuration has \['Y'\]"),
    ):
        model.infer(X=ROW)
    with load(lambda _: [response], checks_outputs=False) as model:
        assert list(model.infer(X=ROW).outputs) == ["Y"]


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (ROW.astype(np.float64), "is FP64, and the configuration says FP32"),
        (np.ones((1, 3), np.float32), r"\[1, 3\], and the configuration says \[1, 2\]"),
        (np.ones((2, 2), np.float32), r"\[2, 2\], and the configuration says \[1, 2\]"),
    ],
)
def test_an_output_that_clients_do_not_expect_fails_the_test(array: Any, why: str) -> None:
    with load(lambda _: [y(array)]) as model, pytest.raises(testing.BadOutput, match=why):
        model.infer(X=ROW)
    with load(lambda _: [y(array)], checks_outputs=False) as model:
        assert model.infer(X=ROW)["Y"].shape == array.shape


def test_only_the_wanted_outputs_come_back() -> None:
    both = {**CONFIG, "output": [Y, {**Y, "name": "Z"}]}
    tensors = [pb_utils.Tensor("Y", ROW), pb_utils.Tensor("Z", ROW)]
    with load(lambda _: [pb_utils.InferenceResponse(tensors)], both) as model:
        assert list(model.infer(X=ROW).outputs) == ["Y", "Z"]
        assert list(model.infer(testing.request({"X": ROW}, outputs=["Z"])).outputs) == ["Z"]


def test_an_exception_of_the_model_is_the_cause_of_the_error() -> None:
    def execute(_: object) -> object:
        raise ZeroDivisionError("by hand")

    with load(execute) as model:
        with pytest.raises(moonpool.ModelError) as raised:
            model.infer(X=ROW)

        assert str(raised.value).startswith(
            "Failed to process the request(s) for model 'm_0', message: ZeroDivisionError: by hand"
        )
        # Only the model's own files are named.
        assert "testing/in_process.py" not in str(raised.value)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        (response,) = model.responses(X=ROW)
        assert response.error is not None


def test_a_model_may_not_end_the_program() -> None:
    with load(lambda _: sys.exit(3)) as model, pytest.raises(moonpool.ModelError, match="SystemExit: 3"):
        model.infer(X=ROW)


def test_an_interrupt_is_not_the_models() -> None:
    def execute(_: object) -> object:
        raise KeyboardInterrupt

    with load(execute) as model, pytest.raises(KeyboardInterrupt):
        model.infer(X=ROW)


@pytest.mark.parametrize("stage", ["import", "auto_complete_config", "initialize"])
def test_a_load_that_fails_says_where_and_leaves_nothing(stage: str, tmp_path: Path) -> None:
    lines = {
        "import": "raise ValueError('no')",
        "auto_complete_config": "class TritonPythonModel:\n"
        "    def auto_complete_config(config): raise ValueError('no')",
        "initialize": "class TritonPythonModel:\n    def initialize(self, args): raise ValueError('no')",
    }
    path = list(sys.path)
    write(tmp_path / "m" / "1", {"model.py": f"# TritonPythonModel\n{lines[stage]}\n"})
    with pytest.raises(moonpool.LoadFailed, match=r"^ValueError: no") as raised:
        testing.load(tmp_path / "m", config=CONFIG)

    assert raised.value.stage == stage
    assert isinstance(raised.value.__cause__, ValueError)
    assert sys.path == path
    assert "1" not in sys.modules


def test_a_package_of_an_environment_that_is_not_used_here_is_told_of(tmp_path: Path) -> None:
    write(tmp_path, {"m/1/model.py": "import not_installed_here\nTritonPythonModel = 1\n"})
    parameters = {"EXECUTION_ENV_PATH": {"string_value": "/envs/its_own"}}
    with pytest.raises(moonpool.LoadFailed, match=r"(?s)not_installed_here.*/envs/its_own.*stub"):
        testing.load(tmp_path / "m", config={**CONFIG, "parameters": parameters})


def test_messages_of_the_model_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def execute(_: object) -> object:
        pb_utils.Logger.log_warn("careful")
        logging.getLogger("theirs").error("plain")
        return [y()]

    with load(execute) as model:
        model.infer(X=ROW)

    said = [(r.name, r.levelname, r.getMessage()) for r in caplog.records]
    assert ("theirs", "ERROR", "plain") in said
    (line,) = [text for name, level, text in said if (name, level) == ("moonpool.stub", "WARNING")]
    assert line.startswith("[m] careful (test_in_process.py:")


# Response senders


@pytest.mark.promise(
    "Testing models",
    "All responses come in order, whenever they are sent. A request that can get no more "
    "responses, or gets none in time, ends with a reason.",
)
def test_a_model_that_never_ends_a_request_is_told_of() -> None:
    kept = []

    def execute(requests: list[pb_utils.InferenceRequest]) -> None:
        kept.append(requests[0].get_response_sender())
        kept[0].send(y())

    with (
        load(execute, DECOUPLED, timeout_s=0.5) as model,
        pytest.raises(moonpool.RequestTimedOut, match="sent 1 responses to a request, and no last"),
    ):
        model.responses(X=ROW)
    kept[0].send(flags=FINAL)


def test_a_decoupled_model_may_return_nothing_but_none() -> None:
    with load(lambda _: [y()], DECOUPLED) as model:
        (response,) = model.responses(X=ROW)

        assert response.error is not None
        assert "must return None" in response.error.message()


# Cancellation


def test_a_stream_is_read_as_it_comes_and_closing_it_cancels() -> None:
    go_on = threading.Event()
    cancelled = threading.Event()

    def execute(requests: list[pb_utils.InferenceRequest]) -> None:
        sender = requests[0].get_response_sender()

        def later() -> None:
            sender.send(y())
            go_on.wait(60)
            sender.send(y(ROW * 2))
            wait_until(sender.is_cancelled)
            cancelled.set()
            sender.send(flags=FINAL)

        threading.Thread(target=later, daemon=True).start()

    with load(execute, DECOUPLED) as model:
        stream: Any = model.stream(X=ROW)
        assert next(stream)["Y"].tolist() == [[1, 2]]
        go_on.set()
        assert next(stream)["Y"].tolist() == [[2, 4]]
        stream.close()
        assert cancelled.wait(60)


def test_a_request_may_be_cancelled_while_it_executes() -> None:
    request = testing.request({"X": ROW})

    def execute(requests: list[pb_utils.InferenceRequest]) -> object:
        assert not requests[0].is_cancelled()
        request.cancel()
        assert requests[0].is_cancelled()
        return [y()]

    with load(execute) as model:
        model.infer(request)


# Coroutines


def test_execute_may_be_a_coroutine() -> None:
    async def execute(requests: list[pb_utils.InferenceRequest]) -> object:
        await asyncio.sleep(0)
        return [y() for _ in requests]

    with load(execute) as model:
        assert model.infer(X=ROW)["Y"].tolist() == ROW.tolist()
        assert len(model.infer_batch([{"X": ROW}] * 3)) == 3


def test_a_coroutine_that_raises_fails_its_requests() -> None:
    async def execute(_: object) -> object:
        await asyncio.sleep(0)
        raise ValueError("late")

    for config in (CONFIG, DECOUPLED):
        with load(execute, config) as model, pytest.raises(moonpool.ModelError) as raised:
            model.infer(X=ROW)
        assert isinstance(raised.value.__cause__, ValueError)


# The end of a model, and other kinds of files


def test_an_exception_of_finalize_is_raised_and_the_imports_are_as_before(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    def finalize(self):\n        raise ValueError('at the end')\n"
    write(tmp_path, {"m/1/model.py": code})
    model = testing.load(tmp_path / "m", config=CONFIG)
    with pytest.raises(ValueError, match="at the end"):
        model.close()

    assert "1.model" not in sys.modules
    model.close()
    with pytest.raises(moonpool.InvalidRequest, match="is closed"):
        model.infer(X=ROW)


def test_a_model_of_a_python_based_backend_answers(tmp_path: Path) -> None:
    code = (
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('Y', r.inputs()[0].as_numpy())])\n"
        "                for r in requests]\n"
    )
    of_model = {"m/config.pbtxt": 'backend: "echo"', "m/1/data": ""}
    write(tmp_path, {"backends/echo/model.py": code, **of_model})
    with testing.load(tmp_path / "m", config=CONFIG, backend_directory=tmp_path / "backends") as model:
        assert model.infer(X=ROW)["Y"].tolist() == ROW.tolist()


def test_a_coroutine_that_still_waits_ends_with_the_model() -> None:
    ended = []

    async def execute(_: object) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    with load(execute, timeout_s=0.5) as model, pytest.raises(moonpool.RequestTimedOut):
        model.infer(X=ROW)
    assert ended == [True]


def test_threads_take_turns() -> None:
    inside = []

    def execute(requests: list[pb_utils.InferenceRequest]) -> object:
        inside.append(1)
        assert len(inside) == 1
        inside.pop()
        return [y() for _ in requests]

    with load(execute) as model:
        threads = [threading.Thread(target=model.infer, kwargs={"X": ROW}) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model.infer(X=ROW)
