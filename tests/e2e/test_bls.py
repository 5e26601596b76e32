"""Tests of requests from models to models."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.hosting import ECHO, MODELS, Config, hosted, is_running, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import ModelError

CALLER: Config = {
    "input": [tensor("DO", "STRING", 1), tensor("X", "FP32", -1)],
    "output": [tensor("Y", "FP32", -1), tensor("SAID", "STRING", 1)],
}
CALLEE: Config = {"input": [tensor("X", "FP32", -1)], "output": [tensor("Y", "FP32", -1), tensor("SAID", "STRING", 1)]}
SQUARE: Config = {"input": [tensor("X", "FP32", -1)], "output": [tensor("Y", "FP32", -1)]}
# With a queue policy, requests may have a timeout.
HASTY: Config = {
    "max_batch_size": 0,
    "dynamic_batching": {
        "default_queue_policy": {"allow_timeout_override": True, "default_timeout_microseconds": 3_600_000_000}
    },
}
WORDS: Config = {"input": [tensor("WORDS", "STRING", -1, -1)], "output": [tensor("OUT_WORDS", "STRING", -1, -1)]}
X = np.arange(4, dtype=np.float32)
PATIENCE_S = 60.0


def callee(mode: str) -> Config:
    return {**CALLEE, "parameters": {"MODE": {"string_value": mode}}}


@pytest.fixture(scope="module", autouse=True)
def models(runtime: moonpool.Runtime) -> Iterator[None]:
    names = ["slow", "raises", "refuses", "told"]
    runtime.load("caller", MODELS / "caller.py", config={**CALLER, **HASTY}, instances=2)
    runtime.load("square", MODELS / "square.py", config=SQUARE)
    runtime.load("mirror", MODELS / "echo.py", config=ECHO)
    runtime.load("words", MODELS / "echo.py", config=WORDS)
    runtime.load("hasty", MODELS / "callee.py", config={**callee("slow"), **HASTY})
    for name in names:
        runtime.load(name, MODELS / "callee.py", config=callee(name))
    yield
    for name in ["caller", "square", "mirror", "words", "hasty", *names]:
        runtime.unload(name)


def do(runtime: moonpool.Runtime, name: str, x: NDArray[Any] = X, model: str = "caller", **told: Any) -> Any:
    """Return the model's report on an action: its text if there is one, else its numbers."""
    asked = {"DO": [name + json.dumps(told)], "X": x}
    outputs = runtime.infer(model, asked, timeout_s=PATIENCE_S)
    return outputs["SAID"][0].decode() if "SAID" in outputs else outputs["Y"].copy()


def squares(times: int) -> list[float]:
    return [float(sum((x + i) ** 2 for i in range(times))) for x in X]


@pytest.mark.promise(
    "Requests between models",
    "A model may call other models from `execute`, from coroutines and from its threads, also "
    "after its batch was answered, and from all of these at the same time.",
)
def test_a_model_asks_another_one(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "once").tolist() == [0, 1, 4, 9]


def test_where_no_outputs_are_named_all_come(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "unnamed").tolist() == [0, 1, 4, 9]


def test_a_model_asks_for_as_long_as_it_likes(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "often", times=1000).tolist() == ((X + 999) ** 2).tolist()


@pytest.mark.promise("Requests between models", "A model may call other …")
def test_coroutines_ask_at_the_same_time(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "gathered", times=100).tolist() == squares(100)


def test_a_coroutine_that_is_cancelled_withdraws_its_request(runtime: moonpool.Runtime) -> None:
    asked = {"DO": ['given_up{"model": "slow"}'], "X": X}
    assert runtime.infer("caller", asked, timeout_s=PATIENCE_S)["Y"].tolist() == [0, 1, 4, 9]


def test_threads_of_a_model_ask_at_the_same_time(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "in_threads", threads=8, times=50).tolist() == [50 * sum(i * i for i in range(8))]


@pytest.mark.promise("Requests between models", "A model may call other …")
def test_threads_and_coroutines_share_the_channel(runtime: moonpool.Runtime) -> None:
    expected = [50 * sum(i * i for i in range(3)) + each for each in squares(50)]
    assert do(runtime, "mixed", times=50).tolist() == expected


@pytest.mark.promise("Requests between models", "A model may call other …")
def test_a_thread_asks_after_its_batch_was_answered(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "late", MODELS / "caller.py", CALLER):
        for _ in range(3):
            do(runtime, "late", model="late")
            assert do(runtime, "go", model="late").tolist() == [0, 1, 4, 9]


