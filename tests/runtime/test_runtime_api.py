"""Tests of the runtime from Python: every public method, on real stubs."""

from __future__ import annotations

import asyncio
import gc
import operator
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.inside import registry_of
from tests.runtime.adders import CONFIG, repository, rows, runtime, write_model
from tests.runtime.interrupting import interrupted_everywhere
from tests.runtime.recorder import PATIENCE_S
from tests.waiting import wait_until

import moonpool
from moonpool import Runtime
from moonpool.runtime.hosting.registry import ModelRegistry

__all__ = ["repository", "runtime"]

# Requests


@pytest.mark.promise(
    "Requests", "Requests from threads, event loops and futures get the same answers, and each caller gets its own."
)
def test_every_way_to_ask_gives_the_same_answer(runtime: Runtime) -> None:
    async def ask() -> list[Any]:
        outputs = await runtime.ainfer("add", rows(1, 2))
        response = await runtime.arequest("add", rows(1, 2))
        return [outputs["SUM"], response["SUM"]]

    answers = [
        runtime.infer("add", rows(1, 2))["SUM"],
        runtime.request("add", rows(1, 2)).outputs["SUM"],
        runtime.submit("add", rows(1, 2)).result(PATIENCE_S).outputs["SUM"],
        runtime.submit("add", rows(1, 2)).result(PATIENCE_S)["SUM"],
        *(response["SUM"] for response in runtime.stream("add", rows(1, 2))),
        *asyncio.run(ask()),
    ]
    assert len(answers) == 7
    for answer in answers:
        assert answer.dtype == np.float32
        assert answer.tolist() == [[2, 3]]


def test_a_request_may_want_some_outputs_and_say_things(runtime: Runtime) -> None:
    parameters: dict[str, bool | int | float | str] = {"text": "a", "number": 3, "yes": True}
    response = runtime.request("add", rows(1), outputs=["SUM"], request_id="first", parameters=parameters)
    assert set(response.outputs) == {"SUM"}
    assert response.request_id == "first"
    assert response.parameters == {"id": "first", **parameters}
    assert repr(response) == "<Response SUM float32[1, 1]>"
    assert "SUM" in response
    assert "sum" not in response
    assert dict(response) == response.outputs
    with pytest.raises(KeyError, match=r"no output 'sum'; it has \['SUM'\]"):
        response["sum"]


def test_an_output_that_is_asked_for_twice_comes_once_and_alone(runtime: Runtime) -> None:
    assert set(runtime.infer("add", rows(1), outputs=["SUM", "SUM"])) == {"SUM"}


def test_options_of_request_are_those_of_infer(runtime: Runtime) -> None:
    outputs = runtime.infer("add", rows(1), outputs=["VERSION"], request_id="x", priority=1)
    assert {name: array.tolist() for name, array in outputs.items()} == {"VERSION": [[1]]}
    with pytest.raises(TypeError, match="no_such_option"):
        runtime.infer("add", rows(1), no_such_option=1)  # type: ignore[call-arg]


def test_a_call_works_inside_a_running_event_loop(runtime: Runtime) -> None:
    # Cells of a notebook run like this.
    async def cell() -> float:
        return float(runtime.infer("add", rows(4))["SUM"][0, 0])

    assert asyncio.run(cell()) == 5


DOUBLE = """
import os, time
from moonpool import Batch, Float32

while os.path.exists(os.path.join(os.path.dirname(__file__), "stuck")):
    time.sleep(0.01)

class Double:
    def __call__(self, X: Float32[Batch, 1]) -> Float32[Batch, 1]:
        while X[0, 0] < 0:
            time.sleep(0.01)
        return 2 * X
"""


@pytest.fixture
def double(tmp_path: Path) -> Path:
    file = tmp_path / "double.py"
    file.write_text(DOUBLE)
    return file


@pytest.mark.promise(
    "Lifecycle",
    "Loading, scaling, unloading and closing have awaitable forms, which do not block the event loop. Cancelling their "
    "tasks ends them early, and nothing is left at work.",
)
def test_an_event_loop_goes_on_while_models_come_and_go(double: Path) -> None:
    stuck = double.with_name("stuck")
    stuck.touch()

    async def use() -> None:
        async with Runtime() as runtime:
            loading = asyncio.ensure_future(runtime.aload("m", double, instances=1))
            await asyncio.sleep(0)
            assert not loading.done()
            stuck.unlink()
            await loading
            outputs = await runtime.ainfer("m", {"X": np.ones((1, 1), np.float32)})
            assert outputs["OUTPUT0"].tolist() == [[2]]
            await runtime.ascale("m", 2)
            assert len(runtime.instances("m")) == 2
            with pytest.raises(moonpool.ModelNotFound):
                await runtime.aunload("other")
            await runtime.aunload("m")
            assert runtime.models() == {}
        assert repr(runtime) == "<moonpool.Runtime, closed>"
        await runtime.aclose()

    asyncio.run(use())