# Forks


@pytest.mark.promise(
    "Requests between models",
    "Processes that the model forked can call models, and so can their children. One that "
    "dies while it waits harms no other process.",
)
@pytest.mark.needs("processes")
def test_a_pool_of_processes_asks(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "in_pool", processes=4).tolist() == squares(4)


@pytest.mark.promise("Requests between models", "Processes that the model forked …")
@pytest.mark.needs("processes")
@pytest.mark.parametrize("depth", [0, 2])
def test_a_child_of_a_child_asks(runtime: moonpool.Runtime, depth: int) -> None:
    assert do(runtime, "in_child", depth=depth).tolist() == [(depth + 1) * i * i for i in range(4)]


@pytest.mark.needs("processes")
def test_a_child_has_all_that_its_model_has_but_streams(runtime: moonpool.Runtime) -> None:
    error, refusal, response, is_ready, shape = json.loads(do(runtime, "child_report"))
    assert "Request for unknown model: 'nobody' is not found" in error
    assert "decoupled=True work in the model's own process only" in refusal
    assert (response, is_ready, shape) == ([0, 1, 4, 9], True, [4])


@pytest.mark.promise("Requests between models", "Processes that the model forked …")
@pytest.mark.needs("processes")
def test_a_child_that_dies_while_it_waits_harms_nobody(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "dead_child").tolist() == [0, 1, 4, 9]


# Errors


@pytest.mark.promise(
    "Requests between models",
    "Errors of a call are in its response, with Triton's texts where Triton has some, and with their codes.",
)
@pytest.mark.promise(
    "Readiness",
    "A model that asks a model that does not exist gets the text of Triton 26.x, also in "
    "tritonserver and in `moonpool.testing`.",
)
@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            {"model": "nobody"},
            "NOT_FOUND: Model nobody - Error when running inference: Request for unknown model: 'nobody' is not found",
        ),
        (
            {"model_version": 7},
            "NOT_FOUND: Model square - Error when running inference: Request for unknown model: "
            "'square' version 7 is not found",
        ),
        (
            {"output": "Z"},
            "INVALID_ARG: Model square - Error when running inference: unexpected inference output "
            "'Z' for model 'square'",
        ),
        (
            {"name": "W"},
            "INVALID_ARG: Model square - Error when running inference: unexpected inference input "
            "'W' for model 'square'",
        ),
        ({"model": "refuses"}, "ALREADY_EXISTS: not today"),
        ({"model": "hasty", "timeout": 5}, "UNAVAILABLE: Request timeout expired"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_an_error_comes_in_the_response_with_its_code(
    runtime: moonpool.Runtime, told: dict[str, Any], said: str
) -> None:
    asked = {"DO": ["error" + json.dumps(told)], "X": X}
    outputs = runtime.infer("caller", asked, timeout_s=PATIENCE_S)
    assert outputs["SAID"][0].decode() == said


@pytest.mark.promise(
    "Requests between models",
    "The timeout of a request, from a client or a model, bounds only the time in the queue, and "
    "only if the queue policy allows it. A model never sees a request that came too late.",
)
def test_a_timeout_is_for_the_queue_and_not_for_the_model(runtime: moonpool.Runtime) -> None:
    # Both models take longer than the timeout. One has no queue policy, and the other is idle.
    for model, timeout_us in ("slow", 5), ("hasty", 100_000):
        told = json.dumps({"model": model, "timeout": timeout_us})
        outputs = runtime.infer("caller", {"DO": ["once" + told], "X": X}, timeout_s=PATIENCE_S)
        assert outputs["Y"].tolist() == [0, 1, 4, 9]


@pytest.mark.promise("Requests between models", "The timeout of a request, from …")
def test_a_model_never_sees_a_request_that_comes_too_late(runtime: moonpool.Runtime) -> None:
    before = runtime.statistics("hasty")["inference_stats"]

    for timeout_us in (1, 5):
        told = json.dumps({"model": "hasty", "timeout": timeout_us})
        outputs = runtime.infer("caller", {"DO": ["error" + told], "X": X}, timeout_s=PATIENCE_S)
        assert outputs["SAID"][0] == b"UNAVAILABLE: Request timeout expired"

    after = runtime.statistics("hasty")["inference_stats"]
    assert after["fail"]["count"] == before["fail"]["count"] + 2
    assert after["compute_infer"] == before["compute_infer"]


@pytest.mark.promise("Requests between models", "Errors of a call are …")
def test_an_exception_of_the_other_model_is_in_the_response(runtime: moonpool.Runtime) -> None:
    asked = {"DO": ['error{"model": "raises"}'], "X": X}
    said = runtime.infer("caller", asked, timeout_s=PATIENCE_S)["SAID"][0].decode()
    assert said.startswith("INTERNAL: Failed to process the request(s) for model 'raises_0'")
    assert "on purpose" in said


def test_a_model_cannot_ask_before_it_executes(runtime: moonpool.Runtime) -> None:
    said = do(runtime, "initialized")
    assert said == "BLS is only supported during the 'execute' function."


FINALIZES = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]

    def finalize(self):
        asked = pb_utils.InferenceRequest(model_name="square", inputs=[], requested_output_names=[])
        asked.exec()
"""


def test_a_model_cannot_ask_while_it_finalizes(
    runtime: moonpool.Runtime, model_file: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), hosted(runtime, "ends", model_file(FINALIZES), SQUARE):
        pass
    assert "BLS is only supported during the 'execute' function." in caplog.text


@pytest.mark.promise("At the limits", "A value that does not fit …")
def test_fields_that_fit_no_message_are_refused_in_the_response(runtime: moonpool.Runtime) -> None:
    before = runtime.instances("caller")
    said = json.loads(do(runtime, "bad_fields"))
    names = ["correlation_id", "model_version", "33 dimensions"]
    assert len(said) >= 2
    for name, each in zip(names, said, strict=False):
        assert each.startswith("INVALID_ARG: Model square - Error when running inference")
        assert name in each
    assert runtime.instances("caller") == before


def test_the_details_of_a_request_arrive(runtime: moonpool.Runtime) -> None:
    told = json.loads(do(runtime, "parameters"))
    assert told == ["id", 7, 1, 11_000_000_000, {"a": 1, "b": "two", "c": True}]


# Models in models


def test_a_model_asks_itself(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "recursive", depth=1).tolist() == (X + 1).tolist()


@pytest.mark.promise(
    "Requests between models",
    "Calls of models that wait for themselves end with the timeout, with the client that "
    "leaves, with an unload and with the end of the runtime.",
)
def test_a_model_that_waits_for_itself_is_ended_by_its_timeout(runtime: moonpool.Runtime) -> None:
    # Both instances are waiting, and the third request finds none.
    assert do(runtime, "recursive", depth=2, timeout=200_000) == ("UNAVAILABLE: Request timeout expired")


@pytest.mark.promise("Requests between models", "Calls of models that wait …")
def test_models_that_wait_for_each_other_are_let_go_when_the_client_leaves(runtime: moonpool.Runtime) -> None:
    # Both instances are waiting, the third request finds none, and none of them has a timeout.
    asked = {"DO": ['recursive{"depth": 2}'], "X": X}
    with pytest.raises(moonpool.RequestTimedOut):
        runtime.infer("caller", asked, timeout_s=0.5)
    for _ in range(2):
        assert do(runtime, "once").tolist() == [0, 1, 4, 9]


def test_an_iterator_over_a_model_with_one_response(runtime: moonpool.Runtime) -> None:
    first, again = json.loads(do(runtime, "iterated"))
    assert first == again == [[0, 1, 4, 9]]


# Tensors


def test_strings_go_and_come(runtime: moonpool.Runtime) -> None:
    assert json.loads(do(runtime, "strings")) == [0, 70_000, 1, 2]


@pytest.mark.parametrize("size", [10, 20_000, 1 << 20])
def test_a_reply_is_good_for_the_next_request(runtime: moonpool.Runtime, size: int) -> None:
    assert do(runtime, "chained", size=size).tolist() == [0, 1, 4, 9]


@pytest.mark.promise(
    "Requests between models",
    "Large tensors go from model to model without a copy. Responses stay valid after the model that sent them is gone.",
)
@pytest.mark.needs("shared memory")
def test_large_memory_that_is_handed_on_and_back_is_the_same(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "echoed", size=1 << 18).tolist() == [8, 8]
    assert do(runtime, "echoed", size=16).tolist() == [7, 8]


@pytest.mark.promise("Requests between models", "Large tensors go from model …")
def test_replies_stay_valid_when_the_model_that_gave_them_is_gone(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "keeper", MODELS / "caller.py", CALLER):
        with hosted(runtime, "brief", MODELS / "square.py", SQUARE):
            asked = {"DO": ['keep{"size": 262144, "model": "brief"}'], "X": X}
            runtime.infer("keeper", asked, timeout_s=PATIENCE_S)
            os.kill(runtime.instances("brief")[0]["pid"], signal.SIGKILL)
            wait_until(lambda: runtime.instances("brief")[0]["restarts"] == 1)
            runtime.infer("keeper", asked, timeout_s=PATIENCE_S)
        assert do(runtime, "kept", model="keeper").tolist() == [9 * 262144.0] * 2


@pytest.mark.promise("Requests between models", "Memory does not grow over many calls.")
def test_memory_does_not_grow_over_many_calls(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "counter", MODELS / "caller.py", CALLER):
        record = hosted_in(runtime, "counter").supervisor.records[0]
        link = record.instance.state.link
        for size in (100, 50_000):
            x = np.ones(size, np.float32)
            regions = do(runtime, "memory", x, model="counter", times=100)
            size_bytes = link.size_bytes()
            for _ in range(10):  # each with its own time to answer
                do(runtime, "memory", x, model="counter", times=200)

            def is_as_before(x: Any = x, most: tuple[Any, ...] = (regions, size_bytes)) -> bool:
                now = do(runtime, "memory", x, model="counter", times=10)
                return bool(now <= most[0] and link.size_bytes() <= most[1])

            # A busy machine may have needed more for a moment. That is given back after some seconds.
            wait_until(is_as_before, what="the memory to be as before")


# Ends


@pytest.mark.promise("Requests between models", "Calls end with the process …")
def test_a_model_whose_callee_dies_is_told(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "dies", MODELS / "callee.py", callee("dies")):
        asked = {"DO": ['error{"model": "dies"}'], "X": X}
        said = runtime.infer("caller", asked, timeout_s=PATIENCE_S)["SAID"][0].decode()
        assert "Stub process 'dies_0' is not healthy. It exited with 3 during execute" in said


@pytest.mark.promise(
    "Requests between models",
    "Calls end with the process that made them. A model whose callee dies gets an error. A "
    "model is unloaded after the models that called it have their answers.",
)
def test_a_call_ends_with_the_process_that_made_it(runtime: moonpool.Runtime) -> None:
    with (
        hosted(runtime, "waits", MODELS / "callee.py", callee("until cancelled")),
        hosted(runtime, "short", MODELS / "caller.py", CALLER),
    ):
        failed = runtime.submit("short", {"DO": ['once{"model": "waits"}'], "X": X})
        asked = hosted_in(runtime, "waits").scheduler
        wait_until(lambda: asked.in_flight == 1)
        pid = runtime.instances("short")[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(moonpool.StubDied):
            failed.result(PATIENCE_S)
        wait_until(lambda: asked.in_flight == 0)
        wait_until(lambda: runtime.is_ready("short"))
    assert do(runtime, "once", model="caller").tolist() == [0, 1, 4, 9]
    assert not is_running(pid)


@pytest.mark.promise("Requests between models", "Calls of models that wait …")
def test_a_runtime_is_closed_while_models_ask_each_other() -> None:
    with moonpool.Runtime(drain_timeout_s=0.2) as runtime:
        runtime.load("caller", MODELS / "caller.py", config=CALLER)
        runtime.load("square", MODELS / "square.py", config=SQUARE)
        # The only instance waits for itself, without end.
        stuck = runtime.submit("caller", {"DO": ['recursive{"depth": 1}'], "X": X})
        scheduler = hosted_in(runtime, "caller").scheduler
        wait_until(lambda: scheduler.queued == 1)
        pid = runtime.instances("caller")[0]["pid"]
    wait_until(stuck.done)
    assert not is_running(pid)


@pytest.mark.promise("Requests between models", "Calls end with the process …")
def test_a_model_is_unloaded_while_another_asks_it(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    go = tmp_path / "go"
    runtime.load("gone", MODELS / "callee.py", config=callee(f"until {go}"))
    asked = {"DO": ['once{"model": "gone"}'], "X": X}
    answer = runtime.submit("caller", asked)
    gone = hosted_in(runtime, "gone")
    wait_until(lambda: gone.scheduler.executing == 1)
    unloading = threading.Thread(target=runtime.unload, args=("gone",))
    unloading.start()
    wait_until(lambda: "gone" not in runtime.models())
    go.touch()
    assert answer.result(PATIENCE_S).outputs["Y"].tolist() == [0, 1, 4, 9]
    unloading.join(PATIENCE_S)
    with pytest.raises(ModelError, match="unknown model: 'gone' has no available versions"):
        runtime.infer("caller", asked, timeout_s=PATIENCE_S)