@pytest.mark.promise("Lifecycle", "Loading, scaling, unloading and closing have …")
def test_a_cancelled_load_is_given_up(double: Path) -> None:
    double.with_name("stuck").touch()

    async def use() -> None:
        async with Runtime() as runtime:
            loading = asyncio.ensure_future(runtime.aload("m", double))
            await asyncio.to_thread(wait_until, lambda: "m" in registry_of(runtime).statuses())
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            with pytest.raises(moonpool.ModelNotFound):
                runtime.config("m")

    asyncio.run(use())


@pytest.mark.promise("Lifecycle", "Loading, scaling, unloading and closing have …")
@pytest.mark.parametrize("method", ["aclose", "aunload"])
def test_a_cancelled_end_ends_at_once(double: Path, method: str) -> None:
    async def use() -> None:
        async with Runtime(drain_timeout_s=1e6) as runtime:
            await runtime.aload("m", double)
            waiting = runtime.submit("m", {"X": np.full((1, 1), -1, np.float32)})
            end = runtime.aclose() if method == "aclose" else runtime.aunload("m")
            ending = asyncio.ensure_future(end)
            # An end that is cancelled before its thread runs has not begun, and the model stays.
            await asyncio.to_thread(wait_until, lambda: not runtime.models())
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
            with pytest.raises(moonpool.ModelUnavailable):
                waiting.result(PATIENCE_S)

    asyncio.run(use())


def test_several_requests_travel_in_one_message_and_are_answered_each(tmp_path: Path) -> None:
    policy = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 60000000 }"
    folder = write_model(tmp_path, "late", 1, config=CONFIG + policy)
    with Runtime() as runtime:
        runtime.load("late", folder, instances=1)
        futures = [runtime.submit("late", rows(i)) for i in range(4)]
        outputs = [future.result(PATIENCE_S).outputs for future in futures]
        assert [each["SUM"].tolist() for each in outputs] == [[[i + 1]] for i in range(4)]
        assert [each["TOGETHER"].tolist() for each in outputs] == [[[4]]] * 4
        shown = runtime.statistics("late")
        assert (shown["inference_count"], shown["execution_count"]) == (4, 1)
        assert [each["batch_size"] for each in shown["batch_stats"]] == [4]


@pytest.mark.promise("Requests", "Requests from threads, event loops …")
def test_many_callers_of_many_kinds_get_their_own_answers(runtime: Runtime) -> None:
    answers: dict[int, list[float]] = {}
    count = 60

    def by_thread(first: int) -> None:
        answers[first] = [runtime.infer("add", rows(first + i))["SUM"][0, 0] for i in range(count)]

    def by_loop(first: int) -> None:
        async def main() -> list[float]:
            asked = (runtime.ainfer("add", rows(first + i)) for i in range(count))
            return [each["SUM"][0, 0] for each in await asyncio.gather(*asked)]

        answers[first] = asyncio.run(main())

    threads = [threading.Thread(target=way, args=(1000 * i,)) for i, way in enumerate([by_thread, by_loop] * 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == {1000 * i: [1000 * i + j + 1 for j in range(count)] for i in range(len(threads))}
    assert runtime.instances("add")[0]["restarts"] == 0


# Models and instances


def test_models_and_versions_are_listed(runtime: Runtime) -> None:
    assert runtime.models() == {"add": [1], "versions": [1, 2, 10]}
    assert repr(runtime) == "<moonpool.Runtime with models ['add', 'versions']>"


def test_a_request_goes_to_the_latest_version_or_the_one_it_names(runtime: Runtime) -> None:
    def answered(version: int | None) -> int:
        return int(runtime.infer("versions", rows(1), version=version)["VERSION"][0, 0])

    assert [answered(version) for version in (None, 1, 2, 10)] == [10, 1, 2, 10]
    for method in (runtime.infer, runtime.submit):
        with pytest.raises(moonpool.ModelNotFound, match="'versions' version 3 is not found"):
            method("versions", rows(1), version=3)


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ({"latest": {"num_versions": 1}}, [10]),
        ({"latest": {"num_versions": 2}}, [2, 10]),
        ({"specific": {"versions": [1, 10]}}, [1, 10]),
        ({"all": {}}, [1, 2, 10]),
    ],
)
def test_the_version_policy_says_which_versions_are_loaded(
    repository: Path, policy: dict[str, Any], versions: list[int]
) -> None:
    with Runtime() as runtime:
        runtime.load("m", repository / "versions", config={"version_policy": policy})
        assert runtime.models() == {"m": versions}
        assert [runtime.is_ready("m", version) for version in versions] == [True] * len(versions)
        assert not runtime.is_ready("m", 3)


def test_readiness_is_told(runtime: Runtime) -> None:
    assert runtime.is_ready("add")
    assert runtime.is_ready("add", 1)
    assert not runtime.is_ready("add", 2)
    assert not runtime.is_ready("nobody")


def test_the_configuration_is_the_complete_one(runtime: Runtime) -> None:
    config = runtime.config("add")
    assert (config.name, config.max_batch_size) == ("add", 8)
    assert [tensor.name for tensor in config.outputs] == ["SUM", "VERSION", "TOGETHER"]
    with pytest.raises(moonpool.ModelNotFound):
        runtime.config("nobody")


def test_instances_are_shown_with_state_and_process(runtime: Runtime) -> None:
    (shown,) = runtime.instances("add")
    assert shown["name"] == "add_0_0"
    assert (shown["state"], shown["restarts"]) == ("READY", 0)
    assert b"triton_python_backend_stub" in Path(f"/proc/{shown['pid']}/cmdline").read_bytes()


def test_statistics_count_requests_and_executions_of_a_version(runtime: Runtime) -> None:
    before = runtime.statistics("versions", 2)
    for _ in range(3):
        runtime.infer("versions", {k: np.ones((2, 3), np.float32) for k in "AB"}, version=2)
    with pytest.raises(moonpool.InvalidRequest):
        runtime.infer("versions", {}, version=2)
    after = runtime.statistics("versions", 2)
    assert (after["name"], after["version"]) == ("versions", "2")
    assert after["inference_count"] - before["inference_count"] == 6
    assert after["execution_count"] - before["execution_count"] == 3
    assert runtime.statistics("versions", 1)["execution_count"] <= 1


@pytest.mark.promise("The model repository of a server", "If a model of a repository …")
def test_one_bad_model_of_a_repository_says_how_to_load_the_others(tmp_path: Path) -> None:
    write_model(tmp_path, "add", 1)
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "config.pbtxt").write_text('platform: "ensemble"\n')
    words = "ensemble scheduling must be set for ensemble all"
    with pytest.raises(moonpool.MoonpoolError, match=words) as caught, Runtime(tmp_path):
        pass
    (note,) = caught.value.__notes__
    assert note.startswith("One of 2 models could not be loaded, so none is loaded. ")

    with Runtime(tmp_path, models=["add"]) as runtime:  # the note advises this
        assert runtime.models() == {"add": [1]}
    with pytest.raises(moonpool.MoonpoolError, match=words) as caught:
        Runtime(tmp_path, models=["all"])
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.promise(
    "Lifecycle",
    "A signal handler may raise at any point of `close`: what is left to do is done when the last reference to the "
    "runtime is gone.",
)
def test_a_runtime_whose_close_was_interrupted_at_any_point_comes_to_its_end() -> None:
    def count() -> tuple[int, int, int]:
        gc.collect()
        registries = sum(isinstance(each, ModelRegistry) for each in gc.get_objects())
        # Python makes a dummy for each thread of another kind that asks for its name, and keeps it.
        threads = sum(not isinstance(each, threading._DummyThread) for each in threading.enumerate())
        return threads, len(os.listdir("/proc/self/fd")), registries

    # Something of earlier tests may still be ending. What would be left here adds up.
    before = count()
    made = [Runtime()]

    def check() -> None:
        made.clear()
        wait_until(lambda: all(map(operator.le, count(), before)), PATIENCE_S)
        made.append(Runtime())

    assert interrupted_everywhere(lambda: made[0].close(), check, at_lines=False) > 20
    made[0].close()
